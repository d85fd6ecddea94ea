/*
 * machine.h: the twin's device: cores as fibers of a seeded scheduler, their pipes, their unified buffers (UB), their scalar caches, and
 * global memory (GM).
 *
 * Written from the device's documents, blind to the kernels. What the documents do not promise does not hold here:
 *
 *   pipes    MTE2, MTE3 and V run beside the scalar unit S, as late as the seed likes. Inside a pipe anything may overtake anything, and a
 *            copy moves in pieces, unless a barrier or flag stands between
 *   flags    one bit for each event and id, set by one pipe behind all that it was given before, taken by another
 *   cache    a core's scalar reads and writes of GM go through lines of 64 bytes that it fetches once and writes back whole, when it
 *            cleans them or whenever the seed likes
 *   UB       192 KiB a core, of undefined bytes at first. What S stores there lands late, though S itself reads it at once
 *   reach    a core reads and writes its own device's memory, and the windows of devices of its group
 *
 * A rule that is broken ends the run with a fault: the rule, rank, core and call. All ranks live in one machine, on one scheduler; or each is a
 * process with a machine of its own, which runs the launches of its rank (shared.cpp).
 */
#ifndef TWIN_MACHINE_H
#define TWIN_MACHINE_H

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ucontext.h>

#include "network.h"

namespace twin {

constexpr uint32_t kUbBytes = 196608;
constexpr uint32_t kUbBuffers = 64;
constexpr uint32_t kBlock = 32;
constexpr uint32_t kLine = 64;
constexpr uint32_t kLines = 64; /* of a core's scalar cache */
constexpr std::size_t kStack = 256 << 10;
constexpr uint32_t kEvents = 6; /* ids 6 and 7 are the framework's */
constexpr uint32_t kCores = 48;

/* Bytes of memory in whole lines. */
constexpr uint64_t padded(uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

/* S has a queue, too: of its stores to the UB, which land in order and late, and of the flags behind them. */
enum Pipe : uint32_t { kMte2, kMte3, kVector, kScalar, kPipes };
const char* name_of(uint32_t pipe);

/* What is not promised is drawn here. */
class Random {
    uint64_t state_;

public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567ull) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    uint64_t below(uint64_t limit) { return (uint64_t)((unsigned __int128)next() * limit >> 64); }
    /* Undefined bytes. */
    void fill(unsigned char* bytes, uint64_t count) {
        for (uint64_t at = 0; at < count; at += 8) {
            const uint64_t word = next();
            std::memcpy(bytes + at, &word, count - at < 8 ? count - at : 8);
        }
    }
    /* In one of so many cases. */
    bool once_in(uint64_t cases) { return below(cases) == 0; }
};

/* Bytes that an instruction reads or writes: of the core's UB, or of GM by its device address. */
struct Span {
    bool ub;
    bool writes;
    uint64_t at;
    uint64_t bytes;
};

/* Something in a pipe's queue. */
struct Item {
    enum Kind { kWork, kSet, kWait, kBarrier } kind = kWork;
    const char* call = "";
    uint64_t serial = 0;     /* in the order of the core's program */
    uint64_t not_before = 0; /* of work: the turn from which on it may be done */
    uint32_t event = 0;      /* of a flag: its kind * 8 + id */
    std::vector<Span> spans;                   /* of work */
    std::vector<std::function<void()>> pieces; /* of work, done in any order */
};

/* A line of a core's scalar cache. */
struct Line {
    unsigned char bytes[kLine];
    bool dirty;
};

/* The lines of a core's scalar cache, in no order. Where they lie in GM stands apart: most looks compare nothing else. */
struct Lines {
    uint64_t at[kLines];
    Line line[kLines];
    uint32_t count = 0;

    /* Its number; count where there is none. */
    uint32_t find(uint64_t start) const {
        uint32_t number = 0;
        while (number < count && at[number] != start) ++number;
        return number;
    }
    void erase(uint32_t number) {
        --count;
        at[number] = at[count];
        line[number] = line[count];
    }
};

/* What a core works in: given back and used again. */
struct Workshop {
    std::unique_ptr<unsigned char[]> stack, ub;
};

class Machine;
using Kernel = void (*)(uint8_t*);

class Core {
public:
    Core(Machine& machine, uint32_t rank, uint32_t number, uint32_t blocks, Kernel kernel, uint64_t args);
    ~Core();
    Core(const Core&) = delete;

    /* ---- by the scheduler ---- */

    /* Runs the fiber until it gives way, or a pipe for a moment; whether anything moved. */
    bool step();
    bool ended() const { return ended_ && idle(); }
    /* The core stops here, perhaps for a while. Of some cores the copies land that nothing holds up. */
    void stop();

    /* ---- by the fiber ---- */

    void call(const char* name); /* every call of the API begins with it; may give way */
    void spin(const char* name); /* as call, and always gives way */
    void issue(Pipe pipe, const char* call, std::vector<Span> spans, std::vector<std::function<void()>> pieces);
    void set_flag(uint32_t from, uint32_t to, uint32_t kind, int32_t id);
    void wait_flag(uint32_t from, uint32_t to, uint32_t kind, int32_t id);
    void barrier(uint32_t pipe);
    void barrier_all();

