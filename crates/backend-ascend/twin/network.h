/*
 * network.h: the network cards of the twin's devices: queue pairs between ranks, whose elements cores write to global memory (GM).
 *
 * Written from the device's documents, blind to the kernels:
 *
 *   element    48 of 64 bytes: an RDMA WRITE with one source (hns, RoCE). The owner bit turns with each lap of the queue's own depth
 *   doorbell   8 bytes: queue, 16 bits of the count of elements posted, service level
 *   keys       a source lies in memory that its rank has registered, a target in memory that the peer has: as the keys say
 *   order      a message travels in pieces of the path's MTU. Of two messages of a queue only the first piece of the second comes after all
 *              of the first; all else may overtake. Sources are read as late as their completion allows
 *   completion by route: the card's firmware writes how many elements are done (HCCL), or the kernel polls a completion queue, whose place it
 *              gives back by a doorbell of its own (shmem)
 *
 * What cores get wrong ends the run with a fault of the rule `roce`. A target that is gone breaks the queue: nothing of it completes.
 */
#ifndef TWIN_NETWORK_H
#define TWIN_NETWORK_H

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace twin {

class Core;
class Machine;

/* What the host learns of a queue that it has made: the context of the kernels. */
struct QueueView {
    uint32_t number, depth, level, completion_depth;
    uint64_t elements; /* [depth], kElement bytes each */
    uint64_t doorbell;
    uint64_t tail;           /* elements done: u32, by the firmware, or by the kernel where it polls */
    uint64_t completions;    /* [completion_depth], kCompletion bytes each; 0: the firmware polls */
    uint64_t completions_taken; /* u32: where the kernel says how many it has taken */
    uint32_t posted, reserved;  /* elements posted before: queues live long, and counts wrap */
};

class Network {
public:
    static constexpr uint32_t kElement = 64, kCompletion = 32;

    explicit Network(Machine& machine) : machine_(machine) {}

    /* Makes memory of a rank known to its card: the key by which elements name it. `remote`: as a target. */
    uint32_t add_key(uint32_t rank, uint64_t at, uint64_t bytes, bool remote);
    /* A queue from a rank to another. The depth is a power of 2. */
    QueueView add_queue(uint32_t from, uint32_t to, uint32_t depth, bool polls);

    /* The queues of a rank that are made from now on get few turns. */
    void starve(uint32_t rank) { starved_ |= 1ull << rank; }
    /* Ends all queues of a rank. */
    void close(uint32_t rank);
    /* The rank is suspended, until it goes on: of some of its queues nothing moves. */
    void suspend(uint32_t rank);
    void go_on(uint32_t rank);

    /* A core issues a copy to GM: whether it is a doorbell, which rings when it has landed. */
    bool wants(Core& core, uint64_t at, uint64_t bytes);
    /* A doorbell was written. */
    void ring(Core& core, uint64_t at, uint64_t value);
    /* A moment of the cards. */
    void step();
    bool is_idle() const;
    /* Another launch: another core may post. */
    void next_launch(uint32_t rank);
    uint64_t sent() const { return sent_; }

private:
    struct Key {
        uint32_t rank, key;
        uint64_t at, bytes;
        bool remote;
    };
    struct Piece {
        uint64_t at, bytes;
        bool first; /* of the first fragment */
    };
    struct Message {
        uint64_t from, to, bytes;
        bool signalled;
        std::vector<Piece> left;
    };
    struct Queue {
        uint32_t from, to, mtu;
        uint32_t laziness; /* its turn comes once in so many */
        QueueView view;
        uint32_t posted = 0, fetched = 0, done = 0, told = 0; /* told: completions, ever */
        uint32_t poster = ~0u;
        bool broken = false, frozen = false;
        std::deque<Message> under_way;
        bool is_busy() const { return !broken && (posted != fetched || !under_way.empty()); }
    };

    bool fetch(Queue& queue);
    bool deliver(Queue& queue);
    bool complete(Queue& queue);
    void tell(Queue& queue, uint32_t status);
    const Key* key(uint32_t rank, uint32_t key, bool remote) const;
    void fault(const Queue& queue, const char* format, ...) __attribute__((format(printf, 3, 4)));

    Machine& machine_;
    std::deque<Queue> queues_;
    std::vector<Key> keys_;
    uint64_t starved_ = 0; /* ranks, a bit each */
    uint32_t made_ = 0;
    uint64_t sent_ = 0;
};

}  // namespace twin

#endif
