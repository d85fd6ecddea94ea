/*
 * adapter.cpp: what adapters of a network need of a GPU: descriptors of its memory, their registers mapped for it, and memory of the host.
 */
#include <mutex>
#include <map>

#include "driver.h"

namespace twin {
namespace {

constexpr unsigned kPortable = 1, kDeviceMap = 2, kIoMemory = 4;
constexpr int kDmabuf = 1;
constexpr std::size_t kPage = 4096;

/* Memory that is mapped, by where it begins, and whether it is registers. */
std::mutex mutex;
std::map<const void*, bool> registered;

} /* namespace */
} /* namespace twin */

using namespace twin;

/* Memory is mapped for kernels where it lies, once: a page of registers as memory of a device, any pages of the host as such. */
TWIN int cuMemHostRegister_v2(void* at, std::size_t bytes, unsigned flags) {
    const bool page = flags == (kPortable | kDeviceMap | kIoMemory) && bytes == kPage;
    const bool host = flags == (kPortable | kDeviceMap) && (std::uint64_t)at % kPage == 0 && bytes != 0 && bytes % kPage == 0;
    if (!page && !host) return refuse("such memory of others");
    std::lock_guard<std::mutex> lock(mutex);
    return registered.emplace(at, page).second ? kSuccess : kAlreadyRegistered;
}
/* Memory of the host waits for all kernels that run, and holds up launches meanwhile: what a driver may do where nobody has tried it. */
TWIN int cuMemHostUnregister(void* at) {
    bool page;
    {
        std::lock_guard<std::mutex> lock(mutex);
        const auto found = registered.find(at);
        if (found == registered.end()) return kNotRegistered;
        page = found->second;
        registered.erase(found);
    }
    if (!page) wait_for_launches();
    return kSuccess;
}

/* The file that a block is: so other processes that have mapped it see what comes by the descriptor, too. */
TWIN int cuMemGetHandleForAddressRange(void* handle, std::uint64_t at, std::size_t bytes, int kind, unsigned long long flags) {
    if (kind != kDmabuf || flags != 0 || at % kPage || bytes % kPage || bytes == 0) return kInvalidValue;
    const int file = descriptor(at, bytes);
    if (file < 0) return refuse("descriptors of a part of a block");
    *(int*)handle = file;
    return kSuccess;
}