    uint32_t ub_alloc(uint32_t bytes);
    void ub_read(uint32_t at, void* into, uint32_t bytes);
    void ub_write(uint32_t at, const void* from, uint32_t bytes);
    unsigned char* ub(uint32_t at) { return shop_.ub.get() + at; }

    void cache_read(uint64_t at, void* into, uint32_t bytes);
    void cache_write(uint64_t at, const void* from, uint32_t bytes);
    void cache_clean(uint64_t at);
    void cache_clean_all();

    [[noreturn]] void fault(const char* rule, const char* format, ...) __attribute__((format(printf, 3, 4)));

    Machine& machine;
    const uint32_t rank, number, blocks;

private:
    static void main(uint32_t high, uint32_t low);
    void give_way();
    void until(const char* what, const std::function<bool()>& true_now);
    bool idle() const;
    bool run_pipe();
    bool run_item(uint32_t pipe);
    bool do_item(std::deque<Item>& queue, std::size_t at);
    void halt_if_faulty();
    void check_order(uint32_t pipe, uint64_t serial, const char* call, const std::vector<Span>& spans);
    void check_event(const char* call, uint32_t id);
    Line& line(uint64_t at);
    void write_back(uint32_t number);
    void end();

    Kernel kernel_;
    uint64_t args_;
    ucontext_t context_{};
    jmp_buf here_{}, there_{};
    bool started_ = false, ended_ = false;
    std::function<bool()> blocked_; /* empty: the fiber can go on */
    const char* call_ = "the start";
    uint64_t serial_ = 0;
    std::deque<Item> queues_[kPipes];
    bool flags_[12 * 8] = {}; /* of each event, ids */
    Workshop shop_;
    uint32_t ub_used_ = 0, ub_buffers_ = 0;
    Lines lines_;
    uint32_t laziness_;  /* a pipe's turn comes once in so many of the core's */
    uint32_t stalls_;    /* an instruction is late by many turns once in so many */
    uint32_t forgets_;   /* a line leaves the cache once in so many looks; 0: only where there is no room */
};

enum class Reach : uint32_t { kOwn, kGroup, kReadOnly };

struct Region {
    uint32_t rank;
    uint64_t bytes;
    Reach reach;
    std::shared_ptr<unsigned char> memory;
    bool given_back = false; /* and kept for copies that are under way */
};

struct Launch {
    Kernel kernel;
    uint32_t blocks;
    uint64_t args;
};

/* Bytes of the windows of a rank, to which another's copies vanish or land late, after so many that pass unharmed. The other's core notices
   nothing: the copy has ended for it. A launch ends when its late copies have landed. */
struct Way {
    uint32_t from, to;
    uint64_t begin, end; /* of the window */
    uint64_t after;
    uint64_t late; /* ticks; ~0: it vanishes */
};

class Machine {
public:
    Machine(uint64_t seed, uint32_t ranks, uint32_t group);

    uint64_t alloc(uint32_t rank, uint64_t bytes, Reach reach);
    /* Nobody may reach the memory any more; whether it began there. */
    bool release(uint64_t at);
    void launch(uint32_t rank, Launch launch);
    /* 0: all launches have ended. 1: a fault. 2: not yet, after so many turns. */
    int run(uint64_t turns);
    /* The same, but ends as soon as `launches` launches of rank have ended. Where ranks are processes, nobody moves this one's card while its host
       does something else: so the card has done all by then. 3: it has not yet. */
    int run_until(uint64_t turns, uint32_t rank, uint64_t launches);
    /* Launches of a rank that have ended. */
    uint64_t launches_ended(uint32_t rank) const { return launches_ended_[rank]; }

    /* ---- where ranks are processes: shared.cpp ---- */

    /* From now on time is the system's. */
    void share();
    /* A window that other processes may map, and the descriptor that they do it by. 0: the system has no memory. */
    uint64_t alloc_shared(uint32_t rank, uint64_t bytes, int32_t& descriptor);
    /* Names the processes whose devices may map a window; whether there is such a window, and room for them. */
    bool allow(uint64_t at, const int32_t* processes, uint64_t count);
    /* The window of a rank of another process. 0: it is not there, or, unless a card maps it, not for this process. */
    uint64_t map(uint32_t rank, uint64_t bytes, int32_t process, int32_t descriptor, bool by_card);
    /* Whether the process of a rank has ended, or given its window back. */
    bool has_left(uint32_t rank);

    /* ---- what may befall a rank ---- */

