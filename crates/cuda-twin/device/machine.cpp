/*
 * machine.cpp: how the toy's processor works. Apart from what kernels include, as it is compiled once and they are many.
 */
#include "machine.h"

#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <thread>

namespace toy {
namespace {

constexpr std::size_t kStack = 128 << 10;

const char* name(Word word) {
    constexpr const char* names[] = {"ep_warp_meet",    "ep_warp_all",   "ep_warp_any",  "ep_warp_votes",
                                     "ep_warp_shuffle", "ep_block_meet", "ep_block_any", "ep_all_of", "ep_team_meet"};
    return names[(int)word];
}
/* Whether more than a warp says it; and whether a part of a block does. */
bool is_of_block(Word word) { return word >= Word::block_meet; }
bool is_of_part(Word word) { return word == Word::all_of || word == Word::team_meet; }

/* Leaves one stack for another: what a function may not change is kept on the one that is left. */
[[gnu::naked, gnu::noinline]] void change_stacks(void** /* left */, void* /* entered */) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
        "movq %rsp, (%rdi); movq %rsi, %rsp\n\t"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}

/* Stacks that no warp uses. Never freed: threads may outlive the program's end. */
struct Kept {
    std::mutex mutex;
    std::vector<char*> stacks;
};
Kept& kept() {
    static auto& one = *new Kept;
    return one;
}

void sleep() {
    const timespec a_while = {0, 50000};
    nanosleep(&a_while, nullptr);
}

/* What lies in 16 bytes lands at once, as a unit must. */
void land(const Put& put) {
    typedef unsigned Four __attribute__((vector_size(16)));
    if (put.count != sizeof(Four) || (std::uintptr_t)put.to % sizeof(Four)) {
        std::memcpy(put.to, put.bytes, put.count);
        return;
    }
    Four unit;
    std::memcpy(&unit, put.bytes, sizeof unit);
    *(volatile Four*)put.to = unit;
}
void land(const Fetch& fetch) { std::memcpy(fetch.to, fetch.from, fetch.count); }

/* Those of `all` that are due land, in order; the others stay. */
template <class T, class F> void land(std::vector<T>& all, F due) {
    std::size_t left = 0;
    for (const T& one : all) {
        if (due(one)) land(one);
        else all[left++] = one;
    }
    all.resize(left);
}
/* One of them lands. */
template <class T> void land_some(std::vector<T>& all, Random& random) {
    const std::size_t one = random.below(all.size());
    land(all[one]);
    all.erase(all.begin() + (long)one);
}

} /* namespace */

/* ---- warps ---- */

Stacks::Stacks() {
    std::lock_guard<std::mutex> lock(kept().mutex);
    auto& stacks = kept().stacks;
    if (!stacks.empty()) {
        memory_ = stacks.back();
        stacks.pop_back();
        return;
    }
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    memory_ = (char*)mmap(nullptr, kLanes * kStack, PROT_READ | PROT_WRITE, how, -1, 0);
    if (memory_ == MAP_FAILED) broken("no memory for the stacks of a warp");
}
Stacks::~Stacks() {
    std::lock_guard<std::mutex> lock(kept().mutex);
    kept().stacks.push_back(memory_);
}
char* Stacks::end(unsigned lane) const { return memory_ + (lane + 1) * kStack; }

__thread Warp* Warp::own_ = nullptr;

Warp::Warp(Block& block, unsigned number) : block(block), number(number) {}
Warp::~Warp() = default;

