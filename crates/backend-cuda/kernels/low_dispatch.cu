/*
 * ep_low_dispatch_kernel: low-latency dispatch. Each token goes once to every rank that holds one of its experts, into a fixed
 * slot there; the receiver spreads it to its experts.
 *
 *   launch   any number of blocks of 512 threads, co-resident with those of the other ranks (cooperative); phases says which halves
 *   memory   slots and cells of the windows (ep_layout.h); shared: one row as it travels; counts; the rows of a batch
 *   send     every block looks at all choices: a row's position is the number of tokens before it that go to the same rank. Block b
 *            makes the rows of tokens b, b + blocks, ...: quantised once, stored to each of its ranks with 16 bytes a thread
 *   receive  every block waits for all arrivals and counts, over the rows before its share, those of each local expert: this gives
 *            its rows' places, packed by expert in order of source and token. The last block counts all rows for the user instead
 *   rules    ep_low.h. Slots are read after the acquire of the arrival and a barrier, by loads that are coherent
 */
#include "ep_low.h"
#include "ep_quant.h"
#include "ep_sum.h"

struct EpLowDispatchArgs {
    ep_u64 x;             /* bf16 [tokens, hidden], rows x_stride bytes apart */
    ep_u64 x_stride;
    ep_u64 topk_idx;      /* i64 [tokens, topk]: experts over all ranks, or -1 */
    ep_u64 topk_weights;  /* f32 [tokens, topk], or 0: weights of 1 */
    ep_u64 routed;        /* out, of the sender: u32 [2, ranks]: rows to each rank, choices of its experts; 0 for masked ranks */
    ep_u64 out;           /* out: [local experts, ranks * max_tokens] rows as they travelled, out_stride bytes apart */
    ep_u64 out_stride;
    ep_u64 expert_counts; /* out: i32 [local experts] */
    ep_u64 segments;      /* out: i64 [local experts, ranks]: first << 32 | rows */
    ep_u64 source_token;  /* out: i32 [local experts, ranks * max_tokens] */
    ep_u64 records;       /* out: what the combine needs, see ep_low_record */
    ep_u64 counters;      /* u64 [4 * ranks + local experts], added to: rows of dispatches sent, received; of combines; of experts */
    ep_u32 tokens;
    ep_u32 phases;
};
EP_CHECK_ARGS(EpLowDispatchArgs);

extern __shared__ __align__(128) ep_u8 ep_pool[];

/* Shared memory: the windows' addresses, u64 [ranks], then that of either half. */
EP_DEV ep_u8* ep_low_pool(const EpRank& r) { return ep_pool + r.w.ranks * 8; }

/* Shared memory of the sending half. */
struct EpLowSender {
    ep_u64* place; /* [ranks]: where the row at hand goes; 0 for nowhere */
    ep_u32* state; /* [ranks] */
    ep_u32* rows;  /* [ranks]: rows to each */
    ep_u32* first; /* [ranks]: rows to each of the tokens before this block's first */
    ep_u32* next;  /* [ranks]: the same, of the tokens before the one at hand */
    ep_u32* picks; /* [ranks]: choices of each rank's experts */
    ep_u8* row;    /* as it travels */
};
EP_DEV EpLowSender ep_low_sender(const EpRank& r) {
    const ep_u32 ranks = r.w.ranks;
    EpLowSender s;
    s.place = (ep_u64*)ep_low_pool(r);
    s.state = (ep_u32*)(s.place + ranks);
    s.rows = s.state + ranks;
    s.first = s.rows + ranks;
    s.next = s.first + ranks;
    s.picks = s.next + ranks;
    s.row = ep_pool + (ranks * 36 + 127) / 128 * 128;
    return s;
}

