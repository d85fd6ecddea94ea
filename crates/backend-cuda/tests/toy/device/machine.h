/*
 * machine.h: the toy's processor. A block is a team of threads, one for each warp; a warp's lanes take turns on its
 * thread, each with a stack of its own, and change at meetings and where they wait.
 *
 * It is hostile within the contract, and strict about it:
 *
 *   lanes     the next lane to run is drawn from a seed: what one lane does between two meetings may come before or after
 *             what any other does there
 *   puts      a put is on its way until its lane, or one that met it since, fences. It may land earlier, puts in any order,
 *             drawn likewise
 *   meetings  a lane that is missing, that has ended, or that says another word than the others, ends the program and is
 *             named
 */
#ifndef TOY_MACHINE_H
#define TOY_MACHINE_H

#include <ucontext.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
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

struct Window {
    unsigned char* base;
    std::uint64_t bytes;
};
/* Of all ranks; nullptr for those that are masked. EpRank.windows is not read. */
inline std::vector<Window> windows;

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

/* What all lanes say together. */
enum class Word { meet, all, any, votes, shuffle, block_meet, block_any };
inline const char* name(Word word) {
    constexpr const char* names[] = {"ep_warp_meet",    "ep_warp_all",   "ep_warp_any", "ep_warp_votes",
                                     "ep_warp_shuffle", "ep_block_meet", "ep_block_any"};
    return names[(int)word];
}

/* The meeting of a block's warps, and what the block shares. */
class Block {
public:
    Block(unsigned number, unsigned blocks, unsigned warps, std::size_t pool)
        : number(number), blocks(blocks), warps(warps), pool_(pool / 16 + 1) {
        /* What nobody has written is nothing that one could go on with. */
        std::memset(pool_.data(), 0xee, 16 * pool_.size());
    }

    const unsigned number, blocks, warps;

    unsigned char* pool() { return (unsigned char*)pool_.data(); }

    /* Whether any warp says so. By the thread of each. */
    bool meet(bool mine) {
        std::unique_lock<std::mutex> lock(mutex_);
        said_ |= mine;
        const unsigned long turn = turn_;
        if (++here_ == warps) {
            answer_ = said_;
            said_ = false;
            here_ = 0;
            ++turn_;
            come_.notify_all();
        }
        come_.wait(lock, [&] { return turn != turn_; });
        return answer_;
    }

    /* The variable of this name. */
    void* shared(const void* name, std::size_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto& room = shared_[name];
        if (!room) {
            room.reset(new std::uint64_t[bytes / 8 + 1]);
            std::memset(room.get(), 0xee, bytes);
        }
        return room.get();
    }

private:
    struct alignas(16) Unit { unsigned char bytes[16]; };
    std::vector<Unit> pool_;
    std::mutex mutex_;
    std::condition_variable come_;
    unsigned here_ = 0;
    unsigned long turn_ = 0;
    bool said_ = false, answer_ = false;
    std::map<const void*, std::unique_ptr<std::uint64_t[]>> shared_;
};

/* A put on its way. */
struct Put {
    unsigned char* to;
    unsigned char bytes[32];
    unsigned count;
    unsigned lane;
    unsigned long meetings; /* of its lane, before it */
};

class Warp {
public:
    Warp(Block& block, unsigned number, std::uint64_t seed, const std::function<void()>& kernel)
        : block(block), number(number), random_{seed}, kernel_(kernel), stacks_(new char[kLanes * kStack]) {}

    Block& block;
    const unsigned number;

    /* Of the thread that calls. */
    static Warp& own() { return *own_; }
    unsigned lane() const { return lane_; }

    /* Runs the kernel to its end. */
    void run() {
        own_ = this;
        for (unsigned i = 0; i < kLanes; ++i) {
            getcontext(&lanes_[i].context);
            lanes_[i].context.uc_stack.ss_sp = stacks_.get() + i * kStack;
            lanes_[i].context.uc_stack.ss_size = kStack;
            lanes_[i].context.uc_link = &scheduler_;
            makecontext(&lanes_[i].context, play, 0);
        }
        while (step()) {}
        land([](const Put&) { return true; });
    }

    /* A word of all lanes: what each of them says. */
    const std::uint64_t* meet(Word word, std::uint64_t says = 0) {
        Lane& lane = lanes_[lane_];
        said_[lane.meetings % 2][lane_] = says;
        lane.word = word;
        lane.state = State::met;
        swapcontext(&lane.context, &scheduler_);
        /* Nobody says anything new in this place before all have met once more. */
        return said_[lane.meetings++ % 2];
    }

    /* The lane waits for others: it lets them run. */
    void wait() {
        waits_ = true;
        swapcontext(&lanes_[lane_].context, &scheduler_);
    }

