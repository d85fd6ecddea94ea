/*
 * machine.h: the toy's processor. A block is a thread of the CPU; its lanes take turns on that thread, each with a stack of
 * its own, and change at meetings and where they wait. Linux on x86-64.
 *
 * It is hostile within the contract, and strict about it:
 *
 *   lanes     the next warp and its next lane are drawn from a seed: what one lane does between two meetings may come before or
 *             after what any other does there
 *   publishes a lane that has stored a word for others may be followed by a rest of its block: what the other lanes do comes late
 *   puts      a put is on its way until its lane, or one that met it since, fences. It may land earlier, puts in any order,
 *             drawn likewise
 *   fetches   what a lane fetches comes when it is waited for, or earlier, drawn likewise; what lay there before is gone at once
 *   meetings  a lane that is missing, that has ended, or that says another word than the others, ends the program and is
 *             named
 */
#ifndef TOY_MACHINE_H
#define TOY_MACHINE_H

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace toy {

constexpr unsigned kLanes = 32;
constexpr std::size_t kStack = 128 << 10;
/* How the program ends where the contract was broken; with what, it says on stderr. */
constexpr int kBroken = 3;

template <class... T> [[noreturn]] void broken(const char* says, T... of) {
    std::fprintf(stderr, "the contract is broken: ");
    std::fprintf(stderr, says, of...);
    std::fputc('\n', stderr);
    std::_Exit(kBroken);
}

/* The window of a rank; nowhere where it does not take part. */
struct Window {
    unsigned char* base;
    std::uint64_t bytes;
};

/* splitmix64. */
struct Random {
    std::uint64_t state;
    std::uint64_t next() {
        std::uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    std::size_t below(std::size_t limit) { return next() % limit; }
};

/* What lanes say together: all of a warp, all of a block, all of a block's first warps, all of a team of its warps. */
enum class Word { meet, all, any, votes, shuffle, block_meet, block_any, all_of, team_meet };
inline const char* name(Word word) {
    constexpr const char* names[] = {"ep_warp_meet",    "ep_warp_all",   "ep_warp_any",  "ep_warp_votes",
                                     "ep_warp_shuffle", "ep_block_meet", "ep_block_any", "ep_all_of", "ep_team_meet"};
    return names[(int)word];
}
/* Whether more than a warp says it; and whether a part of a block does. */
inline bool is_of_block(Word word) { return word >= Word::block_meet; }
inline bool is_of_part(Word word) { return word == Word::all_of || word == Word::team_meet; }

/* Leaves one stack for another: what a function may not change is kept on the one that is left. */
[[gnu::naked, gnu::noinline]] inline void change_stacks(void** /* left */, void* /* entered */) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
        "movq %rsp, (%rdi); movq %rsi, %rsp\n\t"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}

/* Stacks of a warp. They are used again. */
class Stacks {
public:
    Stacks() {
        std::lock_guard<std::mutex> lock(mutex());
        auto& kept = all();
        if (!kept.empty()) {
            memory_ = kept.back();
            kept.pop_back();
            return;
        }
        const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        memory_ = (char*)mmap(nullptr, kLanes * kStack, PROT_READ | PROT_WRITE, how, -1, 0);
        if (memory_ == MAP_FAILED) broken("no memory for the stacks of a warp");
    }
    ~Stacks() {
        std::lock_guard<std::mutex> lock(mutex());
        all().push_back(memory_);
    }
    Stacks(const Stacks&) = delete;
    char* end(unsigned lane) const { return memory_ + (lane + 1) * kStack; }

private:
    static std::mutex& mutex() {
        static std::mutex one;
        return one;
    }
    /* Never freed: threads may outlive the program's end. */
    static std::vector<char*>& all() {
        static auto& kept = *new std::vector<char*>;
        return kept;
    }
    char* memory_;
};

/* A get on its way to shared memory. */
struct Fetch {
    unsigned char* to;
    const unsigned char* from;
    unsigned count;
    unsigned lane;
    unsigned long number; /* of the lane's fetches, of which it is a part */

    void land() const { std::memcpy(to, from, count); }
};

/* A put on its way. */
struct Put {
    unsigned char* to;
    unsigned char bytes[32];
    unsigned count;
    unsigned lane;
    unsigned long meetings; /* of its lane, before it */
};

class Block;

class Warp {
public:
    Warp(Block& block, unsigned number) : block(block), number(number) {}

    Block& block;
    const unsigned number;

    /* That of the lane that runs. */
    static Warp& own() { return *own_; }
    unsigned lane() const { return lane_; }

    /* A word of all lanes: what each of them says. `threads`: of those that say it. */
    const std::uint64_t* meet(Word word, std::uint64_t says = 0, unsigned threads = 0);

    /* The lane waits for others: it lets them run. */
    void wait();
    /* The lane has told others something: they may act before the rest of its block does. */
    void tell();

    void put(unsigned char* to, const void* from, unsigned bytes) {
        for (unsigned at = 0; at < bytes; at += 32) {
            Put put{to + at, {}, bytes - at < 32 ? bytes - at : 32, lane_, lanes_[lane_].meetings};
            std::memcpy(put.bytes, (const unsigned char*)from + at, put.count);
            puts_.push_back(put);
        }
    }

    void fetch(unsigned char* to, const unsigned char* from, unsigned count) {
        std::memset(to, 0xee, count);
        fetches_.push_back(Fetch{to, from, count, lane_, lanes_[lane_].fetches});
    }
    void end_fetch() { ++lanes_[lane_].fetches; }
    /* All fetches of the lane have come but its last `pending`. */
    void await_fetches(unsigned long pending) {
        std::size_t left = 0;
        for (const Fetch& fetch : fetches_) {
            if (fetch.lane == lane_ && fetch.number + pending < lanes_[lane_].fetches) fetch.land();
            else fetches_[left++] = fetch;
        }
        fetches_.resize(left);
    }

    /* All puts of the lane have landed, and those of lanes that it met since. */
    void fence() {
        land([&](const Put& put) { return put.lane == lane_ || put.meetings < lanes_[lane_].meetings; });
    }

private:
    friend class Block;
    struct Lane {
        void* stack = nullptr;
        bool ended = false;
        Word word = Word::meet;
        unsigned threads = 0;
        unsigned long meetings = 0;
        unsigned long fetches = 0; /* ended */
    };

    void begin() {
        for (unsigned i = 0; i < kLanes; ++i) {
            /* As if it had been left at the entry of play, which never returns. */
            void** top = (void**)(stacks_.end(i) - 16);
            *--top = nullptr;
            *--top = (void*)play;
            for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
            lanes_[i].stack = top;
        }
        running_ = ~0u;
    }
    static void play();
    void leave();
    void step(Random& random);
    bool settle();

    /* Whether it is where only others of its block can let it go on. */
    bool is_apart() const { return running_ == 0 && !ended_; }
    void go_on(bool answer) {
        std::uint64_t* said = said_[lanes_[0].meetings % 2];
        for (unsigned i = 0; i < kLanes; ++i) said[i] = answer;
        running_ = ~0u;
    }
    bool any() const {
        const std::uint64_t* said = said_[lanes_[0].meetings % 2];
        bool any = false;
        for (unsigned i = 0; i < kLanes; ++i) any |= said[i] != 0;
        return any;
    }

    /* What lies in 16 bytes lands at once, as a unit must. */
    static void land(const Put& put) {
        typedef unsigned Four __attribute__((vector_size(16)));
        if (put.count != sizeof(Four) || (std::uintptr_t)put.to % sizeof(Four)) {
            std::memcpy(put.to, put.bytes, put.count);
            return;
        }
        Four unit;
        std::memcpy(&unit, put.bytes, sizeof unit);
        *(volatile Four*)put.to = unit;
    }
    template <class F> void land(F due) {
        std::size_t left = 0;
        for (const Put& put : puts_) {
            if (due(put)) land(put);
            else puts_[left++] = put;
        }
        puts_.resize(left);
    }

    static thread_local Warp* own_;
    Stacks stacks_;
    Lane lanes_[kLanes];
    std::uint64_t said_[2][kLanes] = {};
    std::vector<Put> puts_;
    std::vector<Fetch> fetches_;
    std::uint32_t running_ = 0; /* lanes that may run: a bit for each */
    unsigned lane_ = 0;
    bool ended_ = false;
};
inline thread_local Warp* Warp::own_ = nullptr;

/* What a launch runs, in every thread. */
struct Kernel {
    void (*run)(const void* of);
    const void* of;
};

/* Blocks of a launch, warps of a block, bytes of its shared memory. */
struct Shape {
    unsigned blocks, warps;
    std::size_t pool;
};

/* What a block shares, and its turns. */
class Block {
public:
    Block(unsigned number, const Shape& shape, std::uint64_t seed, const std::vector<Window>& windows, const Kernel& kernel)
        : number(number), blocks(shape.blocks), warps(shape.warps), windows(windows), kernel(kernel), random_{seed},
          pool_(shape.pool / sizeof(Unit) + 2) {
        /* What nobody has written is nothing that one could go on with. */
        std::memset(pool_.data(), 0xee, sizeof(Unit) * pool_.size());
        for (unsigned i = 0; i < warps; ++i) all_.emplace_back(new Warp(*this, i));
    }

    const unsigned number, blocks, warps;
    /* Of all ranks. */
    const std::vector<Window>& windows;
    const Kernel& kernel;

    unsigned char* pool() { return (unsigned char*)(((std::uintptr_t)pool_.data() + sizeof(Unit) - 1) & ~(sizeof(Unit) - 1)); }

    /* The variable of this name. */
    void* shared(const void* name, std::size_t bytes) {
        auto& room = shared_[name];
        if (!room) {
            room.reset(new std::uint64_t[bytes / 8 + 1]);
            std::memset(room.get(), 0xee, bytes);
        }
        return room.get();
    }

    /* Runs the kernel to its end. */
    void run() {
        for (auto& warp : all_) warp->begin();
        while (step()) {}
    }

private:
    friend class Warp;

    bool step() {
        Warp* ready[32];
        unsigned count = 0;
        for (auto& warp : all_)
            if (warp->running_ != 0) ready[count++] = warp.get();
        if (count == 0) {
            for (auto& warp : all_)
                if (!warp->ended_) broken("warp %u of block %u: %s, and others do not", warp->number, number, name(warp->lanes_[0].word));
            return false;
        }
        Warp& warp = *ready[random_.below(count)];
        waits_ = tells_ = false;
        warp.step(random_);
        if (tells_ && random_.below(8) == 0) sleep();
        if (warp.running_ == 0 && !warp.settle()) meeting(warp);
        if (!waits_) waited_ = 0;
        else if (++waited_ > 4 * kLanes * count) rest();
        return true;
    }

    /* Other blocks need the processor, and after a while this one nothing but time. */
    void rest() {
        if (waited_ < 16 * kLanes * warps) std::this_thread::yield();
        else sleep();
    }
    static void sleep() {
        const timespec a_while = {0, 50000};
        nanosleep(&a_while, nullptr);
    }

    /* A warp has come to where others of its block meet: they go on when all have. */
    void meeting(Warp& last) {
        const Word word = last.lanes_[0].word;
        const unsigned threads = last.lanes_[0].threads, expected = is_of_part(word) ? threads / kLanes : warps;
        const unsigned first = word == Word::team_meet ? last.number / expected * expected : 0;
        if (last.number >= first + expected || first + expected > warps) broken("warp %u says %s of %u warps", last.number, name(word), expected);
        bool any = false;
        for (unsigned i = first; i < first + expected; ++i) {
            const Warp& warp = *all_[i];
            if (warp.ended_) broken("warp %u: %s, while warp %u has ended", last.number, name(word), i);
            if (!warp.is_apart()) return;
            const Word says = warp.lanes_[0].word;
            if (says != word) {
                /* The whole block's meetings and those of a part of it are apart. */
                if (is_of_part(says) || is_of_part(word)) return;
                broken("warp %u says %s, warp %u %s", last.number, name(word), i, name(says));
            }
            if (warp.lanes_[0].threads != threads) broken("warp %u says %s of %u threads, warp %u of %u", last.number, name(word), threads, i, warp.lanes_[0].threads);
            any |= warp.any();
        }
        for (unsigned i = first; i < first + expected; ++i) all_[i]->go_on(any);
    }

    struct alignas(128) Unit { unsigned char bytes[128]; };
    Random random_;
    std::vector<Unit> pool_;
    std::map<const void*, std::unique_ptr<std::uint64_t[]>> shared_;
    std::vector<std::unique_ptr<Warp>> all_;
    void* turns_ = nullptr; /* the stack of run */
    bool waits_ = false, tells_ = false;
    unsigned waited_ = 0;
};

inline void Warp::play() {
    const Kernel& kernel = own_->block.kernel;
    kernel.run(kernel.of);
    own_->lanes_[own_->lane_].ended = true;
    own_->running_ &= ~(1u << own_->lane_);
    own_->leave();
    std::abort();
}
inline void Warp::leave() { change_stacks(&lanes_[lane_].stack, block.turns_); }

inline const std::uint64_t* Warp::meet(Word word, std::uint64_t says, unsigned threads) {
    Lane& lane = lanes_[lane_];
    said_[lane.meetings % 2][lane_] = says;
    lane.word = word;
    lane.threads = threads;
    running_ &= ~(1u << lane_);
    leave();
    /* Nobody says anything new in this place before all have met once more. */
    return said_[lane.meetings++ % 2];
}
inline void Warp::wait() {
    block.waits_ = true;
    leave();
}
inline void Warp::tell() {
    block.tells_ = true;
    leave();
}

/* Lets a lane run. */
inline void Warp::step(Random& random) {
    std::uint32_t left = running_;
    for (std::size_t skip = random.below((std::size_t)__builtin_popcount(left)); skip > 0; --skip) left &= left - 1;
    lane_ = (unsigned)__builtin_ctz(left);
    own_ = this;
    change_stacks(&block.turns_, lanes_[lane_].stack);
    if (!puts_.empty() && random.below(2) == 0) {
        /* Some put lands by itself. */
        const std::size_t one = random.below(puts_.size());
        land(puts_[one]);
        puts_.erase(puts_.begin() + (long)one);
    }
    if (!fetches_.empty() && random.below(64) == 0) {
        /* And some of what is fetched comes. */
        const std::size_t one = random.below(fetches_.size());
        fetches_[one].land();
        fetches_.erase(fetches_.begin() + (long)one);
    }
}

/* No lane can run: all have met, or ended. False where they wait for other warps. */
inline bool Warp::settle() {
    const Lane& first = lanes_[0];
    for (unsigned i = 1; i < kLanes; ++i) {
        const Lane& lane = lanes_[i];
        if (lane.ended != first.ended)
            broken("warp %u, lane %u: %s, while lane %u has ended", number, first.ended ? i : 0,
                   name(first.ended ? lane.word : first.word), first.ended ? 0 : i);
        if (!lane.ended && (lane.word != first.word || lane.threads != first.threads))
            broken("warp %u: lane 0 says %s, lane %u %s", number, name(first.word), i, name(lane.word));
    }
    const bool of_block = is_of_block(first.word);
    /* Any thread of the block may fence for them: they land at once. */
    if (first.ended || of_block) land([](const Put&) { return true; });
    ended_ = first.ended;
    if (ended_) return true;
    if (!of_block) running_ = ~0u;
    return !of_block;
}

/* Runs a kernel: all blocks at the same time. */
inline void launch(const Shape& shape, std::uint64_t seed, const std::vector<Window>& windows, const Kernel& kernel) {
    if (shape.warps == 0 || shape.warps > 32) broken("blocks of %u warps", shape.warps);
    const auto run = [&](unsigned number) {
        Random random{seed ^ number * 0x100u};
        Block(number, shape, random.next(), windows, kernel).run();
    };
    std::vector<std::thread> others;
    for (unsigned number = 1; number < shape.blocks; ++number) others.emplace_back(run, number);
    run(0);
    for (auto& other : others) other.join();
}
template <class F> void launch(const Shape& shape, std::uint64_t seed, const std::vector<Window>& windows, const F& work) {
    launch(shape, seed, windows, Kernel{[](const void* of) { (*(const F*)of)(); }, &work});
}

} /* namespace toy */
#endif