/* The ranks first .. first + 32 that a token goes to, as bits. */
EP_DEV ep_u32 ep_low_members(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token, ep_u32 first, bool check, bool& bad,
                             ep_u32* picks) {
    const ep_u32 topk = r.w.topk;
    const ep_i64* choices = (const ep_i64*)a.topk_idx + (ep_u64)token * topk;
    ep_u32 members = 0;
    for (ep_u32 base = 0; base < topk; base += 8) {
        /* Eight at a time, loaded together; -2 is what no choice may be. */
        ep_i32 experts[8];
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) {
            const ep_i64 expert = base + i < topk ? choices[base + i] : -1;
            experts[i] = expert < -1 || expert >= (ep_i64)r.w.experts ? -2 : (ep_i32)expert;
        }
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) {
            const ep_i32 expert = experts[i];
            if (expert < 0) { bad |= expert == -2; continue; }
            if (check) {
#pragma unroll
                for (ep_u32 other = 0; other < i; ++other) bad |= experts[other] == expert;
                for (ep_u32 other = 0; other < base; ++other) bad |= choices[other] == expert;
            }
            const ep_u32 rank = ep_rank_of_expert(r.w, (ep_u32)expert);
            if (rank - first >= 32 || !ep_takes_part(r, rank)) continue;
            members |= 1u << (rank - first);
            if (picks) atomicAdd(picks + rank, 1u);
        }
    }
    return members;
}

/* Counts the rows of the tokens begin .. end to each rank: into `all`, and those of tokens before `split` into `below`. By all
   threads of a block; true where a token's choices are wrong, which are looked at where `check`. */
EP_DEV bool ep_low_count(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 begin, ep_u32 end, ep_u32 split, bool check,
                         ep_u32* below, ep_u32* all, ep_u32* picks, ep_u32* wrong) {
    const ep_u32 tid = threadIdx.x, lane = tid % 32, ranks = r.w.ranks;
    bool any = false;
    for (ep_u32 first = 0; first < ranks; first += 32) {
        const ep_u32 width = ranks - first < 32 ? ranks - first : 32;
        for (ep_u32 base = begin + tid - lane; base < end; base += EP_LOW_THREADS) {
            const ep_u32 token = base + lane;
            bool bad = false;
            const ep_u32 members = token < end ? ep_low_members(r, a, token, first, check, bad, picks) : 0;
            const ep_u32 before = __ballot_sync(EP_FULL, token < split);
            if (bad && wrong) atomicMin(wrong, token);
            any |= bad;
            ep_u32 in_all = 0, in_below = 0;
            for (ep_u32 k = 0; k < width; ++k) {
                const ep_u32 votes = __ballot_sync(EP_FULL, members >> k & 1);
                if (lane == k) {
                    in_all = __popc(votes);
                    in_below = __popc(votes & before);
                }
            }
            if (all && in_all) atomicAdd(all + first + lane, in_all);
            if (in_below) atomicAdd(below + first + lane, in_below);
        }
    }
    return any;
}

/* The first two units of 16 bytes that a thread has of a token's row. */
struct EpLowAhead {
    int4 v[2];
};
EP_DEV EpLowAhead ep_low_load_ahead(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token) {
    const ep_u32 columns = (r.w.hidden + 7) / 8;
    const ep_u8* x = (const ep_u8*)a.x + (ep_u64)token * a.x_stride;
    EpLowAhead ahead;
#pragma unroll
    for (ep_u32 i = 0; i < 2; ++i) {
        const ep_u32 at = i * EP_LOW_THREADS + threadIdx.x;
        ahead.v[i] = token < a.tokens && at < columns ? ep_ld16(x + (ep_u64)at * 16) : make_int4(0, 0, 0, 0);
    }
    return ahead;
}

