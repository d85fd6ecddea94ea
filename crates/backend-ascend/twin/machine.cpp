/* machine.cpp: the scheduler and global memory. */
#include "machine.h"

#include <algorithm>

#include <dlfcn.h>

namespace twin {

namespace {
/* Device addresses are nobody's on the host: what goes past the API ends the process. */
constexpr uint64_t kFirstAddress = 0x12c0ull << 48;
constexpr uint64_t kGap = 1 << 20;
constexpr uint64_t kTurnsOfAMood = 4096;
/* Turns in a row in which no core could move. */
constexpr uint64_t kStuck = 50000;
/* Turns in a row in which no pipe did anything, after which time passes faster where it may: more than hosts take to launch. */
constexpr uint64_t kQuiet = 20000;
}  // namespace

Machine::Machine(uint64_t seed, uint32_t ranks, uint32_t group)
    : random(seed), gives_way(1 + (uint32_t)random.below(4)), group_(group), opened_(ranks, std::vector<bool>(ranks)), copies_left_(ranks),
      crashed_(ranks), fallen_(ranks), slow_(ranks), copies_to_suspend_(ranks), goes_on_at_(ranks), launches_ended_(ranks), next_address_(kFirstAddress), streams_(ranks), running_(ranks),
      late_(ranks), is_ending_(ranks) {}

uint64_t Machine::alloc(uint32_t rank, uint64_t bytes, Reach reach) {
    std::shared_ptr<unsigned char> memory(new unsigned char[padded(bytes) + 1], std::default_delete<unsigned char[]>());
    random.fill(memory.get(), padded(bytes));
    return place(rank, bytes, reach, std::move(memory));
}

uint64_t Machine::place(uint32_t rank, uint64_t bytes, Reach reach, std::shared_ptr<unsigned char> memory) {
    const uint64_t at = next_address_;
    regions_.emplace(at, Region{rank, bytes, reach, std::move(memory)});
    next_address_ += (padded(bytes) + kGap) / kGap * kGap + kGap;
    pages_.resize((next_address_ - kFirstAddress) / kGap, {at, &regions_.at(at)});
    return at;
}

Workshop Machine::workshop() {
    Workshop shop;
    if (workshops_.empty()) {
        shop = Workshop{std::unique_ptr<unsigned char[]>(new unsigned char[kStack]), std::unique_ptr<unsigned char[]>(new unsigned char[kUbBytes])};
    } else {
        shop = std::move(workshops_.back());
        workshops_.pop_back();
    }
    if (noise_.empty()) {
        noise_.resize(2 * kUbBytes);
        random.fill(noise_.data(), noise_.size());
    }
    std::memcpy(shop.ub.get(), noise_.data() + random.below(kUbBytes), kUbBytes);
    return shop;
}

std::pair<uint64_t, Region*> Machine::region(uint64_t at) const {
    const uint64_t page = (at - kFirstAddress) / kGap;
    return at < kFirstAddress || page >= pages_.size() ? std::pair<uint64_t, Region*>{0, nullptr} : pages_[page];
}

bool Machine::release(uint64_t at) {
    const auto found = regions_.find(at);
    if (found == regions_.end()) return false;
    if (found->second.given_back) return false;
    found->second.given_back = true;
    theirs_.erase(found->second.rank);
    if (!is_idle()) return true;
    for (auto& page : pages_)
        if (page.second && page.second->given_back) page = {0, nullptr};
    for (auto region = regions_.begin(); region != regions_.end(); )
        region = region->second.given_back ? regions_.erase(region) : std::next(region);
    return true;
}

bool Machine::is_idle() const {
    return std::all_of(running_.begin(), running_.end(), [](const auto& cores) { return cores.empty(); });
}

unsigned char* Machine::host(uint64_t at, uint64_t bytes) {
    const auto [start, region] = this->region(at);
    if (!region || region->given_back || at - start > region->bytes || bytes > region->bytes - (at - start)) return nullptr;
    return region->memory.get() + (at - start);
}

unsigned char* Machine::reach(Core& core, const char* call, uint64_t at, uint64_t bytes, bool writes) {
    (void)call;
    const auto [start, found] = this->region(at);
    if (!found) core.fault("bounds", "global memory %#llx has no owner", (unsigned long long)at);
    const Region& region = *found;
    const uint64_t offset = at - start;
    if (region.given_back) core.fault("bounds", "memory of rank %u that was given back", region.rank);
    if (offset > region.bytes || bytes > region.bytes - offset)
        core.fault("bounds", "bytes %llu to %llu of a region of %llu of rank %u", (unsigned long long)offset,
                   (unsigned long long)(offset + bytes), (unsigned long long)region.bytes, region.rank);
    if (isolated_ && region.rank != core.rank && !opened_[core.rank][region.rank])
        core.fault("reach", "memory of rank %u, whose device was not opened to this one", region.rank);
    const bool same_group = region.rank / group_ == core.rank / group_;
    if (region.rank != core.rank && (region.reach != Reach::kGroup || !same_group))
        core.fault("reach", "memory of rank %u, which is %s", region.rank, same_group ? "no window" : "of another group");
    if (writes && region.reach == Reach::kReadOnly) core.fault("reach", "a write to memory that is only read");
    return region.memory.get() + offset;
}

void Machine::launch(uint32_t rank, Launch launch) {
    streams_[rank].push_back(launch);
    stale_ = true;
}

void Machine::start_next(uint32_t rank) {
    if (!running_[rank].empty() || is_ending_[rank] || streams_[rank].empty()) return;
    const Launch next = streams_[rank].front();
    streams_[rank].pop_front();
    network.next_launch(rank);
    for (uint32_t number = 0; number < next.blocks; ++number)
        running_[rank].push_back(std::make_unique<Core>(*this, rank, number, next.blocks, next.kernel, next.args));
}

bool Machine::copies(uint32_t rank) {
    if (copies_left_[rank] != 0 && --copies_left_[rank] == 0) crashed_[rank] = true;
    if (copies_to_suspend_[rank] != 0 && --copies_to_suspend_[rank] == 0) stop_for_a_while(rank);
    return !crashed_[rank];
}

void Machine::stop_for_a_while(uint32_t rank) {
    goes_on_at_[rank] = ~0ull;
    stale_ = true;
    for (auto& core : running_[rank]) core->stop();
    network.suspend(rank);
}

void Machine::go_on(uint32_t rank, uint64_t within) {
    goes_on_at_[rank] = cycles + (within == 0 ? 0 : random.below(within));
    next_goes_on_at_ = std::min(next_goes_on_at_, goes_on_at_[rank]);
}

void Machine::wake() {
    if (cycles < next_goes_on_at_) return;
    next_goes_on_at_ = ~0ull;
    for (uint32_t rank = 0; rank < goes_on_at_.size(); ++rank) {
        if (goes_on_at_[rank] > cycles) {
            next_goes_on_at_ = std::min(next_goes_on_at_, goes_on_at_[rank]);
        } else if (goes_on_at_[rank] != 0) {
            goes_on_at_[rank] = 0;
            stale_ = true;
            network.go_on(rank);
        }
    }
}

bool Machine::can_move() const {
    for (uint32_t rank = 0; rank < running_.size(); ++rank)
        if (!is_suspended(rank) && (!running_[rank].empty() || !streams_[rank].empty())) return true;
    return !under_way_.empty() || !network.is_idle();
}

void Machine::pass_idle_time(uint64_t ticks) {
    if (shared_) return catch_up();
    if (!can_move()) cycles += ticks;
}

void Machine::fall(uint32_t rank) {
    fallen_[rank] = true;
    stale_ = true;
    for (auto& core : running_[rank]) core->stop();
    running_[rank].clear();
    streams_[rank].clear();
}

void Machine::befall(uint32_t from, uint64_t at, uint64_t bytes, std::vector<std::function<void()>>& pieces) {
    if (ways_.empty()) return;
    const auto [start, found] = this->region(at);
    const Region& region = *found;
    const uint64_t begin = at - start;
    for (Way& way : ways_) {
        if (way.from != from || way.to != region.rank || region.reach != Reach::kGroup) continue;
        if (begin >= way.end || way.begin >= begin + bytes) continue;
        if (way.after > 0) {
            --way.after;
            continue;
        }
        ++befallen_;
        if (way.late == ~0ull) {
            pieces = {[] {}};
            return;
        }
        ++late_[from];
        pieces = {[this, at, bytes, rank = from, late = way.late, moves = std::move(pieces)] {
            /* What it writes is taken off again, and kept. */
            unsigned char* place = host(at, bytes);
            if (!place) return (void)--late_[rank];
            const std::vector<unsigned char> before(place, place + bytes);
            for (const auto& move : moves) move();
            const std::vector<unsigned char> written(place, place + bytes);
            std::copy(before.begin(), before.end(), place);
            under_way_.emplace(cycles + late, [this, at, rank, written] {
                if (unsigned char* there = host(at, written.size())) std::copy(written.begin(), written.end(), there);
                if (--late_[rank] == 0 && is_ending_[rank]) end_launch(rank);
            });
        }};
        return;
    }
}

void Machine::pass_time() {
    if (shared_) pass_shared_time();
    else cycles += ++quiet_ > kQuiet ? pace_ : 1;
    while (!under_way_.empty() && under_way_.begin()->first <= cycles) {
        under_way_.begin()->second();
        under_way_.erase(under_way_.begin());
        moved();
    }
}

void Machine::end_launch(uint32_t rank) {
    is_ending_[rank] = late_[rank] != 0;
    stale_ = true;
    if (!is_ending_[rank]) ++launches_ended_[rank];
}

int Machine::run(uint64_t turns) { return run_until(turns, 0, ~0ull); }

void Machine::look_who_is_busy() {
    stale_ = false;
    busy_.clear();
    for (uint32_t rank = 0; rank < running_.size(); ++rank) {
        if (is_suspended(rank)) continue;
        start_next(rank);
        if (!running_[rank].empty()) busy_.push_back(rank);
    }
}

int Machine::run_until(uint64_t turns, uint32_t awaited, uint64_t launches) {
    for (uint64_t turn = 0; turn < turns; ++turn) {
        if (faulty()) return 1;
        if (launches_ended_[awaited] >= launches && (!shared_ || network.is_idle())) return 0;
        wake();
        if (stale_) look_who_is_busy();
        if (busy_.empty() && under_way_.empty() && network.is_idle()) return 0;
        pass_time();
        network.step();
        if (busy_.empty()) continue;
        if (cycles >= starved_until_) {
            /* A mood: some rank or core is slow for a while. */
            starved_until_ = cycles + 1 + random.below(kTurnsOfAMood);
            starved_rank_ = random.once_in(2) ? (uint32_t)random.below(running_.size()) : ~0u;
            starved_core_ = random.once_in(2) ? (uint32_t)random.below(kCores) : ~0u;
        }
        const uint32_t rank = busy_[random.below(busy_.size())];
        if (rank == starved_rank_ && !random.once_in(16)) continue;
        if (slow_[rank] && !random.once_in(64)) continue;
        auto& cores = running_[rank];
        const std::size_t index = random.below(cores.size());
        Core& core = *cores[index];
        if (core.number == starved_core_ && !random.once_in(16)) continue;
        history = (history ^ ((uint64_t)rank << 32 | core.number)) * 0x100000001b3ull;
        if (core.step()) stuck_ = 0;
        else if (++stuck_ > kStuck) broken(&core, "the scheduler", "hang", "nothing can move any more: a flag that is waited for is never set");
        if (crashed_[rank] && !fallen_[rank]) {
            fall(rank);
            continue;
        }
        if (core.ended()) cores.erase(cores.begin() + (std::ptrdiff_t)index);
        if (cores.empty()) end_launch(rank);
    }
    return faulty() ? 1 : shared_ && !network.is_idle() ? 3 : 2;
}

void Machine::broken(const Core* core, const char* call, const char* rule, const char* text) {
    if (faulty()) return;
    char where[96];
    std::snprintf(where, sizeof where, " (rank %u, core %u, cycle %llu)", core->rank, core->number, (unsigned long long)cycles);
    fault_ = std::string(rule) + ": " + call + ": " + text + where;
}

void Machine::broken(uint32_t rank, const char* call, const char* rule, const char* text) {
    if (faulty()) return;
    char where[64];
    std::snprintf(where, sizeof where, " (rank %u, cycle %llu)", rank, (unsigned long long)cycles);
    fault_ = std::string(rule) + ": " + call + ": " + text + where;
}

}  // namespace twin

