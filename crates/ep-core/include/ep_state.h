/*
 * ep_state.h: one rank as its kernels see it, what they keep between launches, and what they report.
 *
 * Written by ep_core::device::headers(); do not edit. A test fails when this file is stale and says how to renew it.
 *
 * Addresses are the device's, as numbers: a kernel makes pointers of them in its own way.
 */
#ifndef EP_STATE_H
#define EP_STATE_H
#include "ep_layout.h"

/* What went wrong: EpReport.status. 0 for nothing. */
#define EP_STATUS_TIMEOUT 1u /* A wait lasted until the deadline. */
#define EP_STATUS_MISMATCH 2u /* A peer does something else. */
#define EP_STATUS_ABORTED 3u /* A peer has given up. */
#define EP_STATUS_BAD_ROUTING 4u /* A token's choices are wrong. */
#define EP_STATUS_MASKED 5u /* Low latency goes on without this rank. */
#define EP_STATUS_GONE 6u /* A peer is known to do nothing any more. */
#define EP_STATUS_LANE 7u /* A lane to another node does not go on; EpReport.field says how: EP_FAR_... */

/* Fields of messages and counters in which two ranks may differ, as errors name them; in kernels EpReport.field. */
#define EP_FIELD_OP 0u /* number of the operation */
#define EP_FIELD_KIND 1u /* kind of the operation */
#define EP_FIELD_SETTINGS 2u /* hash of shape, settings, options and replayed dispatch */
#define EP_FIELD_ROWS_SENT 3u /* rows sent */
#define EP_FIELD_ROW_OP 4u /* operation of a row */
#define EP_FIELD_ROW_SOURCE 5u /* source of a row */
#define EP_FIELD_ROW_POSITION 6u /* position of a row */
#define EP_FIELD_ROWS_TOO_MANY 7u /* rows to one rank, as a power of two */
#define EP_FIELD_BLOCK 8u /* end of a block in the window */
#define EP_FIELD_HEAD 9u /* head of the ring */
#define EP_FIELD_TAIL 10u /* tail of the ring */
#define EP_FIELD_ROW_TOKEN 11u /* token of a row */
#define EP_FIELD_WORST_ROWS 12u /* worst-case rows */
#define EP_FIELD_GENERATION 13u /* generation of a replayed graph */
#define EP_FIELD_CHOICES 14u /* choices of an expert */
#define EP_FIELD_LOCAL_EXPERT 15u /* local experts of the choices received */
#define EP_FIELD_SLOTS 16u /* rows by expert */
#define EP_FIELD_TOKENS 17u /* most tokens of a batch (max_tokens, as counts stay on the device) */

/* Which field differed in low latency: EpReport.field of a mismatch. */
#define EP_LOW_FIELD_OP 0u /* number of the low-latency operation */
#define EP_LOW_FIELD_KIND 1u /* kind of the low-latency operation */
#define EP_LOW_FIELD_ARRIVAL 2u /* value of an arrival */
#define EP_LOW_FIELD_ROW_OP 3u /* operation of a low-latency row */
#define EP_LOW_FIELD_ROW_SOURCE 4u /* source of a low-latency row */
#define EP_LOW_FIELD_ROW_TOKEN 5u /* token of a low-latency row */
#define EP_LOW_FIELD_LEAST_TOKEN 6u /* least token of the next row */
#define EP_LOW_FIELD_TOKENS 7u /* tokens of a source */
#define EP_LOW_FIELD_ROWS 8u /* rows of a source */
#define EP_LOW_FIELD_RESULTS 9u /* results of a rank */
#define EP_LOW_FIELD_EXPERT_ROWS 10u /* rows of an expert */
#define EP_LOW_FIELD_GENERATION 11u /* generation of a replayed graph */
#define EP_LOW_FIELD_IN_FLIGHT 12u /* low-latency operations in flight */
#define EP_LOW_FIELD_LAST_OP 13u /* last low-latency operation of a generation */
#define EP_LOW_FIELD_ROW_GENERATION 14u /* generation of a low-latency row */
#define EP_LOW_FIELD_READY_EPOCH 15u /* batch that the readiness of results is of */
#define EP_LOW_FIELD_SLOTS 16u /* rows by expert */
#define EP_LOW_FIELD_ROWS_IN_ALL 17u /* rows of all sources */

