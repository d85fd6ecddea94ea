/*
 * hca.cpp: the kernel that plays an adapter, on the toy. Two threads post to queue pairs that share a doorbell page, while the kernel ends and is
 * launched again; then one queue pair for each way to fail. What is wrong is said, and the program ends with 1.
 *
 * Elements are written and completions read by the layout of their bytes, apart from the kernel's own text.
 */
#include "ep_device.h"
#include "bell.h"

/* The one word of CUDA that the kernel has. */
template <class T, class V> static inline T atomicAdd_system(T* at, V by) { return __atomic_fetch_add(at, (T)by, __ATOMIC_ACQ_REL); }

#define EP_HCA_SWEEPS 3u
#define EP_HCA_MUST(holds) ((holds) ? (void)0 : toy::broken("%s", #holds))
#include "hca.cu"

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <thread>

#include <unistd.h>

namespace {

/* What is tried. */
std::atomic<const char*> tried{"traffic"};

[[noreturn]] void wrong(const char* says, ...) {
    va_list of;
    va_start(of, says);
    std::fprintf(stderr, "%s: ", tried.load());
    std::vfprintf(stderr, says, of);
    std::fputc('\n', stderr);
    std::_Exit(1);
}

using Bytes = std::vector<unsigned char>;
ep_u64 at(const void* p) { return (ep_u64)p; }
ep_u64 microseconds(ep_u64 n) { return n * 1000; }
constexpr ep_u64 kLong = 20'000'000'000;

void big4(unsigned char* to, ep_u32 v) { for (int i = 0; i < 4; ++i) to[i] = (unsigned char)(v >> (24 - 8 * i)); }
void big8(unsigned char* to, ep_u64 v) { big4(to, (ep_u32)(v >> 32)), big4(to + 4, (ep_u32)v); }
ep_u32 of4(const unsigned char* from) { return (ep_u32)from[0] << 24 | (ep_u32)from[1] << 16 | (ep_u32)from[2] << 8 | from[3]; }

constexpr ep_u32 kRows = 0x11a, kCells = 0x22b, kOwn = 0x33c;
constexpr ep_u64 kIova = 0x7000'0000'0000; /* regions do not begin at their addresses */
constexpr ep_u32 kLog = 4, kDepth = 1 << kLog, kLongest = 14;

/* A queue pair with its memory, its peer's, and what is expected of that. */
struct Pair {
    alignas(64) unsigned char elements[64 * kDepth] = {}, completions[64 * kDepth] = {}, record[8] = {};
    Bytes source, rows, expected;
    std::vector<ep_u64> cells;
    ep_u64 page[2] = {}, old = 0;
    std::vector<EpHcaRegion> regions;
    EpHcaQueue row = {};
    ep_u64 posted = 65500, told = 0, signalled = 0; /* posted: so that 16 bits are soon over */
    struct Due { ep_u64 index; ep_u32 opcode, bytes, syndrome; };
    std::vector<Due> due;
    toy::Random random;

    explicit Pair(ep_u32 number, ep_u64 seed) : source(1 << 15), rows(1 << 15), expected(1 << 15), cells(16), random{seed} {
        std::memset(completions, 0xff, sizeof completions);
        for (auto& byte : source) byte = (unsigned char)random.next();
        for (std::size_t i = 0; i < rows.size(); ++i) expected[i] = rows[i] = (unsigned char)random.next();
        regions = {
            {kIova, at(source.data()), source.size(), kOwn, 0x44d, EP_HCA_LOCAL_WRITE, 0},
            {at(&old), at(&old), 8, kOwn + 1, 0x55e, EP_HCA_LOCAL_WRITE, 0},
            {kIova, at(rows.data()), rows.size(), 0x1, kRows, EP_HCA_LOCAL_WRITE | EP_HCA_REMOTE_WRITE, 0},
            {0x1000, at(cells.data()), 8 * cells.size(), 0x2, kCells, EP_HCA_LOCAL_WRITE | EP_HCA_REMOTE_WRITE | EP_HCA_REMOTE_ATOMIC, 0},
        };
        row.elements = at(elements), row.record = at(record), row.completions = at(completions);
        row.patience = EP_HCA_NEVER, row.planted = EP_HCA_NEVER;
        row.produced = row.retired = posted;
        row.number = number, row.log_elements = row.log_completions = kLog, row.user = 0x9a, row.log_longest = kLongest;
        row.own_count = 2, row.peer = 2, row.peer_count = 2;
        row.rights = EP_HCA_REMOTE_WRITE | EP_HCA_REMOTE_ATOMIC, row.answers = 1;
    }

