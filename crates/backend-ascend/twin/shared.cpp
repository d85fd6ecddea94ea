/*
 * shared.cpp: ranks that are processes. Each has a machine of its own, with the devices of all, and runs the launches of its own.
 *
 *   windows  lie in files of memory. The process that has one names those whose devices may map it; cards map what they were told of
 *   time     is the system's: a process that is stopped is late for the others, and a turn takes as long as it takes
 *   order    what a core has done before, another process sees before what it does next
 */
#include "machine.h"

#include <algorithm>
#include <atomic>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

namespace twin {

namespace {
/* Behind a window: how many processes may map it, and which. */
constexpr uint64_t kProcesses = 4096;
constexpr uint64_t kNanosPerTick = 20;
/* Turns between two looks at the system's clock. */
constexpr uint64_t kTurnsALook = 16;
/* Ticks between two looks whether a process is still there: 1 ms. */
constexpr uint64_t kTicksALook = 50000;

/* Memory of a file, which stays open as long as the memory. Nothing where the system does not give it. */
std::shared_ptr<unsigned char> mapped(int file, uint64_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        close(file);
        return nullptr;
    }
    return {(unsigned char*)memory, [file, bytes](unsigned char* at) {
                munmap(at, bytes);
                close(file);
            }};
}

uint64_t system_ticks() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return ((uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec) / kNanosPerTick;
}
}  // namespace

void Machine::share() {
    shared_ = true;
    began_ = system_ticks() - cycles;
}

void Machine::catch_up() { cycles = std::max(cycles, system_ticks() - began_); }

void Machine::pass_shared_time() {
    std::atomic_thread_fence(std::memory_order_acq_rel);
    ++cycles;
    if (++looks_ % kTurnsALook == 0) catch_up();
}

uint64_t Machine::alloc_shared(uint32_t rank, uint64_t bytes, int32_t& descriptor) {
    const uint64_t all = padded(bytes) + kProcesses;
    descriptor = memfd_create("ep-twin-window", MFD_CLOEXEC);
    if (descriptor < 0) return 0;
    /* Locked as long as the window is there: a process that ends unlocks it. */
    if (ftruncate(descriptor, (off_t)all) != 0 || flock(descriptor, LOCK_EX) != 0) return (void)close(descriptor), 0;
    auto memory = mapped(descriptor, all);
    if (!memory) return 0;
    random.fill(memory.get(), padded(bytes));
    return place(rank, bytes, Reach::kGroup, std::move(memory));
}

bool Machine::allow(uint64_t at, const int32_t* processes, uint64_t count) {
    const auto [start, found] = region(at);
    if (!found || start != at || count >= kProcesses / 4) return false;
    unsigned char* list = found->memory.get() + padded(found->bytes);
    std::memcpy(list + 4, processes, 4 * count);
    const uint32_t number = (uint32_t)count;
    std::memcpy(list, &number, 4);
    return true;
}

uint64_t Machine::map(uint32_t rank, uint64_t bytes, int32_t process, int32_t descriptor, bool by_card) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", process, descriptor);
    const int file = ::open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return 0;
    struct stat found;
    if (fstat(file, &found) != 0 || (uint64_t)found.st_size != padded(bytes) + kProcesses) return (void)close(file), 0;
    auto memory = mapped(file, (uint64_t)found.st_size);
    if (!memory) return 0;
    const unsigned char* list = memory.get() + padded(bytes);
    uint32_t count;
    std::memcpy(&count, list, 4);
    bool named = by_card;
#ifdef TWIN_LETS_ALL_MAP
    named = true; /* a fault that tests plant */
#endif
    for (uint32_t at = 0; !named && at < count && at < kProcesses / 4 - 1; ++at) {
        int32_t allowed;
        std::memcpy(&allowed, list + 4 + 4 * (uint64_t)at, 4);
        named = allowed == getpid();
    }
    if (!named) return 0;
    theirs_[rank] = Theirs{file, 0, false};
    return place(rank, bytes, Reach::kGroup, std::move(memory));
}

bool Machine::has_left(uint32_t rank) {
    const auto found = theirs_.find(rank);
    if (found == theirs_.end()) return false;
    Theirs& theirs = found->second;
    if (!theirs.left && cycles >= theirs.look_at) {
        theirs.look_at = cycles + kTicksALook;
        theirs.left = flock(theirs.file, LOCK_SH | LOCK_NB) == 0;
    }
    return theirs.left;
}

}  // namespace twin

/* ---- for the host ---- */

#pragma GCC visibility push(default)
extern "C" {

void twin_share(twin::Machine* machine) { machine->share(); }
uint64_t twin_alloc_shared(twin::Machine* machine, uint32_t rank, uint64_t bytes, int32_t* descriptor) {
    return machine->alloc_shared(rank, bytes, *descriptor);
}
int twin_allow(twin::Machine* machine, uint64_t at, const int32_t* processes, uint64_t count) { return machine->allow(at, processes, count) ? 0 : 1; }
uint64_t twin_map(twin::Machine* machine, uint32_t rank, uint64_t bytes, int32_t process, int32_t descriptor, uint32_t by_card) {
    return machine->map(rank, bytes, process, descriptor, by_card != 0);
}

}
#pragma GCC visibility pop
