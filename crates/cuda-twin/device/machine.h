/*
 * machine.h: the toy's processor, as kernels see it (machine.cpp: how it works). A block is a thread of the CPU; its lanes take
 * turns on that thread, each with a stack of its own, and change at meetings and where they wait. Linux on x86-64.
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
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

/* Kernels may lie in other libraries. */
namespace toy __attribute__((visibility("default"))) {

constexpr unsigned kLanes = 32;
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
    /* Less than `limit`, which has 32 bits. */
    std::size_t below(std::size_t limit) { return (next() >> 32) * limit >> 32; }
};

/* What lanes say together: all of a warp, all of a block, all of a block's first warps, all of a team of its warps. */
enum class Word { meet, all, any, votes, shuffle, block_meet, block_any, all_of, team_meet };

/* Stacks of a warp. They are used again. */
class Stacks {
public:
    Stacks();
    ~Stacks();
    Stacks(const Stacks&) = delete;
    char* end(unsigned lane) const;

private:
    char* memory_;
};

/* A get on its way to shared memory; or a part of one. */
struct Fetch {
    unsigned char* to;
    const unsigned char* from;
    unsigned count;
    unsigned lane;
    unsigned long number; /* of the lane's fetches, of which it is a part */
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
    Warp(Block& block, unsigned number);
    ~Warp();

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

    void put(unsigned char* to, const void* from, unsigned bytes);
    void fetch(unsigned char* to, const unsigned char* from, unsigned bytes);
    void end_fetch();
    /* All fetches of the lane have come but its last `pending`. */
    void await_fetches(unsigned long pending);
    /* All puts of the lane have landed, and those of lanes that it met since. */
    void fence();

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

    void begin();
    static void play();
    void leave();
    /* Lets a lane run. */
    void step(Random& random);
    /* No lane can run: all have met, or ended. False where they wait for other warps. */
    bool settle();
    /* Whether it is where only others of its block can let it go on. */
    bool is_apart() const { return running_ == 0 && !ended_; }
    void go_on(bool answer);
    bool any() const;

    /* Of a block's thread. Not thread_local: whoever asks for one of another library looks first whether it has to be made. */
    static __thread Warp* own_;
    Stacks stacks_;
    Lane lanes_[kLanes];
    std::uint64_t said_[2][kLanes] = {};
    std::vector<Put> puts_;
    std::vector<Fetch> fetches_;
    std::uint32_t running_ = 0; /* lanes that may run: a bit for each */
    unsigned lane_ = 0;
    bool ended_ = false;
};

/* What a launch runs, in every thread. */
struct Kernel {
    void (*run)(const void* of);
    const void* of;
};

/* Blocks of a launch, warps of a block, bytes of its shared memory, and how many blocks run at a time; all where that is 0. */
struct Shape {
    unsigned blocks, warps;
    std::size_t pool;
    unsigned at_a_time = 0;
};

/* What a block shares, and its turns. */
class Block {
public:
    Block(unsigned number, const Shape& shape, std::uint64_t seed, const std::vector<Window>& windows, const Kernel& kernel);
    ~Block();

    const unsigned number, blocks, warps;
    /* Of all ranks. */
    const std::vector<Window>& windows;
    const Kernel& kernel;

    unsigned char* pool();
    /* The variable of this name. */
    void* shared(const void* name, std::size_t bytes);

    /* Runs the kernel to its end. */
    void run();

private:
    friend class Warp;

    bool step();
    /* Other blocks need the processor, and after a while this one nothing but time. */
    void rest();
    /* A warp has come to where others of its block meet: they go on when all have. */
    void meeting(Warp& last);

    struct alignas(128) Unit { unsigned char bytes[128]; };
    Random random_;
    std::vector<Unit> pool_;
    std::map<const void*, std::unique_ptr<std::uint64_t[]>> shared_;
    std::vector<std::unique_ptr<Warp>> all_;
    void* turns_ = nullptr; /* the stack of run */
    bool waits_ = false, tells_ = false;
    unsigned waited_ = 0, ready_ = 0; /* warps that may run */
};

/* Runs a kernel: all blocks at the same time, or fewer; another begins, which is drawn from the seed, when one has ended. */
void launch(const Shape& shape, std::uint64_t seed, const std::vector<Window>& windows, const Kernel& kernel);
template <class F> void launch(const Shape& shape, std::uint64_t seed, const std::vector<Window>& windows, const F& work) {
    launch(shape, seed, windows, Kernel{[](const void* of) { (*(const F*)of)(); }, &work});
}

} /* namespace toy */
#endif