    unsigned char* element(ep_u32 opcode, ep_u32 segments, bool is_signalled, ep_u32 bytes, ep_u32 syndrome = 0) {
        unsigned char* e = elements + 64 * (posted % kDepth);
        std::memset(e, 0xcc, 64);
        big4(e, (ep_u32)(posted & 0xffff) << 8 | opcode);
        big4(e + 4, row.number << 8 | segments);
        std::memset(e + 8, 0, 4);
        e[11] = is_signalled ? 8 : 0;
        if (is_signalled || syndrome != 0) due.push_back({posted, opcode, bytes, syndrome});
        ++posted;
        return e;
    }
    void remote(unsigned char* e, ep_u64 address, ep_u32 key) { big8(e + 16, address), big4(e + 24, key), big4(e + 28, 0); }
    void data(unsigned char* to, ep_u32 bytes, ep_u32 key, ep_u64 address) { big4(to, bytes), big4(to + 4, key), big8(to + 8, address); }

    void write(ep_u64 to, ep_u32 bytes, bool is_signalled, bool is_split, ep_u32 askew) {
        const ep_u64 from = 16 * random.below(1000) + random.below(askew);
        to += random.below(askew);
        unsigned char* e = element(8, is_split ? 4 : 3, is_signalled, bytes);
        remote(e, kIova + to, kRows);
        const ep_u32 first = is_split ? 1 + (ep_u32)random.below(bytes - 1) : bytes;
        data(e + 32, first, kOwn, kIova + from);
        /* The second part is of other bytes. */
        const ep_u64 other = random.below(1000);
        if (is_split) data(e + 48, bytes - first, kOwn, kIova + other);
        std::memcpy(&expected[to], &source[from], first);
        if (is_split) std::memcpy(&expected[to + first], &source[other], bytes - first);
    }
    void add(ep_u32 cell, ep_u64 by, bool is_signalled) {
        unsigned char* e = element(0x12, 4, is_signalled, 8);
        remote(e, 0x1000 + 8 * cell, kCells);
        big8(e + 32, by), std::memset(e + 40, 0, 8);
        data(e + 48, 8, kOwn + 1, at(&old));
    }
    void write_inline(ep_u32 cell, ep_u64 value, bool is_signalled) {
        unsigned char* e = element(8, 3, is_signalled, 8);
        remote(e, 0x1000 + 8 * cell, kCells);
        big4(e + 32, 8 | 1u << 31);
        std::memcpy(e + 36, &value, 8);
    }
    void ring(ep_u64* page) {
        __atomic_store_n((ep_u32*)(record + 4), __builtin_bswap32((ep_u32)(posted & 0xffff)), __ATOMIC_RELEASE);
        unsigned char bell[8];
        big4(bell, (ep_u32)(posted & 0xffff) << 8), big4(bell + 4, row.number << 8);
        ep_u64 word;
        std::memcpy(&word, bell, 8);
        __atomic_store_n(page, word, __ATOMIC_RELEASE);
    }
    /* Takes the next completion, and compares it. */
    void complete() {
        const ep_u64 number = told++;
        const unsigned char* c = completions + 64 * (number % kDepth);
        const ep_u64 until = ep_now_() + kLong;
        for (;;) {
            const ep_u32 end = __builtin_bswap32(__atomic_load_n((const ep_u32*)(c + 60), __ATOMIC_ACQUIRE));
            if ((end >> 4 & 15) != 15 && (end & 1) == (number >> kLog & 1)) break;
            if (ep_now_() > until) wrong("queue pair %x: completion %llu does not come", row.number, number);
            std::this_thread::yield();
        }
        const Due want = due[number];
        const ep_u32 how = of4(c + 60) >> 4 & 15, index = of4(c + 60) >> 16;
        if (index != (want.index & 0xffff)) wrong("queue pair %x: completion %llu is of %x, not of %llx", row.number, number, index, want.index);
        if (how != (want.syndrome ? 13u : 0u)) wrong("queue pair %x, element %llx: opcode %u of its completion", row.number, want.index, how);
        if (want.syndrome && c[55] != want.syndrome) wrong("queue pair %x, element %llx: syndrome %x, not %x", row.number, want.index, c[55], want.syndrome);
        if (of4(c + 56) != (want.opcode << 24 | row.number)) wrong("element %llx: %x", want.index, of4(c + 56));
        if (!want.syndrome && of4(c + 44) != want.bytes) wrong("element %llx: %u bytes of %u", want.index, of4(c + 44), want.bytes);
        if (of4(c + 32) != row.user) wrong("element %llx: user %x", want.index, of4(c + 32));
    }
    static ep_u64 ep_now_() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (ep_u64)now.tv_sec * 1000000000u + (ep_u64)now.tv_nsec;
    }
    /* Rounds of writes and a signal behind them: who sees it sees them, and nothing else has changed. */
    void post(ep_u64* page, int rounds) {
        ep_u64 count = 0, between = 0;
        for (int round = 0; round < rounds; ++round) {
            /* Short ones side by side, as nothing orders writes, or a long one. */
            const bool is_long = random.below(4) == 0;
            const int writes = is_long ? 1 : (int)random.below(kDepth - 2);
            for (int i = 0; i < writes; ++i) {
                /* Another signal, of which only the sum is looked at. */
                if (i == 5) add(7, 3, random.below(2)), between += 3, ++count;
                const ep_u32 bytes = 2 + (ep_u32)random.below(is_long ? 9000 : 2000);
                write(2048 * (ep_u64)i, bytes, random.below(2), random.below(4) == 0, random.below(2) ? 16 : 1);
            }
            const bool adds = random.below(2);
            const ep_u32 cell = adds ? 3 : 5;
            const ep_u64 value = __atomic_load_n(&cells[cell], __ATOMIC_RELAXED) + 1 + random.below(1000);
            if (adds) add(cell, value - cells[cell], true);
            else write_inline(cell, value, true);
            ring(page);
            for (const ep_u64 until = ep_now_() + kLong; __atomic_load_n(&cells[cell], __ATOMIC_ACQUIRE) != value;)
                if (ep_now_() > until) wrong("queue pair %x: the signal of round %d does not come", row.number, round);
            for (std::size_t i = 0; i < rows.size(); ++i)
                if (rows[i] != expected[i]) wrong("queue pair %x, round %d: byte %zu is not what was written before the signal", row.number, round, i);
            while (told < due.size()) complete();
            if (cells[7] != between) wrong("queue pair %x, round %d: cell 7 is %llu, not %llu", row.number, round, cells[7], between);
            count += (ep_u64)writes + 1;
        }
        if (count != posted - 65500) wrong("elements are %llu", count);
    }
};

