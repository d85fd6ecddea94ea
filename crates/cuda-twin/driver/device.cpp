/*
 * device.cpp: GPUs, contexts, memory. Device memory is memory of the process, at the same addresses for all its GPUs. What lives long
 * is a file in memory, which other processes of the user may map, too.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "stream.h"

namespace twin {

int gpus() {
    static const int count = [] {
        const char* said = std::getenv("EP_CUDA_TWIN_GPUS");
        const int wanted = said ? std::atoi(said) : 4;
        return wanted < 0 ? 0 : wanted > 64 ? 64 : wanted;
    }();
    return count;
}

namespace {

/* Contexts: one a GPU, known by its address. */
int contexts[64];

/* What nobody has written, and what nobody may read any more. */
constexpr int kFresh = 0xe7, kGone = 0xd9;

/* What lives long: a file, and where it is mapped. */
struct Block {
    int file;
    std::size_t bytes;
};

/* Of the maps below. */
std::mutex mutex;
/* What was allocated here, and what of other processes is mapped here, by address. */
std::map<std::uint64_t, Block> blocks, imports;
/* The sizes of what was taken of the pools. */
std::map<std::uint64_t, std::size_t> taken;
std::uint64_t pooled = 0;

bool map(int file, std::size_t bytes, std::uint64_t* at) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    *at = (std::uint64_t)memory;
    return memory != MAP_FAILED;
}

/* CUipcMemHandle: here a process, its descriptor of a block, and the block's size. */
struct Handle {
    std::uint64_t process, file, bytes, reserved[5];
};
static_assert(sizeof(Handle) == 64, "as the driver's");

} /* namespace */
} /* namespace twin */

using namespace twin;

TWIN int cuInit(unsigned) { return kSuccess; }
TWIN int cuGetErrorString(int code, const char** text) {
    switch (code) {
        case kInvalidValue: *text = "invalid value"; break;
        case kOutOfMemory: *text = "out of memory"; break;
        case kInvalidDevice: *text = "no such GPU"; break;
        case kInvalidImage: *text = "no module of the twin's"; break;
        case kNotFound: *text = "no such kernel in the module"; break;
        case kLaunchTooLarge: *text = "more blocks than fit beside each other"; break;
        case kIllegalState: *text = "the stream is in no state for it"; break;
        case kCaptureUnsupported: *text = "not while a stream is captured"; break;
        case kCaptureInvalidated: *text = "the capture was broken"; break;
        case kCaptureIsolation: *text = "a wait for what a capture does not know"; break;
        case kCapturedEvent: *text = "an event of a capture, which does not come"; break;
        case kCaptureWrongThread: *text = "the capture is another thread's"; break;
        case kNotSupported: *text = "the twin of a GPU has no such thing"; break;
        default: return kInvalidValue;
    }
    return kSuccess;
}

/* ---- GPUs ---- */

TWIN int cuDeviceGetCount(int* count) {
    *count = gpus();
    return kSuccess;
}
TWIN int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < gpus() ? kSuccess : kInvalidDevice;
}
TWIN int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 16: *value = kMultiprocessors; break;
        case 75: *value = kMajor; break;
        case 76: *value = kMinor; break;
        case 33: case 34: case 50: *value = 0; break; /* its place on the PCI bus: the host's own */
        case 97: *value = kSharedMemory; break;
        case 102: case 103: *value = 1; break; /* Memory that is mapped piece by piece, and descriptors of it (pages.cpp). */
        case 118: *value = 100; break; /* What an adapter writes is in order for kernels of the GPU. */
        case 124: *value = 1; break;   /* There are descriptors of its memory (adapter.cpp). */
        default: return refuse("such attribute of a GPU");
    }
    return kSuccess;
}
TWIN int cuDevicePrimaryCtxRetain(int** context, int device) {
    *context = &contexts[device];
    return kSuccess;
}
TWIN int cuCtxSetCurrent(int*) { return kSuccess; }
TWIN int cuDeviceCanAccessPeer(int* possible, int, int) {
    *possible = 1;
    return kSuccess;
}
TWIN int cuCtxEnablePeerAccess(int*, unsigned) { return kSuccess; }

/* ---- memory ---- */