    /* From now on devices reach only those that they have opened. */
    void isolate() { isolated_ = true; }
    void open(uint32_t from, uint32_t to) { opened_[from][to] = true; }
    /* The rank's cores stop for ever at the copy to GM after `copies` more. What they have in flight lands or vanishes. */
    void crash(uint32_t rank, uint64_t copies) { copies_left_[rank] = copies + 1; }
    bool has_crashed(uint32_t rank) const { return crashed_[rank]; }
    /* The rank's cores get no turns from the copy to GM after `copies` more on, until it is let go on. What they have in flight lands, or stays where it is. */
    void suspend(uint32_t rank, uint64_t copies) { copies_to_suspend_[rank] = copies + 1; }
    bool is_suspended(uint32_t rank) const { return goes_on_at_[rank] != 0; }
    /* It goes on within so many ticks; 0: at once. */
    void go_on(uint32_t rank, uint64_t within);
    /* The rank's cores get few turns. */
    void starve(uint32_t rank) { slow_[rank] = true; }
    /* Something befalls the copies of a rank to some bytes of a peer's window. */
    void block(const Way& way) { ways_.push_back(way); }
    /* Copies that something has befallen. */
    uint64_t befallen() const { return befallen_; }
    /* Where nothing moves for long, a turn takes so many ticks: waits that last to their deadline take few turns. */
    void hurry(uint64_t ticks) { pace_ = ticks; }
    /* Some pipe has done something. */
    void moved() { quiet_ = 0; }
    /* Pieces of a copy to GM, as they are to be done. */
    void befall(uint32_t from, uint64_t at, uint64_t bytes, std::vector<std::function<void()>>& pieces);
    /* Where nothing can move, time passes. */
    void pass_idle_time(uint64_t ticks);
    /* A core issues a copy to GM; whether its rank goes on. It may have to wait before. */
    bool copies(uint32_t rank);
    /* A place for a core to work in, its UB of undefined bytes; and back. */
    Workshop workshop();
    void give_back(Workshop shop) { workshops_.push_back(std::move(shop)); }
    /* Bytes for the host, or nothing. */
    unsigned char* host(uint64_t at, uint64_t bytes);
    /* Bytes for a core; a fault where it may not. */
    unsigned char* reach(Core& core, const char* call, uint64_t at, uint64_t bytes, bool writes);

    /* Notes the first fault. */
    void broken(const Core* core, const char* call, const char* rule, const char* text);
    void broken(uint32_t rank, const char* call, const char* rule, const char* text);
    const std::string& fault() const { return fault_; }
    bool faulty() const { return !fault_.empty(); }

    Random random;
    Network network{*this};
    uint64_t cycles = 0;
    uint64_t history = 0; /* a hash of all turns */
    std::vector<std::size_t> ready; /* what a pipe may do: kept for its memory */
    uint32_t gives_way;   /* a call gives way once in so many cases */

private:
    uint64_t place(uint32_t rank, uint64_t bytes, Reach reach, std::shared_ptr<unsigned char> memory);
    void start_next(uint32_t rank);
    void look_who_is_busy();
    void pass_time();
    void pass_shared_time();
    void catch_up();
    void end_launch(uint32_t rank);
    void fall(uint32_t rank);
    void stop_for_a_while(uint32_t rank);
    void wake();
    bool can_move() const;
    /* The region whose bytes, or whose end, lie there, and where it begins; nothing where there is none. */
    std::pair<uint64_t, Region*> region(uint64_t at) const;
    bool is_idle() const;

    uint32_t group_;
    bool isolated_ = false;
    std::vector<std::vector<bool>> opened_;                   /* [from, to] */
    std::vector<uint64_t> copies_left_;                       /* by rank: copies until it crashes, and one; 0: it does not */
    std::vector<bool> crashed_, fallen_, slow_;               /* by rank */
    std::vector<uint64_t> copies_to_suspend_;                 /* by rank: as copies_left_ */
    std::vector<uint64_t> goes_on_at_;                        /* by rank: when it goes on; ~0: not yet known; 0: it is not suspended */
    uint64_t next_goes_on_at_ = ~0ull;
    std::vector<uint64_t> launches_ended_;                    /* by rank */
    std::map<uint64_t, Region> regions_;
    std::vector<std::pair<uint64_t, Region*>> pages_;          /* of kGap bytes, from kFirstAddress on: the region that a page belongs to */
    std::vector<Workshop> workshops_;
    std::vector<unsigned char> noise_;
    uint64_t next_address_;
    std::vector<std::deque<Launch>> streams_;
    std::vector<std::vector<std::unique_ptr<Core>>> running_; /* by rank */
    std::vector<uint32_t> busy_;                              /* ranks that have some, and are not suspended */
    bool stale_ = true;                                       /* busy_ may have to change */
    uint32_t starved_rank_ = ~0u, starved_core_ = ~0u;
    uint64_t starved_until_ = 0, stuck_ = 0;
    std::vector<Way> ways_;
    std::multimap<uint64_t, std::function<void()>> under_way_; /* late copies, by when they land */
    std::vector<uint64_t> late_;                              /* by rank: its copies that are under way */
    std::vector<bool> is_ending_;                             /* by rank: its cores have ended, and late copies have not landed */
    uint64_t befallen_ = 0, quiet_ = 0, pace_ = 1;
    std::string fault_;

    /* The window of another process's rank. */
    struct Theirs {
        int file;
        uint64_t look_at; /* when to look next whether it is still there */
        bool left;
    };
    bool shared_ = false;
    uint64_t began_ = 0, looks_ = 0;
    std::map<uint32_t, Theirs> theirs_; /* by rank */
};

/* The core whose fiber runs. */
Core& own();

}  // namespace twin

#endif