/* Launches that serve some queue pairs of one page. */
struct Adapter {
    std::vector<Pair*> pairs;
    std::vector<EpHcaQueue> queues;
    std::vector<EpHcaRegion> regions;
    std::vector<EpHcaJob> jobs = std::vector<EpHcaJob>(EP_HCA_JOBS); /* what one launch leaves there the next finds */
    ep_u64 page = 0, seen[2] = {}, registers[1] = {at(&page)};
    ep_u32 halt = 0;
    ep_u64 latency = microseconds(3);
    ep_u32 pace = 20000;

    explicit Adapter(std::vector<Pair*> all) : pairs(std::move(all)) {
        for (Pair* pair : pairs) {
            EpHcaQueue row = pair->row;
            row.own += (ep_u32)regions.size(), row.peer += (ep_u32)regions.size();
            queues.push_back(row);
            regions.insert(regions.end(), pair->regions.begin(), pair->regions.end());
        }
    }
    void launch(ep_u32 blocks, ep_u64 seed, ep_u64 idle) {
        EpHcaState state = {};
        EpHcaArgs a = {};
        a.queues = at(queues.data()), a.regions = at(regions.data()), a.registers = at(registers), a.seen = at(seen);
        a.jobs = at(jobs.data()), a.state = at(&state), a.halt = at(&halt);
        a.latency = latency, a.idle = idle, a.pace = pace;
        a.queue_count = (ep_u32)queues.size(), a.register_count = 1;
        /* Short ones, so that writes are several; long ones, which take their time to arrive. */
        a.piece = seed % 4 == 0 ? 512 : 4096;
        constexpr unsigned warps = 4;
        toy::launch(toy::Shape{blocks, warps, 2 * (warps - 1) * a.piece}, seed, std::vector<toy::Window>{}, [&] { ep_hca_kernel(a); });
    }
    /* Of all that was posted, heard of or not. */
    bool is_done() const {
        for (std::size_t i = 0; i < queues.size(); ++i)
            if (queues[i].retired < pairs[i]->posted) return false;
        return true;
    }
};