/* Makes the payload of a token's row. */
EP_DEV void ep_low_make(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token, const EpLowAhead& ahead, ep_u8* payload) {
    const ep_u32 tid = threadIdx.x, hidden = r.w.hidden, columns = (hidden + 7) / 8;
    /* Padding between codes and scales travels, as zeros. */
    const ep_u32 all = r.w.element == EP_ELEMENT_BF16 ? columns : (ep_u32)(r.w.scales_offset / 8);
    const ep_u8* x = (const ep_u8*)a.x + (ep_u64)token * a.x_stride;
    for (ep_u32 base = 0; base < all; base += EP_LOW_THREADS) {
        const ep_u32 at = base + tid;
        int4 v = base == 0 ? ahead.v[0] : ahead.v[1];
        if (base >= 2 * EP_LOW_THREADS) v = at < columns ? ep_ld16(x + (ep_u64)at * 16) : make_int4(0, 0, 0, 0);
        if (r.w.element == EP_ELEMENT_BF16) {
            if (at < columns) ep_st16(payload + (ep_u64)at * 16, v);
            continue;
        }
        float e[8] = {ep_low(v.x), ep_high(v.x), ep_low(v.y), ep_high(v.y),
                      ep_low(v.z), ep_high(v.z), ep_low(v.w), ep_high(v.w)};
        float largest = 0.0f;
#pragma unroll
        for (ep_u32 i = 0; i < 8; ++i) {
            if (at * 8 + i >= hidden) e[i] = 0.0f;
            largest = fmaxf(largest, fabsf(e[i]));
        }
        /* 16 threads serve a group. */
#pragma unroll
        for (ep_u32 step = 1; step < EP_SCALE_GROUP / 8; step *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(EP_FULL, largest, step));
        const EpScale scale = ep_scale(r.w.element, largest);
        if (at >= all) continue;
        uint2 codes;
        codes.x = ep_encode_two(__fmul_rn(e[0], scale.multiplier), __fmul_rn(e[1], scale.multiplier)) |
                  ep_encode_two(__fmul_rn(e[2], scale.multiplier), __fmul_rn(e[3], scale.multiplier)) << 16;
        codes.y = ep_encode_two(__fmul_rn(e[4], scale.multiplier), __fmul_rn(e[5], scale.multiplier)) |
                  ep_encode_two(__fmul_rn(e[6], scale.multiplier), __fmul_rn(e[7], scale.multiplier)) << 16;
        *(uint2*)(payload + (ep_u64)at * 8) = codes;
        if (at % (EP_SCALE_GROUP / 8) != 0 || at >= columns) continue;
        const ep_u32 group = at / (EP_SCALE_GROUP / 8);
        ep_u8* scales = payload + r.w.scales_offset;
        if (r.w.element == EP_ELEMENT_FP8_UE8M0) scales[group] = (ep_u8)scale.stored;
        else ((ep_u32*)scales)[group] = scale.stored;
    }
}

/* The choice of a token that this thread serves: `expert` is -1 where it serves none. */
EP_DEV EpChoice ep_low_load_choice(const EpRank& r, const EpLowDispatchArgs& a, ep_u32 token) {
    const ep_u32 k = ep_low_served();
    EpChoice choice = {-1, 0.0f};
    if (k < r.w.topk && token < a.tokens) {
        const ep_u64 at = (ep_u64)token * r.w.topk + k;
        choice.expert = (ep_i32)((const ep_i64*)a.topk_idx)[at];
        choice.weight = a.topk_weights ? ((const float*)a.topk_weights)[at] : 1.0f;
    }
    return choice;
}

/* Writes a row's header and choices; `ranks_of` [topk] are the choices' ranks. */
EP_DEV void ep_low_write_header(const EpRank& r, const EpLowSender& s, ep_u64 op, ep_u32 token, EpChoice choice,
                                ep_u32* ranks_of) {
    const ep_u32 k = ep_low_served();
    if (k < r.w.topk) {
        const ep_u32 rank = choice.expert >= 0 ? ep_rank_of_expert(r.w, (ep_u32)choice.expert) : EP_FULL;
        const bool goes = rank != EP_FULL && ep_takes_part(r, rank);
        if (!goes) choice = EpChoice{-1, 0.0f};
        ((EpChoice*)(s.row + sizeof(EpRowHeader)))[k] = choice;
        ranks_of[k] = goes ? rank : EP_FULL;
    }
    if (k == 32) ep_st16(s.row, make_int4((int)r.me, (int)token, 0, (int)(ep_u32)op));
}