/* ---- for the host: what the library exports beside the kernels ---- */

#pragma GCC visibility push(default)
extern "C" {

/* Whether this library has the function: one of a library that it uses is no kernel. */
int twin_has(const void* function) {
    Dl_info here, there;
    return dladdr((const void*)&twin_has, &here) && dladdr(function, &there) && here.dli_fbase == there.dli_fbase;
}

twin::Machine* twin_new(uint64_t seed, uint32_t ranks, uint32_t group) { return new twin::Machine(seed, ranks, group); }
void twin_free(twin::Machine* machine) { delete machine; }
uint64_t twin_alloc(twin::Machine* machine, uint32_t rank, uint64_t bytes, uint32_t reach) {
    return machine->alloc(rank, bytes, (twin::Reach)reach);
}
int twin_write(twin::Machine* machine, uint64_t at, const void* from, uint64_t bytes) {
    unsigned char* to = machine->host(at, bytes);
    if (!to) return 1;
    std::memcpy(to, from, bytes);
    return 0;
}
int twin_read(twin::Machine* machine, uint64_t at, void* into, uint64_t bytes) {
    const unsigned char* from = machine->host(at, bytes);
    if (!from) return 1;
    std::memcpy(into, from, bytes);
    return 0;
}
/* Where bytes of the device lie, or nothing. */
unsigned char* twin_lies_at(twin::Machine* machine, uint64_t at, uint64_t bytes) { return machine->host(at, bytes); }
void twin_launch(twin::Machine* machine, uint32_t rank, twin::Kernel kernel, uint32_t blocks, uint64_t args) {
    machine->launch(rank, twin::Launch{kernel, blocks, args});
}
int twin_run(twin::Machine* machine, uint64_t turns) { return machine->run(turns); }
int twin_run_until(twin::Machine* machine, uint64_t turns, uint32_t rank, uint64_t launches) { return machine->run_until(turns, rank, launches); }
uint64_t twin_launches_ended(const twin::Machine* machine, uint32_t rank) { return machine->launches_ended(rank); }
int twin_release(twin::Machine* machine, uint64_t at) { return machine->release(at) ? 0 : 1; }
void twin_isolate(twin::Machine* machine) { machine->isolate(); }
void twin_open(twin::Machine* machine, uint32_t from, uint32_t to) { machine->open(from, to); }
void twin_crash(twin::Machine* machine, uint32_t rank, uint64_t copies) { machine->crash(rank, copies); }
int twin_has_crashed(const twin::Machine* machine, uint32_t rank) { return machine->has_crashed(rank); }
void twin_suspend(twin::Machine* machine, uint32_t rank, uint64_t copies) { machine->suspend(rank, copies); }
int twin_is_suspended(const twin::Machine* machine, uint32_t rank) { return machine->is_suspended(rank); }
void twin_go_on(twin::Machine* machine, uint32_t rank, uint64_t within) { machine->go_on(rank, within); }
void twin_pass_idle_time(twin::Machine* machine, uint64_t ticks) { machine->pass_idle_time(ticks); }
void twin_starve(twin::Machine* machine, uint32_t rank) { machine->starve(rank); }
void twin_starve_card(twin::Machine* machine, uint32_t rank) { machine->network.starve(rank); }
void twin_block(twin::Machine* machine, uint32_t from, uint32_t to, uint64_t begin, uint64_t end, uint64_t after, uint64_t late) {
    machine->block(twin::Way{from, to, begin, end, after, late});
}
uint32_t twin_key(twin::Machine* machine, uint32_t rank, uint64_t at, uint64_t bytes, uint32_t remote) {
    return machine->network.add_key(rank, at, bytes, remote != 0);
}
void twin_queue(twin::Machine* machine, uint32_t from, uint32_t to, uint32_t depth, uint32_t polls, twin::QueueView* view) {
    *view = machine->network.add_queue(from, to, depth, polls != 0);
}
void twin_close_queues(twin::Machine* machine, uint32_t rank) { machine->network.close(rank); }
uint64_t twin_sent(const twin::Machine* machine) { return machine->network.sent(); }
uint64_t twin_befallen(const twin::Machine* machine) { return machine->befallen(); }
void twin_hurry(twin::Machine* machine, uint64_t ticks) { machine->hurry(ticks); }
const char* twin_fault(const twin::Machine* machine) { return machine->fault().c_str(); }
uint64_t twin_cycles(const twin::Machine* machine) { return machine->cycles; }
uint64_t twin_history(const twin::Machine* machine) { return machine->history; }

}
#pragma GCC visibility pop
