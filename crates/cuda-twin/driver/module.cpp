/*
 * module.cpp: modules, which are shared libraries that the twin's compiler made, and launches of their kernels.
 */
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "stream.h"

namespace twin {
namespace {

/* As entry.h declares them to the module. */
struct Shape {
    unsigned blocks, warps;
    std::size_t pool;
    unsigned at_a_time;
};
struct Entry {
    const char* kernel;
    unsigned count;
    std::size_t bytes[4];
    void (*run)(const Shape& shape, std::uint64_t seed, void* const* parameters);
};

/* CUlaunchConfig. */
struct Launch {
    unsigned grid[3], block[3], shared_memory;
    Stream* stream;
    const void* attributes;
    unsigned attribute_count;
};

/* Bytes of a library: its table of sections comes last. */
std::size_t bytes_of(const void* image) {
    Elf64_Ehdr head;
    std::memcpy(&head, image, sizeof head);
    return head.e_shoff + (std::size_t)head.e_shnum * head.e_shentsize;
}

/* A name as the linker sees it: as the text has it. */
std::string plain(const char* name) {
    if (std::strncmp(name, "_ZN", 3) != 0) return name;
    std::string parts;
    for (const char* at = name + 3; *at >= '0' && *at <= '9';) {
        char* begin;
        const unsigned long length = std::strtoul(at, &begin, 10);
        if (!parts.empty()) parts += "::";
        parts.append(begin, length);
        at = begin + length;
    }
    return parts;
}

/* Blocks that run at a time, of launches of this thread which do not ask that all do; 0: all. */
thread_local unsigned at_a_time = 0;

/* Launches of this thread that are refused. */
thread_local unsigned refused = 0;

/* Kernels that run, and calls that wait for them. */
std::mutex mutex;
std::condition_variable change;
unsigned running = 0, waiting = 0;

/* A kernel runs for as long as it lives. */
struct Run {
    Run() {
        std::lock_guard<std::mutex> lock(mutex);
        running += 1;
    }
    ~Run() {
        std::lock_guard<std::mutex> lock(mutex);
        running -= 1;
        change.notify_all();
    }
};

/* What a launch is drawn from: the number that EP_CUDA_TWIN_SEED says, and that of the launch. */
std::uint64_t next_seed() {
    static const std::uint64_t first = [] {
        const char* said = std::getenv("EP_CUDA_TWIN_SEED");
        return said ? std::strtoull(said, nullptr, 0) << 32 : 0;
    }();
    static std::atomic<std::uint64_t> launches{0};
    return first + ++launches;
}

} /* namespace */

void wait_for_launches() {
    std::unique_lock<std::mutex> lock(mutex);
    waiting += 1;
    change.wait(lock, [] { return running == 0; });
    waiting -= 1;
    change.notify_all();
}

} /* namespace twin */

using namespace twin;

TWIN int cuModuleLoadData(void** module, const void* image) {
    if (not_beside_capture() != kSuccess) return kCaptureUnsupported;
    const int file = memfd_create("cuda-twin", MFD_CLOEXEC);
    const std::size_t bytes = bytes_of(image);
    if (file < 0 || write(file, image, bytes) != (ssize_t)bytes) return kOutOfMemory;
    *module = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!*module) std::fprintf(stderr, "the twin of a GPU loads no such module: %s\n", dlerror());
    /* Kept open: a library is known by its path, and a number that is free again would be another's. */
    return *module ? kSuccess : kInvalidImage;
}
TWIN int cuModuleGetFunction(const Entry** entry, void* module, const char* name) {
    *entry = (const Entry*)dlsym(module, "twin_entry");
    return *entry && plain(name) == (*entry)->kernel ? kSuccess : kNotFound;
}
TWIN int cuModuleGetLoadingMode(int* mode) {
    *mode = 1; /* eager */
    return kSuccess;
}
TWIN int cuFuncLoad(const Entry*) { return kSuccess; }
TWIN int cuFuncSetAttribute(const Entry*, int, int) { return kSuccess; }

/* Of the twin alone. */
TWIN void twin_run_at_a_time(unsigned blocks) { at_a_time = blocks; }
TWIN void twin_refuse_launches(unsigned launches) { refused = launches; }

TWIN int cuLaunchKernelEx(const Launch* launch, const Entry* entry, void** parameters, void**) {
    const unsigned threads = launch->block[0], blocks = launch->grid[0];
    if (threads == 0 || threads % 32 != 0 || threads > 1024 || blocks == 0) return kInvalidValue;
    if (launch->shared_memory > (unsigned)kSharedMemory) return kInvalidValue;
    if (launch->attribute_count > 0 && blocks > (unsigned)kMultiprocessors) return kLaunchTooLarge;
    if (refused > 0) {
        refused -= 1;
        return kOutOfMemory;
    }
    {
        std::unique_lock<std::mutex> lock(mutex);
        change.wait(lock, [] { return waiting == 0; });
    }
    std::vector<std::vector<unsigned char>> copies;
    for (unsigned i = 0; i < entry->count; ++i)
        copies.emplace_back((unsigned char*)parameters[i], (unsigned char*)parameters[i] + entry->bytes[i]);
    const Shape shape = {blocks, threads / 32, launch->shared_memory, launch->attribute_count > 0 ? 0 : at_a_time};
    /* Each run is drawn anew, of a graph's, too. */
    stream_of(launch->stream).enqueue([=] {
        const Run run;
        std::vector<void*> places;
        for (const auto& copy : copies) places.push_back((void*)copy.data());
        entry->run(shape, next_seed(), places.data());
    });
    return kSuccess;
}