/* Says where a row goes. */
EP_DEV void ep_low_address(const EpRank& r, const EpLowSender& s, ep_u64 op, const ep_u32* ranks_of) {
    for (ep_u32 rank = ep_low_served(); rank < r.w.ranks; rank += EP_LOW_THREADS) {
        bool goes = false;
        for (ep_u32 k = 0; k < r.w.topk; ++k) goes |= ranks_of[k] == rank;
        s.place[rank] = goes && s.state[rank] == EP_PEER_NOW
                            ? (ep_u64)ep_window(r, rank) + ep_low_row(r.w, op, r.me, s.next[rank])
                            : 0;
    }
}

/* Puts the rows of this block's tokens, of so many blocks. True where choices are wrong: then nothing is put. */
EP_DEV bool ep_low_send_tokens(const EpRank& r, const EpLowDispatchArgs& a, ep_u64 op, ep_u32 blocks, bool again, ep_u64 began) {
    __shared__ ep_u32 wrong, ranks_of[32];
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, block = blockIdx.x;
    const EpLowSender s = ep_low_sender(r);
    /* Loads that wait for nothing come first. */
    EpLowAhead ahead = ep_low_load_ahead(r, a, block < blocks ? block : a.tokens);
    EpChoice choice = ep_low_load_choice(r, a, block < blocks ? block : a.tokens);
    for (ep_u32 rank = tid; rank < ranks; rank += EP_LOW_THREADS) s.rows[rank] = s.first[rank] = s.picks[rank] = 0;
    if (tid == 0) wrong = EP_FULL;
    __syncthreads();
    ep_low_open(r, op, again, s.state);
    int found = block < blocks ? ep_low_look(r, op, nullptr, s.state, began, false) : 0;
    const bool tells = block == 0 && !again;
    const bool bad = ep_low_count(r, a, 0, a.tokens, block, !again, s.first, s.rows, tells ? s.picks : nullptr, &wrong);
    if (__syncthreads_or(bad)) {
        if (block == 0 && tid == 0) ep_low_fail(r, op, EP_STATUS_BAD_ROUTING, 0, r.me, r.me, 0, wrong, 0, 0, 0);
        return true;
    }
    if (tells)
        for (ep_u32 rank = tid; rank < ranks; rank += EP_LOW_THREADS) {
            ((ep_u32*)a.routed)[rank] = s.rows[rank];
            ((ep_u32*)a.routed)[ranks + rank] = s.picks[rank];
        }
    if (block >= blocks) return false;
    const ep_u32 units = (ep_u32)(r.w.wire_bytes / 16);
    for (bool first = true; ep_low_next(r, op, nullptr, s.state, began, found); first = false, found = EP_FOUND_WAITING) {
        for (ep_u32 rank = tid; rank < ranks; rank += EP_LOW_THREADS) s.next[rank] = s.first[rank];
        for (ep_u32 token = block; token < a.tokens; token += blocks) {
            const bool loaded = first && token == block;
            if (token != block) ep_low_count(r, a, token - blocks, token, token, false, s.next, nullptr, nullptr, nullptr);
            if (!loaded) {
                ahead = ep_low_load_ahead(r, a, token);
                choice = ep_low_load_choice(r, a, token);
            }
            ep_low_write_header(r, s, op, token, choice, ranks_of);
            ep_low_make(r, a, token, ahead, s.row + r.w.header_bytes);
            __syncthreads();
            ep_low_address(r, s, op, ranks_of);
            __syncthreads();
            for (ep_u32 unit = tid; unit < units; unit += EP_LOW_THREADS) {
                const int4 v = ep_ld16(s.row + (ep_u64)unit * 16);
                for (ep_u32 turn = 1; turn <= ranks; ++turn) {
                    const ep_u32 rank = r.me + turn < ranks ? r.me + turn : r.me + turn - ranks;
                    if (s.place[rank]) ep_st16((ep_u8*)s.place[rank] + (ep_u64)unit * 16, v);
                }
            }
            __syncthreads();
        }
        ep_low_finish(r, op, EP_LOW_DISPATCH, s.rows, true, blocks, s.state);
    }
    return false;
}

