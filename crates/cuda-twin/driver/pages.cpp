/*
 * pages.cpp: memory that is mapped piece by piece into ranges of addresses, as the driver's cuMemCreate and cuMemMap have it. A piece is a file in memory, which
 * other processes of the user may map, too; addresses without one, or that nobody has been given access to, are no memory.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "driver.h"

namespace twin {
namespace {

constexpr std::size_t kPiece = 2 << 20;
constexpr int kFileDescriptor = 1;

/* A piece: whether somebody holds it, and how often it is mapped. It is freed when neither is so. */
struct Pages {
    int file;
    std::size_t bytes;
    bool is_held, is_own;
    int mapped;
};

/* CUmemAccessDesc, of which the twin looks at the rights alone: all its GPUs have the same addresses. */
struct Access {
    int kind, gpu, rights;
};
constexpr int kReadWrite = 3;

/* Of what is below. */
std::mutex mutex;
std::map<std::uint64_t, Pages> pages;
std::uint64_t last = 0;
/* What is mapped, and reserved, by address. */
struct Mapped {
    std::size_t bytes;
    std::uint64_t pages;
};
std::map<std::uint64_t, Mapped> mapped;
std::map<std::uint64_t, std::size_t> reserved;
/* Bytes of pieces made here that live. */
std::size_t living = 0;

bool is_whole(std::uint64_t bytes) { return bytes != 0 && bytes % kPiece == 0; }

void free_unused(std::map<std::uint64_t, Pages>::iterator found) {
    if (found->second.is_held || found->second.mapped) return;
    if (found->second.is_own) living -= found->second.bytes;
    close(found->second.file);
    pages.erase(found);
}

std::uint64_t keep(int file, std::size_t bytes, bool is_own) {
    pages[++last] = {file, bytes, true, is_own, 0};
    return last;
}

/* Nothing may be there, as at first. */
bool bar(std::uint64_t at, std::size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void*)at, bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED;
}

} /* namespace */

std::size_t living_pages() {
    std::lock_guard<std::mutex> lock(mutex);
    return living;
}

} /* namespace twin */

using namespace twin;

TWIN int cuMemGetAllocationGranularity(std::size_t* bytes, const void*, int) {
    *bytes = kPiece;
    return kSuccess;
}
TWIN int cuMemAddressReserve(std::uint64_t* at, std::size_t bytes, std::size_t, std::uint64_t, unsigned long long) {
    if (!is_whole(bytes)) return kInvalidValue;
    /* At a multiple of a piece, as the driver's. */
    void* memory = mmap(nullptr, bytes + kPiece, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    const std::uint64_t first = (std::uint64_t)memory, from = (first + kPiece - 1) / kPiece * kPiece;
    if (from > first) munmap(memory, from - first);
    munmap((void*)(from + bytes), first + kPiece - from);
    std::lock_guard<std::mutex> lock(mutex);
    reserved[*at = from] = bytes;
    return kSuccess;
}
TWIN int cuMemAddressFree(std::uint64_t at, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = reserved.find(at);
    const auto next = mapped.lower_bound(at);
    if (found == reserved.end() || found->second != bytes || (next != mapped.end() && next->first < at + bytes)) return kInvalidValue;
    munmap((void*)at, bytes);
    reserved.erase(found);
    return kSuccess;
}
TWIN int cuMemCreate(std::uint64_t* handle, std::size_t bytes, const void*, unsigned long long) {
    if (!is_whole(bytes)) return kInvalidValue;
    std::lock_guard<std::mutex> lock(mutex);
    if (bytes > kMemory - living) return kOutOfMemory;
    const int file = memfd_create("cuda-twin", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) {
        if (file >= 0) close(file);
        return kOutOfMemory;
    }
    living += bytes;
    *handle = keep(file, bytes, true);
    return kSuccess;
}
TWIN int cuMemRelease(std::uint64_t handle) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = pages.find(handle);
    if (found == pages.end() || !found->second.is_held) return kInvalidValue;
    found->second.is_held = false;
    free_unused(found);
    return kSuccess;
}
TWIN int cuMemMap(std::uint64_t at, std::size_t bytes, std::size_t offset, std::uint64_t handle, unsigned long long) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = pages.find(handle);
    if (found == pages.end() || offset != 0 || bytes != found->second.bytes || at % kPiece) return kInvalidValue;
    auto range = reserved.upper_bound(at);
    if (range == reserved.begin() || (--range)->first + range->second < at + bytes) return kInvalidValue;
    /* Where something is mapped nothing else may be. */
    auto next = mapped.lower_bound(at);
    if (next != mapped.end() && next->first < at + bytes) return kInvalidValue;
    if (next != mapped.begin() && (--next)->first + next->second.bytes > at) return kInvalidValue;
    const int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
    if (mmap((void*)at, bytes, PROT_NONE, flags, found->second.file, 0) == MAP_FAILED) return kOutOfMemory;
    found->second.mapped += 1;
    mapped[at] = {bytes, handle};
    return kSuccess;
}
TWIN int cuMemSetAccess(std::uint64_t at, std::size_t bytes, const Access* access, std::size_t count) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = mapped.find(at);
    if (found == mapped.end() || found->second.bytes != bytes || count == 0) return kInvalidValue;
    for (std::size_t i = 0; i < count; i += 1) {
        if (access[i].rights != kReadWrite) return refuse("such access to memory");
        if (access[i].gpu < 0 || access[i].gpu >= gpus()) return kInvalidDevice;
    }
    return mprotect((void*)at, bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kOutOfMemory;
}
TWIN int cuMemUnmap(std::uint64_t at, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = mapped.find(at);
    if (found == mapped.end() || found->second.bytes != bytes) return kInvalidValue;
    if (!bar(at, bytes)) return kOutOfMemory;
    const auto of = pages.find(found->second.pages);
    mapped.erase(found);
    of->second.mapped -= 1;
    free_unused(of);
    return kSuccess;
}
TWIN int cuMemExportToShareableHandle(void* descriptor, std::uint64_t handle, int kind, unsigned long long) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = pages.find(handle);
    if (found == pages.end() || kind != kFileDescriptor) return kInvalidValue;
    const int file = fcntl(found->second.file, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return kOutOfMemory;
    *(int*)descriptor = file;
    return kSuccess;
}
TWIN int cuMemImportFromShareableHandle(std::uint64_t* handle, void* descriptor, int kind) {
    struct stat about;
    const int given = (int)(std::intptr_t)descriptor;
    if (kind != kFileDescriptor || fstat(given, &about) != 0 || !is_whole((std::uint64_t)about.st_size)) return kInvalidValue;
    const int file = fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return kOutOfMemory;
    std::lock_guard<std::mutex> lock(mutex);
    *handle = keep(file, (std::size_t)about.st_size, false);
    return kSuccess;
}