/* Meetings of a launch's blocks: indices of EpLocal.arrived. */
#define EP_MEETING_MOVED 0u /* Rows have been moved. */
#define EP_MEETING_READ 1u /* Rows have been read. */
#define EP_MEETING_PLACED 2u /* Rows have been placed, before those that go through rings. */

/* The first failure of a rank, in host memory that the device writes. The status is written last. */
struct EpReport {
    ep_u32 status; /* EP_STATUS_...; 0 for none. */
    ep_u32 phase; /* What was waited for: EP_PHASE_... */
    ep_u32 peer; /* From whom, or who has given up. */
    ep_u32 lane; /* Index of the lane. */
    ep_u64 op; /* The operation. */
    ep_u64 seen; /* The value seen; of wrong choices the token. */
    ep_u64 awaited; /* The value awaited. */
    ep_u64 waited; /* Nanoseconds waited. */
    ep_u32 field; /* Which field differed: EP_FIELD_..., in low latency EP_LOW_FIELD_... */
    ep_u32 culprit; /* Whom this rank blames. */
    ep_u32 behind; /* Of low latency: 1 once a launch behind the one that failed has found it so, and done nothing. */
    ep_u32 reserved; /* Nothing. */
};
static_assert(sizeof(EpReport) == 64, "EpReport");
static_assert(__builtin_offsetof(EpReport, status) == 0, "EpReport.status");
static_assert(__builtin_offsetof(EpReport, phase) == 4, "EpReport.phase");
static_assert(__builtin_offsetof(EpReport, peer) == 8, "EpReport.peer");
static_assert(__builtin_offsetof(EpReport, lane) == 12, "EpReport.lane");
static_assert(__builtin_offsetof(EpReport, op) == 16, "EpReport.op");
static_assert(__builtin_offsetof(EpReport, seen) == 24, "EpReport.seen");
static_assert(__builtin_offsetof(EpReport, awaited) == 32, "EpReport.awaited");
static_assert(__builtin_offsetof(EpReport, waited) == 40, "EpReport.waited");
static_assert(__builtin_offsetof(EpReport, field) == 48, "EpReport.field");
static_assert(__builtin_offsetof(EpReport, culprit) == 52, "EpReport.culprit");
static_assert(__builtin_offsetof(EpReport, behind) == 56, "EpReport.behind");
static_assert(__builtin_offsetof(EpReport, reserved) == 60, "EpReport.reserved");