void Warp::begin() {
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
void Warp::play() {
    const Kernel& kernel = own_->block.kernel;
    kernel.run(kernel.of);
    own_->lanes_[own_->lane_].ended = true;
    own_->running_ &= ~(1u << own_->lane_);
    own_->leave();
    std::abort();
}
void Warp::leave() { change_stacks(&lanes_[lane_].stack, block.turns_); }

const std::uint64_t* Warp::meet(Word word, std::uint64_t says, unsigned threads) {
    Lane& lane = lanes_[lane_];
    said_[lane.meetings % 2][lane_] = says;
    lane.word = word;
    lane.threads = threads;
    running_ &= ~(1u << lane_);
    leave();
    /* Nobody says anything new in this place before all have met once more. */
    return said_[lane.meetings++ % 2];
}
void Warp::wait() {
    block.waits_ = true;
    leave();
}
void Warp::tell() {
    block.tells_ = true;
    leave();
}

void Warp::put(unsigned char* to, const void* from, unsigned bytes) {
    for (unsigned at = 0; at < bytes; at += 32) {
        Put put{to + at, {}, bytes - at < 32 ? bytes - at : 32, lane_, lanes_[lane_].meetings};
        std::memcpy(put.bytes, (const unsigned char*)from + at, put.count);
        puts_.push_back(put);
    }
}
void Warp::fence() {
    land(puts_, [&](const Put& put) { return put.lane == lane_ || put.meetings < lanes_[lane_].meetings; });
}

void Warp::fetch(unsigned char* to, const unsigned char* from, unsigned bytes) {
    std::memset(to, 0xee, bytes);
    fetches_.push_back(Fetch{to, from, bytes, lane_, lanes_[lane_].fetches});
}
void Warp::end_fetch() { ++lanes_[lane_].fetches; }
void Warp::await_fetches(unsigned long pending) {
    land(fetches_, [&](const Fetch& fetch) { return fetch.lane == lane_ && fetch.number + pending < lanes_[lane_].fetches; });
}

void Warp::step(Random& random) {
    /* From the one that is drawn on. */
    const unsigned first = (unsigned)random.below(kLanes);
    const std::uint32_t from_first = running_ >> first;
    lane_ = from_first ? first + (unsigned)__builtin_ctz(from_first) : (unsigned)__builtin_ctz(running_);
    own_ = this;
    change_stacks(&block.turns_, lanes_[lane_].stack);
    /* Some put lands by itself, and some of what is fetched comes. */
    if (!puts_.empty() && random.below(2) == 0) land_some(puts_, random);
    if (!fetches_.empty() && random.below(64) == 0) land_some(fetches_, random);
}

bool Warp::settle() {
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
    if (first.ended || of_block) land(puts_, [](const Put&) { return true; });
    ended_ = first.ended;
    if (ended_) return true;
    if (!of_block) running_ = ~0u;
    return !of_block;
}

void Warp::go_on(bool answer) {
    std::uint64_t* said = said_[lanes_[0].meetings % 2];
    for (unsigned i = 0; i < kLanes; ++i) said[i] = answer;
    running_ = ~0u;
}
bool Warp::any() const {
    const std::uint64_t* said = said_[lanes_[0].meetings % 2];
    bool any = false;
    for (unsigned i = 0; i < kLanes; ++i) any |= said[i] != 0;
    return any;
}

/* ---- blocks ---- */

Block::Block(unsigned number, const Shape& shape, std::uint64_t seed, const std::vector<Window>& windows, const Kernel& kernel)
    : number(number), blocks(shape.blocks), warps(shape.warps), windows(windows), kernel(kernel), random_{seed},
      pool_(shape.pool / sizeof(Unit) + 2) {
    /* What nobody has written is nothing that one could go on with. */
    std::memset(pool_.data(), 0xee, sizeof(Unit) * pool_.size());
    for (unsigned i = 0; i < warps; ++i) all_.emplace_back(new Warp(*this, i));
}
Block::~Block() = default;

unsigned char* Block::pool() {
    return (unsigned char*)(((std::uintptr_t)pool_.data() + sizeof(Unit) - 1) & ~(sizeof(Unit) - 1));
}
void* Block::shared(const void* name, std::size_t bytes) {
    auto& room = shared_[name];
    if (!room) {
        room.reset(new std::uint64_t[bytes / 8 + 1]);
        std::memset(room.get(), 0xee, bytes);
    }
    return room.get();
}

void Block::run() {
    for (auto& warp : all_) warp->begin();
    ready_ = warps;
    while (step()) {}
}

bool Block::step() {
    if (ready_ == 0) {
        for (auto& warp : all_)
            if (!warp->ended_) broken("warp %u of block %u: %s, and others do not", warp->number, number, name(warp->lanes_[0].word));
        return false;
    }
    /* From the one that is drawn on. */
    unsigned next = (unsigned)random_.below(warps);
    while (all_[next]->running_ == 0) next = next + 1 < warps ? next + 1 : 0;
    Warp& warp = *all_[next];
    waits_ = tells_ = false;
    warp.step(random_);
    if (tells_ && random_.below(8) == 0) sleep();
    if (warp.running_ == 0) {
        const bool goes_on = warp.settle();
        if (warp.running_ == 0) --ready_;
        if (!goes_on) meeting(warp);
    }
    if (!waits_) waited_ = 0;
    else if (++waited_ > 4 * kLanes * ready_) rest();
    return true;
}

void Block::rest() {
    if (waited_ < 16 * kLanes * warps) std::this_thread::yield();
    else sleep();
}

void Block::meeting(Warp& last) {
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
    ready_ += expected;
}

void launch(const Shape& shape, std::uint64_t seed, const std::vector<Window>& windows, const Kernel& kernel) {
    if (shape.warps == 0 || shape.warps > 32) broken("blocks of %u warps", shape.warps);
    const auto run = [&](unsigned number) {
        Random random{seed ^ number * 0x100u};
        Block(number, shape, random.next(), windows, kernel).run();
    };
    std::vector<unsigned> order(shape.blocks);
    for (unsigned number = 0; number < shape.blocks; ++number) order[number] = number;
    const bool all = shape.at_a_time == 0 || shape.at_a_time >= shape.blocks;
    Random turns{seed ^ 0x5eed};
    if (!all)
        for (unsigned left = shape.blocks; left > 1; --left) std::swap(order[left - 1], order[turns.below(left)]);
    std::atomic<unsigned> begun{0};
    const auto runs = [&] {
        for (unsigned turn; (turn = begun++) < shape.blocks;) run(order[turn]);
    };
    std::vector<std::thread> others;
    for (unsigned beside = 1; beside < (all ? shape.blocks : shape.at_a_time); ++beside) others.emplace_back(runs);
    runs();
    for (auto& other : others) other.join();
}

} /* namespace toy */