/* Shared memory of the receiving half. */
struct EpLowReceiver {
    ep_u64* from;  /* [EP_LOW_WARPS]: where the rows of a batch lie */
    ep_u32* rows;  /* [ranks]: rows of each source */
    ep_u32* first; /* [ranks + 1]: and before it */
    ep_u32* count; /* [local experts]: rows before the batch; of the block that counts all: [ranks, local experts] */
    ep_u32* bits;  /* [local experts]: rows of the batch that go there */
    ep_u32* of;    /* [EP_LOW_WARPS]: experts of each row of the batch */
    ep_u32* to;    /* [EP_LOW_WARPS, 32]: and their rows */
};
EP_DEV EpLowReceiver ep_low_receiver(const EpRank& r) {
    EpLowReceiver s;
    s.from = (ep_u64*)ep_low_pool(r);
    s.of = (ep_u32*)(s.from + EP_LOW_WARPS);
    s.to = s.of + EP_LOW_WARPS;
    s.rows = s.to + EP_LOW_WARPS * 32;
    s.first = s.rows + r.w.ranks;
    s.count = s.first + r.w.ranks + 1;
    s.bits = s.count + r.w.local_experts;
    return s;
}

/* Calls `each` with the indices of the local experts of a row in a slot. */
template <class F> EP_DEV void ep_low_each_expert(const EpRank& r, const ep_u8* slot, F each) {
    const ep_u32 low = r.me * r.w.local_experts, experts = r.w.local_experts, topk = r.w.topk;
    for (ep_u32 base = 0; base < topk; base += 8) {
        int4 two[4];
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i)
            two[i] = base + 2 * i < topk ? ep_ld16_peer(slot + sizeof(EpRowHeader) + (base + 2 * i) * sizeof(EpChoice))
                                         : make_int4(-1, 0, -1, 0);
#pragma unroll
        for (ep_u32 i = 0; i < 4; ++i) {
            if (two[i].x >= 0 && (ep_u32)two[i].x - low < experts) each((ep_u32)two[i].x - low);
            if (base + 2 * i + 1 < topk && two[i].z >= 0 && (ep_u32)two[i].z - low < experts) each((ep_u32)two[i].z - low);
        }
    }
}

/* Waits for all sources; false after a fault. */
EP_DEV bool ep_low_await_all(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u64 began) {
    bool there = true;
    for (ep_u32 source = threadIdx.x; source < r.w.ranks; source += EP_LOW_THREADS) {
        ep_u32 rows = 0;
        if (ep_takes_part(r, source)) {
            there &= ep_low_await(r, op, EP_LOW_DISPATCH, source, began, &rows);
            if (there && rows > r.w.max_tokens) {
                ep_low_mismatch(r, op, source, EP_LOW_FIELD_ROWS, r.w.max_tokens, rows);
                there = false;
            }
        }
        s.rows[source] = rows;
    }
    if (!__syncthreads_and(there)) return false;
    if (threadIdx.x == 0) {
        ep_u32 sum = 0;
        for (ep_u32 source = 0; source < r.w.ranks; ++source) {
            s.first[source] = sum;
            sum += s.rows[source];
        }
        s.first[r.w.ranks] = sum;
    }
    __syncthreads();
    return true;
}

EP_DEV const ep_u8* ep_low_slot(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row, ep_u32* source) {
    *source = ep_low_source(s.first, row);
    return ep_own(r) + ep_low_row(r.w, op, *source, row - s.first[*source]);
}

/* What a warp reads of a row's slot. */
struct EpLowRead {
    ep_u64 slot;
    ep_u32 source;
    ep_u32 token;
    ep_u32 least; /* the least token that it may be of */
    ep_u32 from;  /* the source that it says it is of */
    ep_u32 op;
    EpChoice choice;
};