/* What the kernels of throughput mode keep between launches, in the rank's own device memory; zero at first. Behind it lie u32 gone[ranks]: not 0 for ranks of which the host knows that they do nothing any more. */
struct EpLocal {
    ep_u64 ops_done; /* Operations completed: the running one is ops_done + 1. */
    ep_u32 failed; /* Not 0: this rank has failed, and every kernel ends at once. */
    ep_u32 serial; /* Alarms published. */
    ep_u32 arrived[4]; /* Blocks that have come to a meeting (EP_MEETING_...); 0 again when all have. */
    ep_u32 bad_token; /* 1 + the first token whose choices are wrong; 0 for none. */
    ep_u32 rings; /* Not 0 when a kernel that places or pulls left rows to the ring kernel behind it. */
    ep_u32 generation; /* Generation of the communicator: graphs of an earlier one must not run. */
    ep_u32 speaking; /* Not 0 while a thread publishes an alarm: cells must not fall. */
    ep_u64 foremost; /* Of the waits that last long the one nearest to the cause (ep_wait_key); 0 for none. */
    ep_u64 told; /* The last wait that the other ranks were told of. */
    ep_u64 told_at; /* When, in nanoseconds of the device's clock. */
    ep_u32 ahead; /* Not 0: the counts of the operation have come, and what was enqueued behind them before the host knew them has room for its rows. */
    ep_u32 reserved; /* Zero. */
};
static_assert(sizeof(EpLocal) == 80, "EpLocal");
static_assert(__builtin_offsetof(EpLocal, ops_done) == 0, "EpLocal.ops_done");
static_assert(__builtin_offsetof(EpLocal, failed) == 8, "EpLocal.failed");
static_assert(__builtin_offsetof(EpLocal, serial) == 12, "EpLocal.serial");
static_assert(__builtin_offsetof(EpLocal, arrived) == 16, "EpLocal.arrived");
static_assert(__builtin_offsetof(EpLocal, bad_token) == 32, "EpLocal.bad_token");
static_assert(__builtin_offsetof(EpLocal, rings) == 36, "EpLocal.rings");
static_assert(__builtin_offsetof(EpLocal, generation) == 40, "EpLocal.generation");
static_assert(__builtin_offsetof(EpLocal, speaking) == 44, "EpLocal.speaking");
static_assert(__builtin_offsetof(EpLocal, foremost) == 48, "EpLocal.foremost");
static_assert(__builtin_offsetof(EpLocal, told) == 56, "EpLocal.told");
static_assert(__builtin_offsetof(EpLocal, told_at) == 64, "EpLocal.told_at");
static_assert(__builtin_offsetof(EpLocal, ahead) == 72, "EpLocal.ahead");
static_assert(__builtin_offsetof(EpLocal, reserved) == 76, "EpLocal.reserved");

/* What the kernels of low latency keep between launches, in the rank's own device memory; zero at first, and in each generation. Behind it lie u32 skipped[ranks], not 0 where a block of this launch has not put its rows for a rank; for each bank u32 late[ranks], not 0 where a rank is still to be sent rows; u32 gone[ranks] as behind EpLocal; and u32 taken[blocks], not 0 where a block of this launch has taken that share of what is sent. */
struct EpLow {
    ep_u64 sent; /* Operations that were sent. */
    ep_u64 received; /* Operations that were received. */
    ep_u32 failed; /* Not 0: this launch has failed. */
    ep_u32 broken; /* Not 0: an earlier launch has failed, and the host has not heard of it yet. */
    ep_u32 arrived; /* Blocks that have come to the end of the launch, and EP_LOW_TROUBLE. */
    ep_u32 serial; /* Values of Waiting that were published. */
    ep_u32 voice; /* 1 + the rank that this one has said it waits for; 0 for none. */
    ep_u32 said; /* Not 0: something was said and not taken back. */
    ep_u32 late[2]; /* For each bank: whether there are ranks that were not sent all, because their banks were not free in time. */
    ep_u32 generation; /* Generation of the communicator: graphs of an earlier one must not run. */
    ep_u32 speaking; /* Not 0 while a thread says whom this rank waits for, where there are several nodes: their lanes have one poster. */
    ep_u32 poster; /* What this launch has found out of whoever posts for this rank between nodes: EP_FAR_STALLED, EP_FAR_GONE, or 0. */
    ep_u32 reserved; /* Zero. */
    ep_u64 serials; /* Operations of earlier generations, at least: tags of units run on from there. */
    ep_u64 last; /* The last of them that this rank sent, as tags count. */
};
static_assert(sizeof(EpLow) == 80, "EpLow");
static_assert(__builtin_offsetof(EpLow, sent) == 0, "EpLow.sent");
static_assert(__builtin_offsetof(EpLow, received) == 8, "EpLow.received");
static_assert(__builtin_offsetof(EpLow, failed) == 16, "EpLow.failed");
static_assert(__builtin_offsetof(EpLow, broken) == 20, "EpLow.broken");
static_assert(__builtin_offsetof(EpLow, arrived) == 24, "EpLow.arrived");
static_assert(__builtin_offsetof(EpLow, serial) == 28, "EpLow.serial");
static_assert(__builtin_offsetof(EpLow, voice) == 32, "EpLow.voice");
static_assert(__builtin_offsetof(EpLow, said) == 36, "EpLow.said");
static_assert(__builtin_offsetof(EpLow, late) == 40, "EpLow.late");
static_assert(__builtin_offsetof(EpLow, generation) == 48, "EpLow.generation");
static_assert(__builtin_offsetof(EpLow, speaking) == 52, "EpLow.speaking");
static_assert(__builtin_offsetof(EpLow, poster) == 56, "EpLow.poster");
static_assert(__builtin_offsetof(EpLow, reserved) == 60, "EpLow.reserved");
static_assert(__builtin_offsetof(EpLow, serials) == 64, "EpLow.serials");
static_assert(__builtin_offsetof(EpLow, last) == 72, "EpLow.last");