void traffic(ep_u64 seed, ep_u32 blocks) {
    Pair one(0xabc, seed), two(0x777, seed + 1), three(0x1, seed + 2);
    Adapter adapter({&one, &two, &three});
    std::atomic<int> left{3};
    std::atomic<bool> ended{false};
    std::vector<std::thread> threads;
    for (Pair* pair : adapter.pairs) threads.emplace_back([&, pair] { pair->post(&adapter.page, 60); --left; });
    std::thread halts([&] {
        for (toy::Random random{seed}; !ended;) {
            const timespec a_while = {0, (long)random.below(3000000)};
            nanosleep(&a_while, nullptr);
            __atomic_store_n(&adapter.halt, 1u, __ATOMIC_RELEASE);
            nanosleep(&a_while, nullptr);
            __atomic_store_n(&adapter.halt, 0u, __ATOMIC_RELEASE);
        }
    });
    for (ep_u64 launch = 0; left > 0; ++launch) adapter.launch(blocks, seed + launch, microseconds(100));
    ended = true;
    halts.join();
    for (auto& thread : threads) thread.join();
}

/* What is wrong with an element, and how it ends. */
struct Fault {
    const char* name;
    ep_u32 syndrome;
    void (*spoil)(Pair& pair, unsigned char* write, unsigned char* add);
    bool of_add;
};
const Fault kFaults[] = {
    {"own key", 0x04, [](Pair&, unsigned char* e, unsigned char*) { big4(e + 36, 0x999); }, false},
    {"own bounds", 0x04, [](Pair& p, unsigned char* e, unsigned char*) { big8(e + 40, kIova + p.source.size() - 99); }, false},
    {"before the own region", 0x04, [](Pair&, unsigned char* e, unsigned char*) { big8(e + 40, kIova - 1); }, false},
    {"peer's key", 0x13, [](Pair&, unsigned char* e, unsigned char*) { big4(e + 24, 0x999); }, false},
    {"own key in place of the peer's", 0x13, [](Pair&, unsigned char* e, unsigned char*) { big4(e + 24, kOwn); }, false},
    {"peer's bounds", 0x13, [](Pair& p, unsigned char* e, unsigned char*) { big8(e + 16, kIova + p.rows.size() - 99); }, false},
    {"fetch-add into rows", 0x13, [](Pair&, unsigned char*, unsigned char* e) { big8(e + 16, kIova), big4(e + 24, kRows); }, true},
    {"fetch-add askew", 0x12, [](Pair&, unsigned char*, unsigned char* e) { big8(e + 16, 0x1004); }, true},
    {"fetch-add into memory askew", 0x12, [](Pair& p, unsigned char*, unsigned char*) { p.regions[3].iova += 4; }, true},
    {"no right to add", 0x12, [](Pair& p, unsigned char*, unsigned char*) { p.row.rights = EP_HCA_REMOTE_WRITE; }, true},
    {"index", 0x02, [](Pair&, unsigned char* e, unsigned char*) { e[2] ^= 1; }, false},
    {"queue pair", 0x02, [](Pair&, unsigned char* e, unsigned char*) { e[6] ^= 1; }, false},
    {"opcode modifier", 0x02, [](Pair&, unsigned char* e, unsigned char*) { e[0] = 8; }, false},
    {"flags", 0x02, [](Pair&, unsigned char* e, unsigned char*) { e[11] |= 4; }, false},
    {"length", 0x01, [](Pair&, unsigned char* e, unsigned char*) { big4(e + 32, (1u << kLongest) + 1); }, false},
    {"planted", 0x10, [](Pair& p, unsigned char*, unsigned char*) { p.row.planted = 65500 + 2, p.row.planted_syndrome = 0x10; }, false},
    {"peer that does not answer", 0x15, [](Pair& p, unsigned char*, unsigned char*) { p.row.answers = 0, p.row.patience = microseconds(3000); }, false},
};

