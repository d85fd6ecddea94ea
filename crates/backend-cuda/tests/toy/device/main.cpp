/*
 * main.cpp: ranks on the toy device. Reads a job from stdin, runs its rounds (counts, a dispatch through rings, then a
 * combine through rings, by the kernels' own text) with all ranks at the same time, and writes what came of them to stdout.
 * tests/toy/job.rs writes jobs and reads results.
 */
#include "counts.cu"
#include "dispatch_ring.cu"
#include "combine_ring.cu"
#include "offer_none.cu"

#include <thread>

namespace toy {
/* Of all ranks. */
std::vector<Window> all_windows;
}

namespace {

std::FILE *job_in = stdin, *results_out = stdout;

/* Arrays, each behind its length in bytes. */
template <class T> std::vector<T> take() {
    std::uint64_t bytes = 0;
    std::vector<T> array;
    if (std::fread(&bytes, 8, 1, job_in) != 1 || bytes % sizeof(T))
        toy::broken("the job ends early, or has an array of %llu bytes", (ep_u64)bytes);
    array.resize(bytes / sizeof(T));
    if (bytes && std::fread(array.data(), 1, bytes, job_in) != bytes) toy::broken("the job ends early");
    return array;
}
template <class T> T take_one() {
    const auto array = take<T>();
    if (array.size() != 1) toy::broken("%zu in place of one", array.size());
    return array[0];
}
template <class T> void give(const std::vector<T>& array) {
    const std::uint64_t bytes = array.size() * sizeof(T);
    std::fwrite(&bytes, 8, 1, results_out);
    std::fwrite(array.data(), 1, bytes, results_out);
}
/* An address of 0 would say that there is no array; this one may have no numbers. */
template <class T> ep_u64 address(const std::vector<T>& array) {
    static const ep_u64 nothing = 0;
    return array.empty() ? (ep_u64)&nothing : (ep_u64)array.data();
}

/* What a rank brings to a round, and what it gets. */
struct Part {
    std::vector<ep_u8> x, scales, y;
    std::vector<ep_u8> bias[2];
    std::vector<ep_i32> position;
    std::vector<ep_i64> topk_idx;
    std::vector<float> topk_weights;
    std::vector<ep_u32> rows, choices; /* to each rank, of each expert */
    std::vector<ep_u32> matrix, first_of, first_at, tokens_of, chosen, arrived;
    std::vector<ep_i32> fanout; /* of the rail's ranks in other nodes, one after the other */