/* What the kernels of low latency know of a rank of another node, in the rank's own device memory; zero at first, and in each generation. */
struct EpLowFar {
    ep_u64 posted; /* The last operation of which everything was posted to it. */
    ep_u64 ticket; /* Of the last put from what is staged for it. */
    ep_u32 counted; /* Rows of this launch that are staged for it, and EP_LOW_TOLD less their number once that is known. */
    ep_u32 rows; /* Rows of a dispatch to it. */
    ep_u32 posting; /* Not 0 while a thread posts to the lane of its rows. */
    ep_u32 busy; /* Not 0: puts may still read what is staged for it. */
    ep_u32 status; /* What became of the posts of this launch: EP_FAR_... */
    ep_u32 reserved; /* Zero. */
};
static_assert(sizeof(EpLowFar) == 40, "EpLowFar");
static_assert(__builtin_offsetof(EpLowFar, posted) == 0, "EpLowFar.posted");
static_assert(__builtin_offsetof(EpLowFar, ticket) == 8, "EpLowFar.ticket");
static_assert(__builtin_offsetof(EpLowFar, counted) == 16, "EpLowFar.counted");
static_assert(__builtin_offsetof(EpLowFar, rows) == 20, "EpLowFar.rows");
static_assert(__builtin_offsetof(EpLowFar, posting) == 24, "EpLowFar.posting");
static_assert(__builtin_offsetof(EpLowFar, busy) == 28, "EpLowFar.busy");
static_assert(__builtin_offsetof(EpLowFar, status) == 32, "EpLowFar.status");
static_assert(__builtin_offsetof(EpLowFar, reserved) == 36, "EpLowFar.reserved");

/* By what consumers learn of the rows of a low-latency dispatch as they come, and combine of results as they are ready: in device memory, zero at first. Behind it lie three arrays of u64 counters, [local experts, blocks] each: arrived, expected, ready. A counter holds the number of a batch in its high half and a count in its low half. So it never falls, and nothing is cleared: a batch that is sent moves arrived and ready to its number. Rows of a block are there once its expected is of the batch and its arrived has reached that. */
struct EpEarly {
    ep_u64 epoch; /* The number of the last batch that was sent, in the high half. */
    ep_u64 stopped; /* The same of a batch whose rows do not come, as its launch has failed; 0 for none. */
};
static_assert(sizeof(EpEarly) == 16, "EpEarly");
static_assert(__builtin_offsetof(EpEarly, epoch) == 0, "EpEarly.epoch");
static_assert(__builtin_offsetof(EpEarly, stopped) == 8, "EpEarly.stopped");

/* The beginning of a handle's numbers; u32 matrix[ranks, ranks] follows: rows from source to destination. */
struct EpPlan {
    ep_u64 op; /* The dispatch that made it. */
};
static_assert(sizeof(EpPlan) == 8, "EpPlan");
static_assert(__builtin_offsetof(EpPlan, op) == 0, "EpPlan.op");

/* A role of a launch. */
struct EpRole {
    ep_u32 duty; /* EP_DUTY_... */
    ep_u32 peer; /* The rank that it serves. */
    ep_u32 track; /* The track that it serves. */
    ep_u32 channel; /* The channel that the track carries. */
};
static_assert(sizeof(EpRole) == 16, "EpRole");
static_assert(__builtin_offsetof(EpRole, duty) == 0, "EpRole.duty");
static_assert(__builtin_offsetof(EpRole, peer) == 4, "EpRole.peer");
static_assert(__builtin_offsetof(EpRole, track) == 8, "EpRole.track");
static_assert(__builtin_offsetof(EpRole, channel) == 12, "EpRole.channel");