/* Refuses a row that is not the one due. */
EP_DEV bool ep_low_check_row(const EpRank& r, ep_u64 op, const EpLowRead& row) {
    ep_u32 field, mine, theirs = row.token;
    if (row.op != (ep_u32)op) {
        field = EP_LOW_FIELD_ROW_OP;
        mine = (ep_u32)op;
        theirs = row.op;
    } else if (row.from != row.source) {
        field = EP_LOW_FIELD_ROW_SOURCE;
        mine = row.source;
        theirs = row.from;
    } else if (row.token < row.least) {
        field = EP_LOW_FIELD_LEAST_TOKEN;
        mine = row.least;
    } else if (row.token >= r.w.max_tokens) {
        field = EP_LOW_FIELD_TOKENS;
        mine = r.w.max_tokens;
    } else {
        return true;
    }
    ep_low_mismatch(r, op, row.source, field, mine, theirs);
    return false;
}

/* A choice in a slot. */
EP_DEV EpChoice ep_low_choice(const ep_u8* at) {
    EpChoice c;
    asm volatile("ld.relaxed.sys.global.v2.b32 {%0,%1}, [%2];" : "=r"(c.expert), "=f"(c.weight) : "l"(at) : "memory");
    return c;
}

/* Reads the beginning of a row's slot, by a warp. */
EP_DEV EpLowRead ep_low_read_row(const EpRank& r, const EpLowReceiver& s, ep_u64 op, ep_u32 row) {
    const ep_u32 lane = threadIdx.x % 32;
    EpLowRead read;
    const ep_u8* slot = ep_low_slot(r, s, op, row, &read.source);
    read.slot = (ep_u64)slot;
    read.choice = EpChoice{-1, 0.0f};
    if (lane < r.w.topk) read.choice = ep_low_choice(slot + sizeof(EpRowHeader) + lane * sizeof(EpChoice));
    const int4 own = ep_ld16_peer(slot);
    read.least = row == s.first[read.source] ? 0 : (ep_u32)ep_ld16_peer(slot - r.w.low_row_bytes).y + 1;
    read.from = (ep_u32)own.x;
    read.token = (ep_u32)own.y;
    read.op = (ep_u32)own.w;
    return read;
}

/* A warp finds the experts of a row, the `turn`th of a batch, marks them, and after a barrier takes the row's places there. `keeps`:
   this block has the row's beginning, and writes what is kept of it. By all threads of the block; `there`: the warp has a row. */
EP_DEV void ep_low_place_rows(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u32 row,
                              const EpLowRead& read, ep_u32 turn, bool there, bool keeps) {
    const ep_u32 lane = threadIdx.x % 32, local = r.w.local_experts, wide = r.w.ranks * r.w.max_tokens;
    const ep_u32 source = read.source, token = read.token;
    const EpChoice choice = read.choice;
    ep_u32 expert = 0, column = 0;
    bool here = false;
    if (there) there = ep_low_check_row(r, op, read);
    if (there) {
        const ep_u32 rank = choice.expert >= 0 ? ep_rank_of_expert(r.w, (ep_u32)choice.expert) : EP_FULL;
        const ep_u32 same = __match_any_sync(EP_FULL, rank);
        column = __popc(__ballot_sync(EP_FULL, rank < r.me && lane + 1 == __ffs((int)same)));
        here = rank == r.me;
        expert = here ? (ep_u32)choice.expert - r.me * local : 0;
        if (here) atomicOr(s.bits + expert, 1u << turn);
    }
    __syncthreads();
    ep_u32 place = 0;
    if (here) {
        place = s.count[expert] + __popc(s.bits[expert] & ((1u << turn) - 1));
        if (place >= wide) {
            ep_low_mismatch(r, op, source, EP_LOW_FIELD_EXPERT_ROWS, wide, place + 1);
            here = false;
        }
        place += expert * wide;
    }
    const ep_u32 votes = __ballot_sync(EP_FULL, here);
    if (here) s.to[turn * 32 + __popc(votes & ((1u << lane) - 1))] = place;
    if (lane == 0) {
        s.of[turn] = __popc(votes);
        s.from[turn] = read.slot + r.w.header_bytes;
    }
    if (there && keeps) {
        EpLowRow* record = (EpLowRow*)ep_low_record(r, a.records, source, row - s.first[source]);
        if (lane == 0) *record = EpLowRow{token, column};
        if (lane < r.w.topk) ((EpLowPick*)(record + 1))[lane] = EpLowPick{here ? (ep_i32)place : -1, choice.weight};
        if (here) ((ep_i32*)a.source_token)[place] = (ep_i32)token;
    }
    __syncthreads();
    for (ep_u32 e = threadIdx.x; e < local; e += EP_LOW_THREADS) {
        s.count[e] += __popc(s.bits[e]);
        s.bits[e] = 0;
    }
}

