/*
 * ep_far_lanes.h: the verbs of ep_far.h on the toy, and its network between nodes: a thread that carries what lanes hold.
 *
 * It is hostile within the contract, and strict about it:
 *
 *   puts       land in pieces, in any order, also among those of a lane (F2), late; their sources are read then, and not before (F5)
 *   publishes  of a lane in order, after all its earlier puts (F3)
 *   room       a lane holds few commands, and rests now and then
 *   posters    one thread at a time (F4); bytes outside of a window end the program (F8)
 */
#ifndef EP_FAR_LANES_H
#define EP_FAR_LANES_H
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <thread>

#include "ep_far.h"

namespace toy {

extern std::vector<Window> all_windows;

/* What a lane holds of a put: the bytes begin .. end have not landed. */
struct Posted {
    bool publishes;
    std::uint64_t number; /* of the lane's commands, from 1 */
    std::uint64_t from, to, begin, end;
    std::uint64_t bits;
};

struct FarLane {
    static constexpr std::size_t kRoom = 9;

    unsigned me, peer;
    std::mutex mutex;
    std::deque<Posted> held;
    std::uint64_t issued = 0, put = 0, settled = 0;
    std::size_t rests = 0; /* turns in which nothing of it moves */
    std::atomic<bool> posting{false};
};

class Network {
public:
    std::vector<std::unique_ptr<FarLane>> lanes;

    FarLane* lane(unsigned me, unsigned peer) {
        lanes.emplace_back(new FarLane);
        lanes.back()->me = me;
        lanes.back()->peer = peer;
        return lanes.back().get();
    }
    void start(std::uint64_t seed) {
        if (!lanes.empty()) thread_ = std::thread([this, seed] { run(Random{seed}); });
    }
    /* Before the windows end: lanes may hold credit that nobody waits for. */
    void stop() {
        stop_ = true;
        if (thread_.joinable()) thread_.join();
    }
    ~Network() { stop(); }

private:
    void run(Random random) {
        while (!stop_) {
            bool moved = false;
            const std::size_t first = random.below(lanes.size());
            for (std::size_t i = 0; i < lanes.size(); ++i) moved |= turn(*lanes[(first + i) % lanes.size()], random);
            if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    /* Carries a piece of what a lane holds. */
    bool turn(FarLane& lane, Random& random) {
        std::lock_guard<std::mutex> lock(lane.mutex);
        if (lane.held.empty() || (lane.rests > 0 && lane.rests-- > 0)) return false;
        if (random.below(8) == 0) lane.rests = random.below(30);
        std::size_t puts = 0;
        while (puts < lane.held.size() && !lane.held[puts].publishes) ++puts;
        if (puts == 0) {
            const Posted& one = lane.held[0];
            __atomic_store_n((std::uint64_t*)(all_windows[lane.peer].base + one.to), one.bits, __ATOMIC_RELEASE);
            lane.held.pop_front();
        } else {
            const std::size_t at = random.below(puts);
            Posted& one = lane.held[at];
            const std::uint64_t left = one.end - one.begin, piece = 1 + random.below(left);
            const bool back = random.below(2);
            const std::uint64_t begin = back ? one.end - piece : one.begin;
            std::memcpy(all_windows[lane.peer].base + one.to + begin, all_windows[lane.me].base + one.from + begin, piece);
            (back ? one.end : one.begin) = back ? begin : begin + piece;
            if (one.begin == one.end) lane.held.erase(lane.held.begin() + (long)at);
        }
        lane.settled = lane.issued;
        for (const Posted& one : lane.held)
            if (!one.publishes) {
                lane.settled = one.number - 1;
                break;
            }
        return true;
    }

    std::thread thread_;
    std::atomic<bool> stop_{false};
};

inline FarLane& far_lane(EpFar lane) {
    if (lane.state == 0) broken("a post on a lane between nodes that is none");
    return *(FarLane*)lane.state;
}

inline ep_u32 post(EpFar of, Posted one, std::uint64_t until) {
    FarLane& lane = far_lane(of);
    if (lane.posting.exchange(true)) broken("two threads of rank %u post on a lane to rank %u", lane.me, lane.peer);
    Warp::own().fence();
    ep_u32 status = EP_FAR_STALLED;
    do {
        {
            std::lock_guard<std::mutex> lock(lane.mutex);
            if (lane.held.size() < FarLane::kRoom) {
                one.number = ++lane.issued;
                if (!one.publishes) lane.put = one.number;
                lane.held.push_back(one);
                status = EP_FAR_OK;
            }
        }
        if (status != EP_FAR_OK) ep_nap(100);
    } while (status != EP_FAR_OK && ep_now() < until);
    lane.posting = false;
    Warp::own().tell();
    return status;
}

} /* namespace toy */

EP_DEV ep_u32 ep_far_put(EpFar lane, ep_u64 from, ep_u64 to, ep_u64 bytes, ep_u64 until, ep_u64* ticket) {
    toy::FarLane& of = toy::far_lane(lane);
    const ep_u64 there = toy::all_windows[of.peer].bytes, here = toy::all_windows[of.me].bytes;
    if (bytes > here || from > here - bytes || bytes > there || to > there - bytes)
        toy::broken("a put of %llu bytes from %llu to %llu leaves a window", bytes, from, to);
    const ep_u32 status = bytes ? toy::post(lane, {false, 0, from, to, 0, bytes, 0}, until) : EP_FAR_OK;
    *ticket = of.put;
    return status;
}
EP_DEV ep_u32 ep_far_publish(EpFar lane, ep_u64 cell, ep_u64 bits, ep_u64 until) {
    const ep_u64 there = toy::all_windows[toy::far_lane(lane).peer].bytes;
    if (cell % 8 || cell + 8 > there) toy::broken("a cell between nodes at %llu", cell);
    return toy::post(lane, {true, 0, 0, cell, 0, 0, bits}, until);
}
EP_DEV ep_u32 ep_far_flush(EpFar lane, ep_u64 ticket, ep_u64 until) {
    toy::FarLane& of = toy::far_lane(lane);
    for (;; ep_nap(100)) {
        {
            std::lock_guard<std::mutex> lock(of.mutex);
            if (of.settled >= ticket) return EP_FAR_OK;
        }
        if (ep_now() >= until) return EP_FAR_TIMEOUT;
    }
}
EP_DEV ep_u32 ep_far_poll(EpFar) { return EP_FAR_OK; }
EP_DEV ep_u64 ep_far_pulse(EpFar) { return ep_now(); }

#endif
