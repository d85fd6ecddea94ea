/*
 * adapter.cpp: what adapters of a network need of a GPU: descriptors of its memory, their registers mapped for it, and memory of the host.
 */
#include <mutex>
#include <set>

#include "driver.h"

namespace twin {
namespace {

constexpr unsigned kPortable = 1, kDeviceMap = 2, kIoMemory = 4;
constexpr int kDmabuf = 1;
constexpr std::size_t kPage = 4096;

/* Memory that is mapped, by where it begins. */
std::mutex mutex;
std::set<const void*> registers;

} /* namespace */
} /* namespace twin */

using namespace twin;

/* Memory is mapped for kernels where it lies, once: a page of registers as memory of a device, any pages of the host as such. */
TWIN int cuMemHostRegister_v2(void* at, std::size_t bytes, unsigned flags) {
    const bool page = flags == (kPortable | kDeviceMap | kIoMemory) && bytes == kPage;
    const bool host = flags == (kPortable | kDeviceMap) && (std::uint64_t)at % kPage == 0 && bytes != 0 && bytes % kPage == 0;
    if (!page && !host) return refuse("such memory of others");
    std::lock_guard<std::mutex> lock(mutex);
    return registers.insert(at).second ? kSuccess : kAlreadyRegistered;
}
TWIN int cuMemHostUnregister(void* at) {
    std::lock_guard<std::mutex> lock(mutex);
    return registers.erase(at) == 1 ? kSuccess : kNotRegistered;
}

/* The file that a block is: so other processes that have mapped it see what comes by the descriptor, too. */
TWIN int cuMemGetHandleForAddressRange(void* handle, std::uint64_t at, std::size_t bytes, int kind, unsigned long long flags) {
    if (kind != kDmabuf || flags != 0 || at % kPage || bytes % kPage || bytes == 0) return kInvalidValue;
    const int file = descriptor(at, bytes);
    if (file < 0) return refuse("descriptors of a part of a block");
    *(int*)handle = file;
    return kSuccess;
}