void fails(const Fault& fault) {
    tried = fault.name;
    Pair pair(0x4321, 7);
    const bool at_once = fault.syndrome == 0x15;
    const auto one = [&](ep_u32 syndrome) {
        unsigned char* e = pair.element(8, 3, true, 100, syndrome);
        pair.remote(e, kIova + 128 * (pair.posted - 65500), kRows);
        pair.data(e + 32, 100, kOwn, kIova);
        if (syndrome == 0) std::memcpy(&pair.expected[128 * (pair.posted - 65500)], &pair.source[0], 100);
        return e;
    };
    const ep_u32 flushed = 5;
    one(at_once ? fault.syndrome : 0);
    one(at_once ? flushed : 0);
    unsigned char *e = nullptr, *add = nullptr;
    if (fault.of_add) {
        pair.add(3, 1, true), pair.due.back().syndrome = fault.syndrome;
        add = pair.elements + 64 * ((pair.posted - 1) % kDepth);
    } else {
        e = one(at_once ? flushed : fault.syndrome);
    }
    fault.spoil(pair, e, add);
    pair.add(3, 1, false), pair.due.push_back({pair.posted - 1, 0x12, 8, flushed});
    one(flushed);
    Adapter adapter({&pair});
    pair.ring(&adapter.page);
    for (int launch = 0; launch < 1000 && (launch == 0 || !adapter.is_done()); ++launch) adapter.launch(1, (ep_u64)launch, microseconds(100));
    while (pair.told < pair.due.size()) pair.complete();
    if (pair.rows != pair.expected) wrong("rows are not what was written before");
    if (pair.cells[3] != 0) wrong("a cell was added to");
    if (adapter.queues[0].syndrome != fault.syndrome) wrong("broken by %x", adapter.queues[0].syndrome);
}

/* Queue pairs of a warp that fail while something of theirs is under way: that arrives, and then the failure is told. */
void behind() {
    tried = "faults behind what is under way";
    Pair one(0x100, 5), two(0x101, 6), other(0x102, 7);
    Adapter adapter({&one, &other, &other, &two});
    adapter.latency = microseconds(20000);
    const auto write = [&](Pair& pair, ep_u32 syndrome) {
        unsigned char* e = pair.element(8, 3, true, 100, syndrome);
        pair.remote(e, kIova + 128 * (pair.posted - 65500), kRows);
        pair.data(e + 32, 100, kOwn, kIova);
        if (syndrome == 0) std::memcpy(&pair.expected[128 * (pair.posted - 65500)], &pair.source[0], 100);
        else big4(e + 36, 0x999);
        pair.ring(&adapter.page);
    };
    for (Pair* pair : {&one, &two}) write(*pair, 0);
    std::atomic<bool> posted{false};
    std::thread posts([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        for (Pair* pair : {&one, &two}) write(*pair, 0x04);
        posted = true;
    });
    for (ep_u64 launch = 0; !posted || !adapter.is_done(); ++launch) adapter.launch(1, launch, microseconds(30000));
    posts.join();
    for (Pair* pair : {&one, &two}) {
        while (pair->told < pair->due.size()) pair->complete();
        if (pair->rows != pair->expected) wrong("rows are not what was written");
    }
}

/* Messages that share a link take as long as that and latency say, at least. So long that a busy machine is not as slow without either. */
void speed() {
    Pair one(0x500, 3), two(0x501, 4), three(0x502, 5), four(0x503, 6), five(0x504, 7), six(0x505, 8);
    Adapter adapter({&one, &two, &three, &four, &five, &six});
    adapter.latency = microseconds(100000), adapter.pace = 4000000000;
    for (Pair* pair : adapter.pairs) pair->write(0, 8000, true, false, 1), pair->add(3, 1, true);
    const ep_u64 began = Pair::ep_now_();
    for (Pair* pair : adapter.pairs) pair->ring(&adapter.page);
    while (!adapter.is_done()) adapter.launch(1, 1, microseconds(100));
    const ep_u64 took = Pair::ep_now_() - began;
    if (took < microseconds(100000 + 6 * 32000)) wrong("six times 8008 bytes at 4 microseconds a byte and 100 ms: %llu ns", took);
    for (Pair* pair : adapter.pairs)
        if (pair->cells[3] != 1 || pair->old != 0) wrong("the cell is %llu, and was %llu", pair->cells[3], pair->old);
}

} /* namespace */

int main(int count, char** given) {
    const ep_u64 seed = count > 1 ? std::strtoull(given[1], nullptr, 0) : 1;
    /* A launch that does not end ends the program. */
    alarm(120);
    for (const Fault& fault : kFaults) fails(fault);
    behind();
    tried = "speed";
    speed();
    tried = "traffic";
    traffic(seed, 1);
    traffic(seed + 100, 2);
    return 0;
}