    void put(unsigned char* to, const void* from, unsigned bytes) {
        for (unsigned at = 0; at < bytes; at += 32) {
            Put put{to + at, {}, bytes - at < 32 ? bytes - at : 32, lane_, lanes_[lane_].meetings};
            std::memcpy(put.bytes, (const unsigned char*)from + at, put.count);
            puts_.push_back(put);
        }
    }

    /* All puts of the lane have landed, and those of lanes that it met since. */
    void fence() {
        land([&](const Put& put) { return put.lane == lane_ || put.meetings < lanes_[lane_].meetings; });
    }

private:
    enum class State { runs, met, ended };
    struct Lane {
        ucontext_t context;
        State state = State::runs;
        Word word = Word::meet;
        unsigned long meetings = 0;
    };

    static void play() {
        own_->kernel_();
        own_->lanes_[own_->lane_].state = State::ended;
    }

    /* Lets a lane run, or all go on that have met; false at the end. */
    bool step() {
        unsigned ready[kLanes], count = 0;
        for (unsigned i = 0; i < kLanes; ++i)
            if (lanes_[i].state == State::runs) ready[count++] = i;
        if (count == 0) return meeting();
        lane_ = ready[random_.below(count)];
        waits_ = false;
        swapcontext(&scheduler_, &lanes_[lane_].context);
        if (!puts_.empty() && random_.below(2) == 0) {
            /* Some put lands by itself. */
            const std::size_t one = random_.below(puts_.size());
            land(puts_[one]);
            puts_.erase(puts_.begin() + (long)one);
        }
        if (waits_) rest();
        else waited_ = 0;
        return true;
    }

    /* Other warps need the processor, and after a while this one nothing but time. */
    void rest() {
        if (++waited_ < 100) std::this_thread::yield();
        else std::this_thread::sleep_for(std::chrono::microseconds(50));
    }

    bool meeting() {
        const Lane& first = lanes_[0];
        for (unsigned i = 1; i < kLanes; ++i) {
            const Lane& lane = lanes_[i];
            if (lane.state != first.state)
                broken("warp %u, lane %u: %s, while lane %u has ended", number, first.state == State::met ? 0 : i,
                       name(first.state == State::met ? first.word : lane.word), first.state == State::met ? i : 0);
            if (lane.state == State::met && lane.word != first.word)
                broken("warp %u: lane 0 says %s, lane %u %s", number, name(first.word), i, name(lane.word));
        }
        if (first.state == State::ended) return false;
        if (first.word == Word::block_meet || first.word == Word::block_any) {
            /* Any thread of the block may fence for them: they land at once. */
            land([](const Put&) { return true; });
            std::uint64_t* said = said_[first.meetings % 2];
            bool any = false;
            for (unsigned i = 0; i < kLanes; ++i) any |= said[i] != 0;
            any = block.meet(any);
            for (unsigned i = 0; i < kLanes; ++i) said[i] = any;
        }
        for (Lane& lane : lanes_) lane.state = State::runs;
        return true;
    }

    static void land(const Put& put) { std::memcpy(put.to, put.bytes, put.count); }
    template <class F> void land(F due) {
        std::vector<Put> left;
        for (const Put& put : puts_) {
            if (due(put)) land(put);
            else left.push_back(put);
        }
        puts_.swap(left);
    }

    static thread_local Warp* own_;
    Random random_;
    const std::function<void()>& kernel_;
    std::unique_ptr<char[]> stacks_;
    ucontext_t scheduler_;
    Lane lanes_[kLanes];
    std::uint64_t said_[2][kLanes] = {};
    std::vector<Put> puts_;
    unsigned lane_ = 0;
    bool waits_ = false;
    unsigned waited_ = 0;
};
inline thread_local Warp* Warp::own_ = nullptr;

/* Runs a kernel: `blocks` blocks of `warps` warps at the same time, with `pool` bytes of shared memory each. */
inline void launch(unsigned blocks, unsigned warps, std::size_t pool, std::uint64_t seed,
                   const std::function<void()>& kernel) {
    std::vector<std::unique_ptr<Block>> all;
    for (unsigned number = 0; number < blocks; ++number) all.emplace_back(new Block(number, blocks, warps, pool));
    std::vector<std::thread> threads;
    for (auto& block : all)
        for (unsigned number = 0; number < warps; ++number)
            threads.emplace_back([&kernel, &block, number, seed] {
                Random random{seed ^ (block->number * 0x100u + number)};
                Warp(*block, number, random.next(), kernel).run();
            });
    for (auto& thread : threads) thread.join();
}

} /* namespace toy */
#endif
