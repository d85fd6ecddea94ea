/* core.cpp: a core: its fiber, pipes, flags, unified buffer and scalar cache. */
#include "machine.h"

namespace twin {

namespace {
/* Turns by which an instruction is late at most. */
constexpr uint64_t kStall = 1000;
/* Few bytes: there is room beside those of the program, and no call is needed to find them. */
thread_local Core* running __attribute__((tls_model("initial-exec"))) = nullptr;

bool clash(const Span& a, const Span& b) {
    return a.ub == b.ub && (a.writes || b.writes) && a.at < b.at + b.bytes && b.at < a.at + a.bytes;
}
}  // namespace

Core& own() { return *running; }

const char* name_of(uint32_t pipe) {
    static const char* const kNames[] = {"MTE2", "MTE3", "V", "S"};
    return kNames[pipe];
}

Core::Core(Machine& machine, uint32_t rank, uint32_t number, uint32_t blocks, Kernel kernel, uint64_t args)
    : machine(machine), rank(rank), number(number), blocks(blocks), kernel_(kernel), args_(args), shop_(machine.workshop()),
      laziness_(2 + (uint32_t)machine.random.below(3) * 14), stalls_(2u << machine.random.below(5)),
      forgets_((uint32_t)machine.random.below(2) * 64) {}

Core::~Core() { machine.give_back(std::move(shop_)); }

/* ---- the fiber ---- */

void Core::main(uint32_t high, uint32_t low) {
    Core* core = (Core*)((uintptr_t)high << 32 | low);
    core->kernel_((uint8_t*)core->args_);
    core->end();
    core->ended_ = true;
    core->give_way();
}

void Core::give_way() {
    if (_setjmp(here_) == 0) _longjmp(there_, 1);
}

bool Core::step() {
    const bool fiber = !ended_ && (!blocked_ || blocked_());
    /* Pipes move beside the fiber: some cores' as soon as they can, some cores' late. */
    if (!fiber || machine.random.once_in(laziness_)) {
        if (run_pipe()) return true;
        if (!fiber) return false;
    }
    blocked_ = nullptr;
    running = this;
    if (_setjmp(there_) == 0) {
        if (started_) _longjmp(here_, 1);
        started_ = true;
        getcontext(&context_);
        context_.uc_stack.ss_sp = shop_.stack.get();
        context_.uc_stack.ss_size = kStack;
        const uintptr_t self = (uintptr_t)this;
        makecontext(&context_, (void (*)())main, 2, (uint32_t)(self >> 32), (uint32_t)self);
        setcontext(&context_);
    }
    running = nullptr;
    return true;
}

void Core::until(const char* what, const std::function<bool()>& true_now) {
    call_ = what;
    while (!true_now()) {
        blocked_ = true_now;
        give_way();
    }
}

void Core::call(const char* name) {
    call_ = name;
    if (machine.random.once_in(machine.gives_way)) give_way();
}

void Core::spin(const char* name) {
    call_ = name;
    give_way();
}

void Core::fault(const char* rule, const char* format, ...) {
    char text[400];
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
    machine.broken(this, call_, rule, text);
    /* A faulty machine runs no more. */
    for (;;) give_way();
}

void Core::end() {
    call_ = "the end";
    until("the end", [this] { return idle(); });
    for (uint32_t event = 0; event < sizeof flags_; ++event)
        if (flags_[event]) fault("flags", "a flag is left set: event %u, id %u", event / 8, event % 8);
    for (uint32_t number = 0; number < lines_.count; ++number)
        if (lines_.line[number].dirty) fault("cache", "a scalar write was not cleaned: the line at %#llx", (unsigned long long)lines_.at[number]);
}

/* ---- pipes ---- */

bool Core::idle() const {
    for (const auto& queue : queues_)
        if (!queue.empty()) return false;
    return true;
}

void Core::issue(Pipe pipe, const char* call, std::vector<Span> spans, std::vector<std::function<void()>> pieces) {
    /* A rank that has crashed runs no more. */
    if (pipe == kMte3 && !machine.copies(rank))
        for (;;) give_way();
    while (machine.is_suspended(rank)) give_way();
    Item item;
    item.kind = Item::kWork;
    item.call = call;
    item.serial = ++serial_;
    if (pipe != kScalar && machine.random.once_in(stalls_)) item.not_before = machine.cycles + machine.random.below(kStall);
    item.spans = std::move(spans);
    item.pieces = std::move(pieces);
    queues_[pipe].push_back(std::move(item));
}

bool Core::run_pipe() {
    const uint32_t first = (uint32_t)machine.random.below(kPipes);
    for (uint32_t i = 0; i < kPipes; ++i)
        if (run_item((first + i) % kPipes)) return true;
    return false;
}

bool Core::run_item(uint32_t pipe) {
    auto& queue = queues_[pipe];
    if (queue.empty()) return false;
    if (pipe == kScalar) return do_item(queue, 0);
    /* Work may be done in any order, up to a barrier, which waits for all before it, or a wait, which holds up what comes behind it only.
       A flag is set when all before it has ended. */
    auto& ready = machine.ready;
    ready.clear();
    for (std::size_t at = 0; at < queue.size(); ++at) {
        const Item& item = queue[at];
        const bool first = at == 0;
        if ((item.kind == Item::kWork && item.not_before <= machine.cycles) || (item.kind == Item::kWait && flags_[item.event]) ||
            (first && (item.kind == Item::kSet || item.kind == Item::kBarrier)))
            ready.push_back(at);
        if (item.kind == Item::kWait || item.kind == Item::kBarrier) break;
    }
    if (ready.empty()) return false;
    return do_item(queue, ready[machine.random.below(ready.size())]);
}

bool Core::do_item(std::deque<Item>& queue, std::size_t at) {
    machine.moved();
    Item& item = queue[at];
    if (item.kind == Item::kSet) {
        if (flags_[item.event]) machine.broken(this, "SetFlag", "flags", "a flag is set that is set already: nobody has waited for it");
        flags_[item.event] = true;
    } else if (item.kind == Item::kWait) {
        flags_[item.event] = false;
    } else if (item.kind == Item::kWork) {
        check_order((uint32_t)(&queue - queues_), item.serial, item.call, item.spans);
        if (machine.faulty()) return true;
        const std::size_t piece = machine.random.below(item.pieces.size());
        item.pieces[piece]();
        item.pieces.erase(item.pieces.begin() + (std::ptrdiff_t)piece);
        if (!item.pieces.empty()) return true;
    }
    queue.erase(queue.begin() + (std::ptrdiff_t)at);
    return true;
}

/* What the core's program says first and touches the same bytes must have ended: else nothing orders the two. S's own stores are in order. */
void Core::check_order(uint32_t pipe, uint64_t serial, const char* call, const std::vector<Span>& spans) {
    for (uint32_t other = 0; other < kPipes; ++other) {
        if (pipe == kScalar && other == kScalar) continue;
        for (const Item& item : queues_[other]) {
            if (item.serial >= serial || item.kind != Item::kWork) continue;
            for (const Span& mine : spans)
                for (const Span& before : item.spans)
                    if (clash(mine, before)) {
                        char text[200];
                        std::snprintf(text, sizeof text, "it touches bytes of an earlier %s (%s) that has not ended: %s %#llx", item.call,
                                      name_of(other), mine.ub ? "UB" : "GM", (unsigned long long)mine.at);
                        machine.broken(this, call, "order", text);
                        return;
                    }
        }
    }
}

/* ---- flags and barriers ---- */

void Core::check_event(const char* call, uint32_t id) {
    call_ = call;
    if (id >= kEvents) fault("flags", "event id is %u, allowed: 0 to %u", id, kEvents - 1);
}

void Core::set_flag(uint32_t from, uint32_t to, uint32_t kind, int32_t id) {
    (void)to;
    check_event("SetFlag", (uint32_t)id);
    const uint32_t event = kind * 8 + (uint32_t)id;
    Item item;
    item.kind = Item::kSet;
    item.serial = ++serial_;
    item.event = event;
    queues_[from].push_back(std::move(item));
}

void Core::wait_flag(uint32_t from, uint32_t to, uint32_t kind, int32_t id) {
    (void)from;
    check_event("WaitFlag", (uint32_t)id);
    const uint32_t event = kind * 8 + (uint32_t)id;
    if (to == kScalar) {
        until("WaitFlag", [this, event] { return flags_[event]; });
        flags_[event] = false;
        return;
    }
    Item item;
    item.kind = Item::kWait;
    item.serial = ++serial_;
    item.event = event;
    queues_[to].push_back(std::move(item));
}

void Core::barrier(uint32_t pipe) {
    Item item;
    item.kind = Item::kBarrier;
    item.serial = ++serial_;
    queues_[pipe].push_back(std::move(item));
}

void Core::barrier_all() {
    until("PipeBarrier<PIPE_ALL>", [this] { return idle(); });
}

/* ---- unified buffer ---- */

uint32_t Core::ub_alloc(uint32_t bytes) {
    call_ = "InitBuffer";
    const uint32_t padded = (bytes + kBlock - 1) / kBlock * kBlock;
    if (++ub_buffers_ > kUbBuffers) fault("UB", "more than %u buffers", kUbBuffers);
    if (bytes > kUbBytes || padded > kUbBytes - ub_used_) fault("UB", "%u bytes where %u are left", bytes, kUbBytes - ub_used_);
    ub_used_ += padded;
    return ub_used_ - padded;
}

void Core::stop() {
    if (machine.random.once_in(2)) return;
    auto& copies = queues_[kMte3];
    while (!copies.empty() && copies.front().kind == Item::kWork && !machine.faulty()) do_item(copies, 0);
}

void Core::halt_if_faulty() {
    while (machine.faulty()) give_way();
}

void Core::ub_read(uint32_t at, void* into, uint32_t bytes) {
    call("LocalTensor.GetValue");
    const Span mine{true, false, at, bytes};
    check_order(kScalar, ++serial_, call_, {mine});
    halt_if_faulty();
    /* Its own stores up to the last one of these bytes. */
    auto& stores = queues_[kScalar];
    std::size_t behind = stores.size();
    while (behind > 0 && (stores[behind - 1].kind != Item::kWork || !clash(mine, stores[behind - 1].spans[0]))) --behind;
    for (; behind > 0; --behind) {
        do_item(stores, 0);
        halt_if_faulty();
    }
    std::memcpy(into, ub(at), bytes);
}

void Core::ub_write(uint32_t at, const void* from, uint32_t bytes) {
    call("LocalTensor.SetValue");
    uint64_t value = 0;
    std::memcpy(&value, from, bytes);
    unsigned char* to = ub(at);
    const Span mine{true, true, at, bytes};
    check_order(kScalar, ++serial_, call_, {mine});
    halt_if_faulty();
    issue(kScalar, call_, {mine}, {[=] { std::memcpy(to, &value, bytes); }});
}

/* ---- scalar cache ---- */

Line& Core::line(uint64_t at) {
    const uint64_t start = at / kLine * kLine;
    /* A line may leave at any time, and may stay for ever. */
    if (lines_.count > 0 && (lines_.count >= kLines || (forgets_ && machine.random.once_in(forgets_)))) {
        const uint32_t victim = (uint32_t)machine.random.below(lines_.count);
        write_back(victim);
        lines_.erase(victim);
    }
    const uint32_t number = lines_.find(start);
    if (number == lines_.count) {
        lines_.at[lines_.count++] = start;
        std::memcpy(lines_.line[number].bytes, machine.host(start, 1), kLine);
        lines_.line[number].dirty = false;
    }
    return lines_.line[number];
}

void Core::write_back(uint32_t number) {
    Line& line = lines_.line[number];
    unsigned char* to = line.dirty ? machine.host(lines_.at[number], 1) : nullptr;
    if (to) std::memcpy(to, line.bytes, kLine);
    line.dirty = false;
}

void Core::cache_read(uint64_t at, void* into, uint32_t bytes) {
    call("GetValue");
    if (at % bytes) fault("alignment", "a scalar of %u bytes at %#llx", bytes, (unsigned long long)at);
    machine.reach(*this, call_, at, bytes, false);
    std::memcpy(into, line(at).bytes + at % kLine, bytes);
}

void Core::cache_write(uint64_t at, const void* from, uint32_t bytes) {
    call("SetValue");
    if (at % bytes) fault("alignment", "a scalar of %u bytes at %#llx", bytes, (unsigned long long)at);
    machine.reach(*this, call_, at, bytes, true);
    Line& held = line(at);
    std::memcpy(held.bytes + at % kLine, from, bytes);
    held.dirty = true;
}

void Core::cache_clean(uint64_t at) {
    spin("DataCacheCleanAndInvalid");
    machine.reach(*this, call_, at, 1, false);
    const uint32_t number = lines_.find(at / kLine * kLine);
    if (number == lines_.count) return;
    write_back(number);
    lines_.erase(number);
}

void Core::cache_clean_all() {
    spin("DataCacheCleanAndInvalid");
    for (uint32_t number = 0; number < lines_.count; ++number) write_back(number);
    lines_.count = 0;
}

}  // namespace twin