/* Stores 16 bytes of a row of the batch to each of its experts. */
EP_DEV void ep_low_store(const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u32 turn, ep_u32 at, int4 v) {
    const ep_u32 experts = s.of[turn];
    for (ep_u32 i = 0; i < experts; ++i) ep_st16((ep_u8*)a.out + s.to[turn * 32 + i] * a.out_stride + at, v);
}

/* Copies this block's share of the rows to their experts. */
EP_DEV void ep_low_spread(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op, ep_u32 blocks) {
    const ep_u32 tid = threadIdx.x, warp = tid / 32, columns = (ep_u32)(r.w.payload_stride / 16);
    const EpShareOfRows share = ep_low_share(s.first[r.w.ranks], columns, blockIdx.x, blocks);
    for (ep_u32 e = tid; e < r.w.local_experts; e += EP_LOW_THREADS) s.count[e] = s.bits[e] = 0;
    __syncthreads();
    for (ep_u32 base = share.first; base < share.last; base += EP_LOW_WARPS) {
        const ep_u64 origin = (ep_u64)base * columns, after = origin + (ep_u64)EP_LOW_WARPS * columns;
        const ep_u32 begin = share.begin > origin ? (ep_u32)(share.begin - origin) : 0;
        const ep_u32 end = (ep_u32)((share.end < after ? share.end : after) - origin);
        const ep_u32 row = base + warp;
        /* What does not depend on the rows' places is loaded before these are found. */
        const ep_u32 unit = begin + tid, other = unit + EP_LOW_THREADS;
        int4 v = make_int4(0, 0, 0, 0), w = v;
        ep_u32 source;
        if (unit < end)
            v = ep_ld16_peer(ep_low_slot(r, s, op, base + unit / columns, &source) + r.w.header_bytes + unit % columns * 16);
        if (other < end)
            w = ep_ld16_peer(ep_low_slot(r, s, op, base + other / columns, &source) + r.w.header_bytes + other % columns * 16);
        EpLowRead read;
        if (row < share.last) read = ep_low_read_row(r, s, op, row);
        if (base == share.first) {
            for (ep_u32 before = tid; before < share.first; before += EP_LOW_THREADS)
                ep_low_each_expert(r, ep_low_slot(r, s, op, before, &source), [&](ep_u32 e) { atomicAdd(s.count + e, 1u); });
        }
        ep_low_place_rows(r, a, s, op, row, read, warp, row < share.last, (ep_u64)row * columns >= share.begin);
        if (unit < end) ep_low_store(a, s, unit / columns, unit % columns * 16, v);
        if (other < end) ep_low_store(a, s, other / columns, other % columns * 16, w);
        for (ep_u32 more = other + EP_LOW_THREADS; more < end; more += 2 * EP_LOW_THREADS) {
            const ep_u32 next = more + EP_LOW_THREADS;
            const bool two = next < end;
            v = ep_ld16_peer((const ep_u8*)s.from[more / columns] + more % columns * 16);
            if (two) w = ep_ld16_peer((const ep_u8*)s.from[next / columns] + next % columns * 16);
            ep_low_store(a, s, more / columns, more % columns * 16, v);
            if (two) ep_low_store(a, s, next / columns, next % columns * 16, w);
        }
        __syncthreads();
    }
}