TWIN int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    *free = kMemory - living_pages();
    *total = kMemory;
    return kSuccess;
}
TWIN int cuMemAlloc_v2(std::uint64_t* at, std::size_t bytes) {
    if (not_beside_capture() != kSuccess) return kCaptureUnsupported;
    if (bytes > kMemory) return kOutOfMemory;
    const int file = memfd_create("cuda-twin", MFD_CLOEXEC);
    /* The system gives pages when they are written. */
    if (file < 0 || ftruncate(file, (off_t)((bytes + 4095) & ~4095ull)) != 0 || !map(file, bytes, at)) {
        if (file >= 0) close(file);
        return kOutOfMemory;
    }
    std::lock_guard<std::mutex> lock(mutex);
    blocks[*at] = {file, bytes};
    return kSuccess;
}
TWIN int cuMemHostAlloc(void** at, std::size_t bytes, unsigned) {
    if (not_beside_capture() != kSuccess) return kCaptureUnsupported;
    *at = bytes > kMemory ? nullptr : std::aligned_alloc(4096, (bytes + 4095) & ~4095ull);
    return *at ? kSuccess : kOutOfMemory;
}
TWIN int cuMemHostGetDevicePointer_v2(std::uint64_t* at, void* host, unsigned) {
    *at = (std::uint64_t)host;
    return kSuccess;
}
TWIN int cuMemPoolCreate(void** pool, const void*) {
    *pool = &pooled;
    return kSuccess;
}
TWIN int cuMemPoolSetAttribute(void*, int, void*) { return kSuccess; }
TWIN int cuMemPoolGetAttribute(void*, int, void* value) {
    std::lock_guard<std::mutex> lock(mutex);
    *(std::uint64_t*)value = pooled;
    return kSuccess;
}
TWIN int cuMemAllocFromPoolAsync(std::uint64_t* at, std::size_t bytes, void*, Stream* stream) {
    /* Memory of a graph's own: the twin has none. */
    if (not_in_capture(stream_of(stream)) != kSuccess || not_beside_capture() != kSuccess) return kCaptureUnsupported;
    void* memory = bytes > kMemory ? nullptr : std::aligned_alloc(256, (bytes + 255) & ~255ull);
    if (!memory) return kOutOfMemory;
    {
        std::lock_guard<std::mutex> lock(mutex);
        taken[(std::uint64_t)memory] = bytes;
        pooled += bytes;
    }
    stream_of(stream).enqueue([=] { std::memset(memory, kFresh, bytes); });
    *at = (std::uint64_t)memory;
    return kSuccess;
}
TWIN int cuMemFreeAsync(std::uint64_t at, Stream* stream) {
    if (not_in_capture(stream_of(stream)) != kSuccess || not_beside_capture() != kSuccess) return kCaptureUnsupported;
    std::size_t bytes;
    {
        std::lock_guard<std::mutex> lock(mutex);
        const auto found = taken.find(at);
        if (found == taken.end()) return kInvalidValue;
        bytes = found->second;
        taken.erase(found);
        pooled -= bytes;
    }
    stream_of(stream).enqueue([=] {
        std::memset((void*)at, kGone, bytes);
        std::free((void*)at);
    });
    return kSuccess;
}

namespace twin {
int descriptor(std::uint64_t at, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = blocks.find(at);
    const bool is_whole = found != blocks.end() && bytes <= ((found->second.bytes + 4095) & ~4095ull);
    return is_whole ? fcntl(found->second.file, F_DUPFD_CLOEXEC, 0) : -1;
}
} /* namespace twin */

/* ---- memory of other processes ---- */

TWIN int cuMemGetAddressRange_v2(std::uint64_t* base, std::size_t* bytes, std::uint64_t at) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.upper_bound(at);
    if (found == blocks.begin()) return kInvalidValue;
    --found;
    if (at - found->first >= found->second.bytes) return kInvalidValue;
    *base = found->first;
    *bytes = found->second.bytes;
    return kSuccess;
}

TWIN int cuIpcGetMemHandle(Handle* handle, std::uint64_t at) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = blocks.find(at);
    if (found == blocks.end()) return kInvalidValue;
    *handle = {(std::uint64_t)getpid(), (std::uint64_t)found->second.file, found->second.bytes, {}};
    return kSuccess;
}
TWIN int cuIpcOpenMemHandle_v2(std::uint64_t* at, Handle handle, unsigned) {
    /* As the driver: not in the process that it is of. */
    if (handle.process == (std::uint64_t)getpid()) return kInvalidValue;
    const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return kInvalidValue;
    const bool there = map(file, handle.bytes, at);
    close(file);
    if (!there) return kOutOfMemory;
    std::lock_guard<std::mutex> lock(mutex);
    imports[*at] = {-1, handle.bytes};
    return kSuccess;
}
TWIN int cuIpcCloseMemHandle(std::uint64_t at) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = imports.find(at);
    if (found == imports.end()) return kInvalidValue;
    munmap((void*)at, found->second.bytes);
    imports.erase(found);
    return kSuccess;
}
