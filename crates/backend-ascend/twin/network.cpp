/* network.cpp: queues, elements, messages. */
#include "machine.h"

#include <algorithm>

namespace twin {

namespace {
constexpr uint32_t kWrite = 3;
/* Messages of a queue that travel at a time. */
constexpr std::size_t kUnderWay = 6;
/* A queue's turn comes once in so many, where its rank's card is starved. */
constexpr uint32_t kStarved = 1024;

uint32_t word(const unsigned char* element, uint32_t at) {
    uint32_t value;
    std::memcpy(&value, element + at, 4);
    return value;
}
uint64_t address(const unsigned char* element, uint32_t at) {
    uint64_t value;
    std::memcpy(&value, element + at, 8);
    return value;
}
}  // namespace

void Network::fault(const Queue& queue, const char* format, ...) {
    char text[300];
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
    machine_.broken(queue.from, "a queue's element", "roce", text);
}

uint32_t Network::add_key(uint32_t rank, uint64_t at, uint64_t bytes, bool remote) {
    const uint32_t key = (uint32_t)(keys_.size() + 1) << 8 | (uint32_t)machine_.random.below(256);
    keys_.push_back(Key{rank, key, at, bytes, remote});
    return key;
}

const Network::Key* Network::key(uint32_t rank, uint32_t key, bool remote) const {
    for (const Key& held : keys_)
        if (held.rank == rank && held.key == key && held.remote == remote) return &held;
    return nullptr;
}

QueueView Network::add_queue(uint32_t from, uint32_t to, uint32_t depth, bool polls) {
    const auto zeroed = [&](uint64_t bytes, Reach reach) {
        const uint64_t at = machine_.alloc(from, bytes, reach);
        std::memset(machine_.host(at, bytes), 0, bytes);
        return at;
    };
    Queue queue;
    queue.from = from;
    queue.to = to;
    queue.mtu = 1024u << machine_.random.below(3);
    queue.laziness = (starved_ >> from & 1) != 0 ? kStarved : 1u << machine_.random.below(8);
    QueueView& view = queue.view;
    view.number = ++made_ * 16 + (uint32_t)machine_.random.below(16);
    view.depth = depth;
    view.level = (uint32_t)machine_.random.below(8);
    view.completion_depth = polls ? depth : 0;
    view.elements = zeroed((uint64_t)depth * kElement, Reach::kOwn);
    view.doorbell = zeroed(8, Reach::kOwn);
    /* On the firmware's route the count is the card's: no core writes it. */
    view.tail = zeroed(8, polls ? Reach::kOwn : Reach::kReadOnly);
    view.completions = polls ? zeroed((uint64_t)depth * kCompletion, Reach::kReadOnly) : 0;
    view.completions_taken = polls ? zeroed(8, Reach::kOwn) : 0;
    const uint32_t starts[] = {0, 0u - (uint32_t)machine_.random.below(20), 65536u - (uint32_t)machine_.random.below(20)};
    queue.posted = queue.fetched = queue.done = view.posted = starts[machine_.random.below(3)];
    std::memcpy(machine_.host(view.tail, 4), &queue.done, 4);
    const QueueView made = view;
    queues_.push_back(std::move(queue));
    return made;
}

void Network::close(uint32_t rank) {
    queues_.erase(std::remove_if(queues_.begin(), queues_.end(), [rank](const Queue& queue) { return queue.from == rank; }), queues_.end());
}

void Network::suspend(uint32_t rank) {
    for (Queue& queue : queues_)
        if (queue.from == rank) queue.frozen = machine_.random.once_in(2);
}

void Network::go_on(uint32_t rank) {
    for (Queue& queue : queues_)
        if (queue.from == rank) queue.frozen = false;
}

bool Network::wants(Core& core, uint64_t at, uint64_t bytes) {
    for (Queue& queue : queues_) {
        const QueueView& view = queue.view;
        const bool bell = at < view.doorbell + 8 && view.doorbell < at + bytes;
        const uint64_t end = view.elements + (uint64_t)view.depth * kElement;
        if (!bell && (at >= end || view.elements >= at + bytes)) continue;
        if (queue.poster != ~0u && queue.poster != core.number)
            core.fault("roce", "core %u posts to a queue of core %u's", core.number, queue.poster);
        queue.poster = core.number;
        if (bell && (at != view.doorbell || bytes != 8)) core.fault("roce", "a doorbell of %llu bytes, allowed: 8", (unsigned long long)bytes);
        for (uint32_t index = queue.done; !bell && index != queue.posted && !queue.broken; ++index) {
            const uint64_t element = view.elements + (uint64_t)(index % view.depth) * kElement;
            if (at < element + kElement && element < at + bytes)
                core.fault("roce", "element %u is overwritten, which is not done", index);
        }
        return bell;
    }
    return false;
}

void Network::ring(Core& core, uint64_t at, uint64_t value) {
    for (Queue& queue : queues_) {
        const QueueView& view = queue.view;
        if (view.doorbell != at) continue;
        if ((uint32_t)value != view.number)
            return machine_.broken(core.rank, "a doorbell", "roce", "it names another queue");
        if (value >> 48 != view.level) return machine_.broken(core.rank, "a doorbell", "roce", "it names another service level");
        const uint32_t more = (uint16_t)((uint16_t)(value >> 32) - (uint16_t)queue.posted);
        if (more > view.depth - 1 - (queue.posted - queue.done))
            return machine_.broken(core.rank, "a doorbell", "roce", "more elements than the queue has room for");
        queue.posted += more;
        return;
    }
}

bool Network::fetch(Queue& queue) {
    if (queue.fetched == queue.posted || queue.under_way.size() >= kUnderWay) return false;
    const uint32_t index = queue.fetched, depth = queue.view.depth;
    const unsigned char* element = machine_.host(queue.view.elements + (uint64_t)(index % depth) * kElement, kElement);
    if (!element) {
        queue.broken = true;
        return false;
    }
    const uint32_t head = word(element, 0), bytes = word(element, 4), owner = head >> 7 & 1;
    if (owner != ((index & depth) == 0 ? 1u : 0u)) return fault(queue, "element %u belongs to another lap: its owner bit is %u", index, owner), true;
    if ((head & 31) != kWrite) return fault(queue, "opcode is %u, allowed: 3, a write", head & 31), true;
    if (word(element, 12) != 1u << 24) return fault(queue, "element %u has not one source", index), true;
    if (word(element, 32) != bytes || bytes == 0) return fault(queue, "element %u has a length of %u and a source of %u", index, bytes, word(element, 32)), true;
    Message message{address(element, 40), address(element, 24), bytes, (head >> 8 & 1) != 0, {}};
    const Key* from = key(queue.from, word(element, 36), false);
    const Key* to = key(queue.to, word(element, 20), true);
    if (!from || !to) return fault(queue, "element %u has a key of nobody's: the %s", index, from ? "target's" : "source's"), true;
    const auto outside = [&](const Key& key, uint64_t at) { return at < key.at || at - key.at > key.bytes || bytes > key.bytes - (at - key.at); };
    if (outside(*from, message.from) || outside(*to, message.to))
        return fault(queue, "element %u reaches out of what its %s key names", index, outside(*to, message.to) ? "target's" : "source's"), true;
    for (uint64_t at = 0; at < bytes; ) {
        const uint64_t fragment = at / queue.mtu, end = std::min<uint64_t>(bytes, (fragment + 1) * queue.mtu);
        const bool cut = end - at > 64 && machine_.random.once_in(4);
        const uint64_t upto = cut ? at + (1 + machine_.random.below((end - at) / 8 - 1)) * 8 : end;
        message.left.push_back(Piece{at, upto - at, fragment == 0});
        at = upto;
    }
    queue.under_way.push_back(std::move(message));
    ++queue.fetched;
    return true;
}

bool Network::deliver(Queue& queue) {
    std::vector<std::pair<std::size_t, std::size_t>> ready;
    bool before = true; /* all of the messages before has landed */
    for (std::size_t m = 0; m < queue.under_way.size(); ++m) {
        const auto& left = queue.under_way[m].left;
        for (std::size_t p = 0; p < left.size(); ++p)
            if (before || !left[p].first) ready.emplace_back(m, p);
        before = before && left.empty();
    }
    if (ready.empty()) return false;
    const auto [m, p] = ready[machine_.random.below(ready.size())];
    Message& message = queue.under_way[m];
    const Piece piece = message.left[p];
    message.left.erase(message.left.begin() + (std::ptrdiff_t)p);
    const unsigned char* from = machine_.host(message.from + piece.at, piece.bytes);
    unsigned char* to = machine_.host(message.to + piece.at, piece.bytes);
    if (!from || !to || machine_.has_crashed(queue.to) || machine_.has_left(queue.to)) {
        queue.broken = true;
        tell(queue, 1);
        return true;
    }
    std::vector<std::function<void()>> moves{[=] { std::memcpy(to, from, piece.bytes); }};
    machine_.befall(queue.from, message.to + piece.at, piece.bytes, moves);
    moves[0]();
    ++sent_;
    return true;
}

bool Network::complete(Queue& queue) {
    if (queue.under_way.empty() || !queue.under_way.front().left.empty()) return false;
    const bool signalled = queue.under_way.front().signalled;
    /* Places of completions are the kernel's to give back. */
    if (signalled && queue.view.completions) {
        uint32_t taken = 0;
        if (const unsigned char* at = machine_.host(queue.view.completions_taken, 4)) std::memcpy(&taken, at, 4);
        if (((queue.told - taken) & 0xffffff) >= queue.view.completion_depth) return fault(queue, "no room for a completion: %u taken", taken), true;
    }
    queue.under_way.pop_front();
    ++queue.done;
    if (signalled) tell(queue, 0);
    return true;
}

void Network::tell(Queue& queue, uint32_t status) {
    const QueueView& view = queue.view;
    if (!view.completions) {
        if (unsigned char* tail = status ? nullptr : machine_.host(view.tail, 4)) std::memcpy(tail, &queue.done, 4);
        return;
    }
    unsigned char* entry = machine_.host(view.completions + (uint64_t)(queue.told % view.completion_depth) * kCompletion, kCompletion);
    if (!entry) return;
    const uint32_t owner = (queue.told & view.completion_depth) == 0 ? 1 : 0;
    const uint32_t index = status ? queue.done : queue.done - 1, head = owner << 7 | status << 8 | (index & 0xffff) << 16;
    std::memcpy(entry + 16, &view.number, 4);
    std::memcpy(entry, &head, 4);
    ++queue.told;
}

void Network::step() {
    if (queues_.empty()) return;
    Queue& queue = queues_[machine_.random.below(queues_.size())];
    if (!queue.is_busy() || queue.frozen || !machine_.random.once_in(queue.laziness)) return;
    /* A rank that is gone neither sends nor answers. */
    if (machine_.has_crashed(queue.from)) return (void)(queue.broken = true);
    bool moved = false;
    const uint64_t first = machine_.random.below(3);
    for (uint64_t i = 0; i < 3 && !moved; ++i) {
        const uint64_t what = (first + i) % 3;
        moved = what == 0 ? fetch(queue) : what == 1 ? deliver(queue) : complete(queue);
    }
    if (moved) machine_.moved();
}

bool Network::is_idle() const {
    for (const Queue& queue : queues_)
        if (queue.is_busy() && !queue.frozen) return false;
    return true;
}

void Network::next_launch(uint32_t rank) {
    for (Queue& queue : queues_)
        if (queue.from == rank) queue.poster = ~0u;
}

}  // namespace twin