/* What a warp does of a duty that several warps of a block share. */
#define EP_TASK_NONE 0u /* Nothing. */
#define EP_TASK_ROWS 1u /* Moves rows, or sums them. */
#define EP_TASK_HEADERS 2u /* Writes headers of rows. */
#define EP_TASK_TAIL 3u /* Tells peers which rows are there. */
#define EP_TASK_CREDIT 4u /* Tells peers which rows have been taken. */

/* A role that every block of a launch has. */
struct EpBlockRole {
    ep_u32 duty; /* EP_DUTY_... */
    ep_u32 task; /* EP_TASK_... */
    ep_u32 index; /* Its number among the roles of the block with this duty and task. */
    ep_u32 count; /* How many there are. */
};
static_assert(sizeof(EpBlockRole) == 16, "EpBlockRole");
static_assert(__builtin_offsetof(EpBlockRole, duty) == 0, "EpBlockRole.duty");
static_assert(__builtin_offsetof(EpBlockRole, task) == 4, "EpBlockRole.task");
static_assert(__builtin_offsetof(EpBlockRole, index) == 8, "EpBlockRole.index");
static_assert(__builtin_offsetof(EpBlockRole, count) == 12, "EpBlockRole.count");

/* Who does what is done once in a launch of low latency. What it sends is cut into as many shares as there are blocks, which other blocks may take over; what it receives, blocks divide among themselves. */
struct EpLowRoles {
    ep_u32 tells; /* The share with which go the counts, which are said ahead of all rows. */
    ep_u32 tellers; /* Shares with which go the rows' headers, of neighbouring tokens each: this and those before it, so many. */
    ep_u32 told; /* Tokens whose headers go with each of these, at most. */
    ep_u32 moves; /* So many blocks move what is received, from the first on. */
    ep_u32 counts; /* The block that tells the user how many rows have come. */
    ep_u32 addresses; /* The warp of a block that finds where a row goes, and says so there. */
};
static_assert(sizeof(EpLowRoles) == 24, "EpLowRoles");
static_assert(__builtin_offsetof(EpLowRoles, tells) == 0, "EpLowRoles.tells");
static_assert(__builtin_offsetof(EpLowRoles, tellers) == 4, "EpLowRoles.tellers");
static_assert(__builtin_offsetof(EpLowRoles, told) == 8, "EpLowRoles.told");
static_assert(__builtin_offsetof(EpLowRoles, moves) == 12, "EpLowRoles.moves");
static_assert(__builtin_offsetof(EpLowRoles, counts) == 16, "EpLowRoles.counts");
static_assert(__builtin_offsetof(EpLowRoles, addresses) == 20, "EpLowRoles.addresses");