    std::vector<ep_u8> out, out_scales, combined;
    std::vector<ep_i64> out_idx;
    std::vector<float> out_weights, weights;
    std::vector<ep_i32> out_token, out_rank;
};

struct Round {
    ep_u64 settings;
    EpRings dispatch_rings, combine_rings;
    ep_u32 dispatch_roles, combine_roles;
    std::vector<ep_u32> tokens_of;
    std::vector<Part> parts;
};

/* The memory of a rank. */
struct Rank {
    EpRank view{};
    std::vector<ep_u64> window, local, cursors, far;
    std::vector<EpRole> dispatch_roles, combine_roles;
    EpReport report{};
    EpTest test{};
    ep_u32 crashed = 0;
};

/* Numbers of a job, in this order. */
struct Job {
    ep_u64 seed;    /* of the machine's turns, and of delays */
    ep_u64 allowed; /* nanoseconds */
    ep_u64 rounds;
    ep_u64 plant;   /* EP_PLANT_...; 0 for none */
    ep_u64 longest; /* delay, in nanoseconds; 0 for none */
    ep_u64 absent;  /* a rank that does nothing; any other number for none */
};

constexpr ep_u64 kPoison = 0xeeeeeeeeeeeeeeeeull;

#ifdef TOY_LIBRARY
/* Writes addresses of lanes' states: for each rank an array [ranks, lanes], 0 where there is no lane. Without windows: ends the lanes, before
 * the windows end. */
using MakeLanes = void (*)(void* of, const toy::Window* windows, ep_u64* const* far);
MakeLanes make_lanes;
void* makes_lanes;

void connect(Rank& rank, ep_u32, const EpWindow& w) {
    rank.far.assign((ep_u64)w.ranks * ep_lane_count(w.tracks), 0);
    rank.view.far = address(rank.far);
}
#elif defined(EP_FAR_H)
toy::Network network;

/* All lanes to the ranks of other nodes on this rail. */
void connect(Rank& rank, ep_u32 me, const EpWindow& w) {
    const ep_u32 width = w.ranks_per_node, lanes = ep_lane_count(w.tracks);
    rank.far.assign((ep_u64)w.ranks * lanes, 0);
    for (ep_u32 peer = me % width; peer < w.ranks; peer += width)
        for (ep_u32 lane = 0; peer != me && lane < lanes; ++lane)
            rank.far[(ep_u64)peer * lanes + lane] = (ep_u64)network.lane(me, peer);
    rank.view.far = address(rank.far);
}
#endif

void prepare(Rank& rank, ep_u32 me, const EpWindow& w, const Job& job) {
    rank.window.assign(w.window_bytes / 8, kPoison);
    toy::all_windows.push_back({(unsigned char*)rank.window.data(), w.window_bytes});
    rank.local.assign((sizeof(EpLocal) + 4 * w.ranks + 7) / 8, 0);
    ((EpLocal*)rank.local.data())->generation = 1;
    rank.cursors.assign(2 * w.ranks * w.tracks, 0);
    rank.test.seed = job.longest ? job.seed : 0;
    rank.test.longest = (ep_u32)job.longest;
    rank.test.host = (ep_u64)&rank.crashed;
    rank.test.plant = (ep_u32)job.plant;
    rank.test.poison = 1;
    rank.test.late_to = EP_FULL;
    rank.view.w = w;
    rank.view.local = address(rank.local);
    rank.view.report = (ep_u64)&rank.report;
    rank.view.cursors = address(rank.cursors);
    rank.view.first_op = 1;
    rank.view.allowed = job.allowed;
    rank.view.me = me;
    rank.view.generation = 1;
    rank.view.test = (ep_u64)&rank.test;
#ifdef EP_FAR_H
    connect(rank, me, w);
#endif
}

Part take_part(const EpWindow& w) {
    Part p;
    p.x = take<ep_u8>();
    p.scales = take<ep_u8>();
    p.position = take<ep_i32>();
    p.topk_idx = take<ep_i64>();
    p.topk_weights = take<float>();
    p.rows = take<ep_u32>();
    p.choices = take<ep_u32>();
    const ep_u64 rows = take_one<ep_u32>();
    p.y = take<ep_u8>();
    for (auto& bias : p.bias) bias = take<ep_u8>();
    const ep_u64 tokens = p.topk_idx.size() / w.topk;
    p.matrix.assign((ep_u64)w.ranks * w.ranks, 0x66666666);
    p.first_of.assign(w.ranks + 1, 0x66666666);
    p.first_at.assign(w.ranks, 0x66666666);
    p.tokens_of.assign(w.ranks, 0x66666666);
    p.chosen.assign(w.experts, 0x66666666);
    p.arrived.assign(w.local_experts, 0x66666666);
    p.out.assign(rows * w.scales_offset, 0xee);
    p.out_scales.assign(rows * w.scales_stride, 0xee);
    p.out_idx.assign(rows * w.topk, -7);
    p.out_weights.assign(rows * w.topk, -7.0f);
    p.out_token.assign(rows, -7);
    p.out_rank.assign(rows, -7);
    p.combined.assign(tokens * w.result_stride, 0xee);
    p.weights.assign(tokens * w.topk, -7.0f);
    return p;
}

Round take_round(const EpWindow& w) {
    Round round;
    round.settings = take_one<ep_u64>();
    round.dispatch_rings = take_one<EpRings>();
    round.dispatch_roles = take_one<ep_u32>();
    round.combine_rings = take_one<EpRings>();
    round.combine_roles = take_one<ep_u32>();
    round.tokens_of = take<ep_u32>();
    for (ep_u32 rank = 0; rank < w.ranks; ++rank) {
        Part part = take_part(w);
        ep_u64 gated = 0;
        for (ep_u32 source = rank % w.ranks_per_node; source < w.ranks; source += w.ranks_per_node)
            if (source != rank) gated += round.tokens_of[source];
        part.fanout.assign(gated * w.ranks_per_node, 0x66666666);
        round.parts.push_back(std::move(part));
    }
    return round;
}

EpCountsArgs counts_args(const Rank& rank, const Round& round, const Part& p) {
    EpCountsArgs a{};
    a.rows = address(p.rows);
    a.choices = address(p.choices);
    a.matrix = address(p.matrix);
    a.first_at = address(p.first_at);
    a.first_of = address(p.first_of);
    a.tokens_of = address(p.tokens_of);
    a.chosen = address(p.chosen);
    a.arrived = address(p.arrived);
    a.alignment = 1;
    a.tokens = round.tokens_of[rank.view.me];
    return a;
}

EpDispatchRingArgs dispatch_args(const Rank& rank, const Round& round, const Part& p) {
    const EpWindow& w = rank.view.w;
    EpDispatchRingArgs a{};
    a.rings = round.dispatch_rings;
    a.x = address(p.x);
    a.x_stride = w.scales_offset;
    a.scales = address(p.scales);
    a.scales_token = w.scales_stride;
    a.scales_word = 4;
    a.position = address(p.position);
    a.topk_idx = address(p.topk_idx);
    a.topk_weights = address(p.topk_weights);
    a.first_of = address(p.first_of);
    a.out = address(p.out);
    a.out_scales = address(p.out_scales);
    a.out_idx = address(p.out_idx);
    a.out_weights = address(p.out_weights);
    a.out_token = address(p.out_token);
    a.out_rank = address(p.out_rank);
    a.tokens = round.tokens_of[rank.view.me];
    a.roles = address(rank.dispatch_roles);
    a.role_count = round.dispatch_roles;
    a.matrix = address(p.matrix);
    a.tokens_of = address(p.tokens_of);
    a.fanout = address(p.fanout);
    a.team = rank.view.w.nodes > 1 ? 1 + (rank.view.me + 1) % 4 : 1;
    a.short_runs = rank.view.me / 2 % 2;
    a.room = 512 * EP_CARRY_STAGES * (1 + rank.view.me % 3);
    return a;
}

/* The weights that came with the rows go back with them. */
EpCombineRingArgs combine_args(const Rank& rank, const Round& round, const Part& p) {
    EpCombineRingArgs a{};
    a.combine.y = address(p.y);
    a.combine.y_stride = rank.view.w.result_stride;
    a.combine.position = address(p.position);
    a.combine.first_at = address(p.first_at);
    a.combine.matrix = address(p.matrix);
    for (ep_u32 i = 0; i < 2; ++i) a.combine.bias[i] = p.bias[i].empty() ? 0 : address(p.bias[i]);
    a.combine.bias_stride = rank.view.w.result_stride;
    a.combine.out = address(p.combined);
    a.combine.out_stride = rank.view.w.result_stride;
    a.combine.weights = address(p.weights);
    a.combine.own_weights = address(p.out_weights);
    a.combine.base = EP_NO_BASE;
    a.combine.first_of = address(p.first_of);
    a.combine.tokens = round.tokens_of[rank.view.me];
    a.rings = round.combine_rings;
    a.source_token = address(p.out_token);
    a.tokens_of = address(p.tokens_of);
    a.roles = address(rank.combine_roles);
    a.role_count = round.combine_roles;
    a.fanout = address(p.fanout);
    a.depth = rank.view.me % 2 ? 2 : 8;
    a.team = rank.view.w.nodes > 1 ? 1 + (rank.view.me + 2) % 6 : 1;
    a.short_runs = rank.view.me % 2;
    return a;
}

/* A rank's rounds, one launch after the other, whatever the others are at. */
void play(Rank& rank, std::vector<Round>& rounds, ep_u64 seed) {
    const EpWindow& w = rank.view.w;
    /* Teams of a block, as many as have room. */
    const auto teams = [](ep_u32 warps) { return warps == 1 ? EP_RING_WARPS : EP_TEAMS_WARPS / warps; };
    const auto blocks = [](ep_u32 roles, ep_u32 teams) { return (roles + teams - 1) / teams; };
    const auto launch = [&](unsigned blocks, unsigned warps, std::size_t pool, const auto& kernel) {
        toy::launch({blocks, warps, pool}, ++seed, toy::all_windows, kernel);
    };
    EpRank r = rank.view;
    for (Round& round : rounds) {
        const Part& part = round.parts[r.me];
        const EpDispatchRingArgs dispatch = dispatch_args(rank, round, part);
        const EpCombineRingArgs combine = combine_args(rank, round, part);
        r.settings = round.settings;
        EpPlan plan{};
        const EpCountsArgs counts = counts_args(rank, round, part);
        r.kind = EP_KIND_DISPATCH;
        r.plan = (ep_u64)&plan;
        launch(1, EP_COUNTS_THREADS / toy::kLanes, 0, [&] { ep_counts_kernel(r, counts); });
        const ep_u32 send = teams(dispatch.team);
        const std::size_t of_teams = (send * (w.ranks_per_node * EP_EXIT_BYTES + EP_BATON_BYTES) + 127) / 128 * 128;
        launch(blocks(dispatch.role_count, send), send * dispatch.team, of_teams + send * dispatch.team * dispatch.room,
               [&] { ep_dispatch_ring_kernel(r, dispatch); });
        r.kind = EP_KIND_COMBINE;
        launch(1, 1, 0, [&] { ep_offer_none_kernel(r, combine); });
        const ep_u32 sum = teams(combine.team);
        const std::size_t pool = w.ranks * EP_SOURCE_BYTES + sum * ep_desk_bytes(r, combine.depth, EP_COLUMNS * 512, combine.team);
        launch(blocks(combine.role_count, sum), sum * combine.team, pool, [&] { ep_combine_ring_kernel(r, combine); });
    }
}

int run() {
    const Job job = take_one<Job>();
    const EpWindow w = take_one<EpWindow>();
    std::vector<Rank> ranks(w.ranks);
    for (ep_u32 me = 0; me < w.ranks; ++me) {
        prepare(ranks[me], me, w, job);
        ranks[me].dispatch_roles = take<EpRole>();
        ranks[me].combine_roles = take<EpRole>();
    }
    std::vector<Round> rounds;
    for (ep_u64 i = 0; i < job.rounds; ++i) rounds.push_back(take_round(w));

#ifdef TOY_LIBRARY
    std::vector<ep_u64*> far;
    for (Rank& rank : ranks) far.push_back(rank.far.data());
    make_lanes(makes_lanes, toy::all_windows.data(), far.data());
#elif defined(EP_FAR_H)
    network.start(job.seed);
#endif
    std::vector<std::thread> threads;
    for (Rank& rank : ranks)
        if (rank.view.me != job.absent)
            threads.emplace_back([&] { play(rank, rounds, (job.seed * w.ranks + rank.view.me) << 16); });
    for (auto& thread : threads) thread.join();

    std::vector<EpReport> reports;
    for (const Rank& rank : ranks) reports.push_back(rank.report);
    give(reports);
    for (const Round& round : rounds)
        for (const Part& p : round.parts) {
            give(p.out);
            give(p.out_scales);
            give(p.out_idx);
            give(p.out_weights);
            give(p.out_token);
            give(p.out_rank);
            give(p.arrived);
            give(p.combined);
            give(p.weights);
        }
#ifdef TOY_LIBRARY
    make_lanes(makes_lanes, nullptr, nullptr);
#elif defined(EP_FAR_H)
    network.stop();
#endif
    return 0;
}

} /* namespace */

#ifdef TOY_LIBRARY
/* The program inside another one, which makes the lanes between nodes. */
extern "C" __attribute__((visibility("default"))) int toy_run(const char* job, const char* results, MakeLanes make, void* of) {
    job_in = std::fopen(job, "rb");
    results_out = std::fopen(results, "wb");
    if (!job_in || !results_out) return 1;
    make_lanes = make;
    makes_lanes = of;
    const int status = run();
    toy::all_windows.clear();
    std::fclose(job_in);
    std::fclose(results_out);
    return status;
}
#else
int main() { return run(); }
#endif