/* Counts all rows: what the user is told, and what the combine has to know of each source. */
EP_DEV void ep_low_count_all(const EpRank& r, const EpLowDispatchArgs& a, const EpLowReceiver& s, ep_u64 op) {
    const ep_u32 tid = threadIdx.x, ranks = r.w.ranks, local = r.w.local_experts;
    __syncthreads();
    for (ep_u32 e = tid; e < ranks * local; e += EP_LOW_THREADS) s.count[e] = 0;
    __syncthreads();
    for (ep_u32 row = tid; row < s.first[ranks]; row += EP_LOW_THREADS) {
        ep_u32 source;
        const ep_u8* slot = ep_low_slot(r, s, op, row, &source);
        ep_low_each_expert(r, slot, [&](ep_u32 e) { atomicAdd(s.count + source * local + e, 1u); });
    }
    __syncthreads();
    for (ep_u32 e = tid; e < local; e += EP_LOW_THREADS) {
        ep_u32 sum = 0;
        for (ep_u32 source = 0; source < ranks; ++source) {
            const ep_u32 rows = s.count[source * local + e];
            ((ep_i64*)a.segments)[(ep_u64)e * ranks + source] = (ep_i64)sum << 32 | rows;
            sum += rows;
        }
        ((ep_i32*)a.expert_counts)[e] = (ep_i32)sum;
    }
    for (ep_u32 source = tid; source < ranks; source += EP_LOW_THREADS) {
        ep_u32 sum = 0;
        for (ep_u32 e = 0; e < local; ++e) sum += s.count[source * local + e];
        ((ep_u32*)a.records)[source] = s.rows[source];
        ((ep_u32*)a.records)[ranks + source] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(EP_LOW_THREADS, 1)
    ep_low_dispatch_kernel(const __grid_constant__ EpRank rank, const __grid_constant__ EpLowDispatchArgs a) {
    const EpLow* low = ep_low_state(rank);
    const ep_u64 began = ep_now();
    const EpRank r = ep_low_rank(rank, (ep_u64*)ep_pool);
    if (low->broken) return;
    const bool sends = a.phases & EP_LOW_SEND, receives = a.phases & EP_LOW_RECEIVE;
    const ep_u64 op = sends ? low->sent + 1 : low->received + 1;
    const bool tries = sends || low->late[op % 2];
    /* At least one block tells the ranks that no rows come. */
    const ep_u32 tokens = a.tokens > 0 ? a.tokens : 1, blocks = gridDim.x < tokens ? gridDim.x : tokens;
    const EpLowReceiver s = ep_low_receiver(r);
    bool refused = false;
    if (tries) refused = ep_low_send_tokens(r, a, op, blocks, !sends, began);
    if (receives && !refused) {
        __syncthreads();
        if (blockIdx.x == 0) ep_low_check_masks(r, op);
        const ep_u32 movers = gridDim.x > 1 ? gridDim.x - 1 : 1;
        if (ep_low_await_all(r, s, op, began)) {
            if (blockIdx.x < movers) ep_low_spread(r, a, s, op, movers);
            if (blockIdx.x + 1 == gridDim.x) ep_low_count_all(r, a, s, op);
        }
    }
    /* The first block has written what was routed, the last one the experts' counts. */
    if (!ep_low_last_block(r, blockIdx.x == 0 || blockIdx.x + 1 == gridDim.x)) return;
    const bool received = ep_low_end(r, op, a.phases, tries, refused, blocks, began);
    ep_u64* counters = (ep_u64*)a.counters;
    for (ep_u32 rank = threadIdx.x; rank < r.w.ranks; rank += EP_LOW_THREADS) {
        if (sends && !refused) counters[rank] += __ldcg((const ep_u32*)a.routed + rank);
        if (received) counters[r.w.ranks + rank] += s.rows[rank];
    }
    if (received)
        for (ep_u32 e = threadIdx.x; e < r.w.local_experts; e += EP_LOW_THREADS)
            counters[4 * r.w.ranks + e] += (ep_u64)__ldcg((const ep_i32*)a.expert_counts + e);
}