/* One rank as its kernels see it. Addresses are the device's. */
struct EpRank {
    EpWindow w; /* How the window is cut. */
    ep_u64 windows; /* Address of an array [ranks]: where the windows lie, the own included; 0 for masked ranks, 1 for those of other nodes. */
    ep_u64 local; /* Address of the EpLocal, in launches of low latency of the EpLow. */
    ep_u64 report; /* Address of the EpReport. */
    ep_u64 cursors; /* Address of an array [2, ranks, tracks]: slots sent to, and taken from, each ring, ever. In launches of low latency over several nodes of an EpLowFar [ranks]. */
    ep_u64 first_op; /* The first operation of this generation. */
    ep_u64 settings; /* Hash of shape and settings of the call (ep_settings). */
    ep_u64 allowed; /* Nanoseconds that the waits of a kernel may take. */
    ep_u64 plan; /* Address of the EpPlan of the operation; 0 where it has none. */
    ep_u64 tally; /* Address of what is counted (ep_count_op); 0 where nothing is. */
    ep_u32 me; /* This rank. */
    ep_u32 generation; /* Generation of the communicator. */
    ep_u32 kind; /* Kind of the operation, EP_KIND_... */
    ep_u32 replays; /* Not 0 where the operation goes along the plan of an earlier one. */
    ep_u64 test; /* Address of the EpTest in builds for tests; 0 in others. */
    ep_u64 far; /* Address of an array [ranks, lanes]: the EpFar.state of each lane to a rank of another node; 0 for other lanes. */
};
static_assert(sizeof(EpRank) == 528, "EpRank");
static_assert(__builtin_offsetof(EpRank, w) == 0, "EpRank.w");
static_assert(__builtin_offsetof(EpRank, windows) == 424, "EpRank.windows");
static_assert(__builtin_offsetof(EpRank, local) == 432, "EpRank.local");
static_assert(__builtin_offsetof(EpRank, report) == 440, "EpRank.report");
static_assert(__builtin_offsetof(EpRank, cursors) == 448, "EpRank.cursors");
static_assert(__builtin_offsetof(EpRank, first_op) == 456, "EpRank.first_op");
static_assert(__builtin_offsetof(EpRank, settings) == 464, "EpRank.settings");
static_assert(__builtin_offsetof(EpRank, allowed) == 472, "EpRank.allowed");
static_assert(__builtin_offsetof(EpRank, plan) == 480, "EpRank.plan");
static_assert(__builtin_offsetof(EpRank, tally) == 488, "EpRank.tally");
static_assert(__builtin_offsetof(EpRank, me) == 496, "EpRank.me");
static_assert(__builtin_offsetof(EpRank, generation) == 500, "EpRank.generation");
static_assert(__builtin_offsetof(EpRank, kind) == 504, "EpRank.kind");
static_assert(__builtin_offsetof(EpRank, replays) == 508, "EpRank.replays");
static_assert(__builtin_offsetof(EpRank, test) == 512, "EpRank.test");
static_assert(__builtin_offsetof(EpRank, far) == 520, "EpRank.far");

/* --- What lies behind the structs: addresses of words of 32 bits. --- */

/* Whether the host knows that a rank does nothing any more: behind EpLocal. */
EP_HD static inline ep_u64 ep_gone_at(ep_u64 local, ep_u32 rank) { return local + sizeof(EpLocal) + 4ull * rank; }

/* Whether a block of this launch has not put its rows for a rank: behind EpLow. */
EP_HD static inline ep_u64 ep_low_skipped_at(ep_u64 low, ep_u32 rank) { return low + sizeof(EpLow) + 4ull * rank; }

/* Whether a rank is still to be sent rows of the bank of op: behind EpLow. */
EP_HD static inline ep_u64 ep_low_late_at(ep_u64 low, ep_u32 ranks, ep_u64 op, ep_u32 rank) {
    return low + sizeof(EpLow) + 4 * ((1 + op % 2) * ranks + rank);
}

/* Whether the host knows that a rank does nothing any more: behind EpLow. */
EP_HD static inline ep_u64 ep_low_gone_at(ep_u64 low, ep_u32 ranks, ep_u32 rank) {
    return low + sizeof(EpLow) + 4 * (3ull * ranks + rank);
}

/* Whether a block of this launch has taken a share of what is sent: behind EpLow. */
EP_HD static inline ep_u64 ep_low_taken_at(ep_u64 low, ep_u32 ranks, ep_u32 share) {
    return low + sizeof(EpLow) + 4 * (4ull * ranks + share);
}

/* --- Counters of early consumers, behind EpEarly: words of 64 bits, so many in each of three arrays. --- */

/* One batch more. */
#define EP_EPOCH 0x100000000ull
EP_HD static inline ep_u64 ep_early_arrived_at(ep_u64 early, ep_u32 at) { return early + sizeof(EpEarly) + 8ull * at; }
EP_HD static inline ep_u64 ep_early_expected_at(ep_u64 early, ep_u32 counters, ep_u32 at) { return ep_early_arrived_at(early, counters + at); }
EP_HD static inline ep_u64 ep_early_ready_at(ep_u64 early, ep_u32 counters, ep_u32 at) { return ep_early_arrived_at(early, 2 * counters + at); }

#endif
