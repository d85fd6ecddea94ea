/*
 * ep_hca_copy.h: how an adapter that multiprocessors play moves the bytes of writes. One warp has too few of them under way: the stretches that a batch of
 * writes names are cut into pieces, which all warps of all blocks take and copy.
 *
 *   job    a batch (EpHcaJob), in the tables, where both blocks find it. A bit of EpHcaState.open says that nobody has taken some piece of it
 *   take   by an atomic on the word that has the number of pieces, too: so a ticket is good for the batch whose pieces it counts, whatever was there before.
 *          A ticket is good for two pieces, as it takes a microsecond. A warp that goes on with a batch asks for nothing else: it has the batch's
 *          stretches in registers
 *   carry  by way of shared memory (ep_hca_piece.h). A warp fetches a piece while it stores the one before
 *   done   what the engine stores is awaited, all lanes fence for the system, and then the pieces count: whoever has seen the number may tell the peer. A
 *          warp says so of a batch when it has turned to another and stored a piece of that, so that it need not wait for what it has just stored; or at
 *          once, where there is no other
 */
#ifndef EP_HCA_COPY_H
#define EP_HCA_COPY_H
#include "ep_hca_piece.h"
#include "ep_args.h"

#define EP_HCA_NONE 0xffffffffu
/* Pieces that a ticket is good for: the one that is fetched next, and the one that is kept. */
#define EP_HCA_TICKET 2u

/* A stretch of a job, one a lane; `until`: pieces of it and of all before. */
struct EpHcaStretch {
    ep_u64 to, from;
    ep_u32 bytes, until;
};

/* What a warp copies. */
struct EpHcaHands {
    EpHcaRoom room;
    ep_u32 half;          /* of the room, where the next piece goes */
    EpHcaPiece held;      /* fetched into the other: of the job `last` */
    ep_u32 stored;        /* pieces of the job `last` that do not count yet */
    ep_u32 last;
    ep_u32 owed;          /* such pieces of the job `before` */
    ep_u32 before;
    EpHcaStretch stretch; /* of the batch that is held a piece of */
    ep_u32 kept;          /* a piece of the job `last` that is the warp's, or 0: lane 0's word */
    bool has_more;        /* the last ticket has left pieces: lane 0's word */
};

EP_DEV EpHcaState* ep_hca_state(const EpHcaArgs& a) { return (EpHcaState*)a.state; }
EP_DEV EpHcaJob* ep_hca_job(const EpHcaArgs& a, ep_u32 job) { return (EpHcaJob*)a.jobs + job; }
EP_DEV ep_u64 ep_hca_add(ep_u64* at, ep_u64 by) { return atomicAdd_system((unsigned long long*)at, (unsigned long long)by); }
/* As ep_hca_add, and what was released with the word is there: without a load that acquires behind it, which would be another way to memory and back. */
EP_DEV ep_u64 ep_hca_add_acquire(ep_u64* at, ep_u64 by) {
#ifdef __CUDACC__
    ep_u64 was;
    asm volatile("atom.add.acquire.sys.global.u64 %0, [%1], %2;" : "=l"(was) : "l"(at), "l"(by) : "memory");
    return was;
#else
    return ep_hca_add(at, by);
#endif
}
EP_DEV ep_u32 ep_hca_lowest(ep_u64 bits) { return (ep_u32)bits != 0 ? ep_lowest_bit((ep_u32)bits) : 32 + ep_lowest_bit((ep_u32)(bits >> 32)); }

/* ---- a job ---- */

/* Its stretches. By a warp, all of whose lanes have seen them announced. */
EP_DEV EpHcaStretch ep_hca_stretch(const EpHcaArgs& a, ep_u32 job) {
    const EpHcaJob* all = ep_hca_job(a, job);
    const ep_u32 lane = ep_warp_lane();
    const ep_u64 to = *(const volatile ep_u64*)&all->to[lane], from = *(const volatile ep_u64*)&all->from[lane];
    const ep_u64 size = *(const volatile ep_u64*)&all->sizes[lane];
    return EpHcaStretch{to, from, (ep_u32)size, (ep_u32)(size >> 32)};
}

/* A piece of a job with these stretches. By a warp. */
EP_DEV EpHcaPiece ep_hca_piece(const EpHcaArgs& a, const EpHcaStretch& mine, ep_u32 job, ep_u32 number) {
    const ep_u32 of = ep_bits(ep_warp_votes(number >= mine.until));
    const ep_u32 before = ep_warp_shuffle(mine.until, of == 0 ? 0 : of - 1);
    const ep_u64 done = (ep_u64)(number - (of == 0 ? 0 : before)) * a.piece, left = ep_warp_shuffle(mine.bytes, of) - done;
    return EpHcaPiece{ep_warp_shuffle(mine.to, of) + done, ep_warp_shuffle(mine.from, of) + done, left < a.piece ? (ep_u32)left : a.piece, job};
}

/* Nobody finds a piece of it that a launch before has left. By one lane, before the job's bit is set for the first time. */
EP_DEV void ep_hca_clear(const EpHcaArgs& a, ep_u32 job) { ep_st_release(&ep_hca_job(a, job)->pieces, 0); }

/* Lets warps copy its pieces. By the warp that has written its stretches. The bit first: whoever has taken the last piece takes it away. */
EP_DEV void ep_hca_open(const EpHcaArgs& a, ep_u32 job, ep_u32 pieces) {
    EpHcaJob* all = ep_hca_job(a, job);
    ep_warp_meet();
    if (ep_warp_lane() != 0) return;
    *(volatile ep_u64*)&all->done = 0;
    ep_hca_add(&ep_hca_state(a)->open, 1ull << job);
    ep_fence_sys();
    ep_st_release(&all->pieces, (ep_u64)pieces << 32);
}

/* Asks for pieces of a job, which does no harm where there are none. By one lane: the first one's number, or EP_HCA_NONE. */
EP_DEV ep_u32 ep_hca_ask(const EpHcaArgs& a, EpHcaHands& hands, ep_u32 job) {
    const ep_u64 was = ep_hca_add_acquire(&ep_hca_job(a, job)->pieces, EP_HCA_TICKET), all = was >> 32, number = (ep_u32)was;
    hands.has_more = number + EP_HCA_TICKET < all;
    if (number >= all) return EP_HCA_NONE;
    hands.kept = number + 1 < all ? number + 1 : 0;
    if (!hands.has_more) ep_hca_add(&ep_hca_state(a)->open, 0 - (1ull << job));
    return number;
}

/* Takes a piece: the one that is kept, or, if the warp asks, of the job `last`, or of the next that has some. By a warp; whether there is one. */
EP_DEV bool ep_hca_take(const EpHcaArgs& a, EpHcaHands& hands, bool asks, EpHcaPiece& piece) {
    ep_u32 job = hands.last, number = EP_HCA_NONE;
    if (ep_warp_lane() == 0) {
        if (hands.kept != 0) {
            number = hands.kept;
            hands.kept = 0;
        } else if (asks && hands.has_more) number = ep_hca_ask(a, hands, job);
        const ep_u64 open = asks && number == EP_HCA_NONE ? *(const volatile ep_u64*)&ep_hca_state(a)->open : 0;
        if (open != 0) {
            const ep_u64 above = open >> job << job;
            job = ep_hca_lowest(above != 0 ? above : open);
            number = ep_hca_ask(a, hands, job);
        }
    }
    job = ep_warp_shuffle(job, 0);
    number = ep_warp_shuffle(number, 0);
    if (number == EP_HCA_NONE) return false;
    ep_warp_meet();
    /* The job has not become another batch's where a piece of it is held: that does not count yet. */
    const bool is_known = job == hands.last && hands.held.bytes != 0;
    if (!is_known) hands.stretch = ep_hca_stretch(a, job);
    piece = ep_hca_piece(a, hands.stretch, job, number);
    return true;
}

/* Pieces that the warp has stored count as copied: all but the last one that it has stored, or that, too. */
template <int kLast> EP_DEV void ep_hca_count(const EpHcaArgs& a, ep_u32 job, ep_u32 pieces) {
    ep_hca_await_stores<kLast>();
    ep_fence_sys();
    ep_warp_meet();
    if (ep_warp_lane() != 0) return;
    ep_fence_device();
    ep_hca_add(&ep_hca_job(a, job)->done, pieces);
}

/* ---- warps ---- */

/* Fetches a piece, if there is one that is the warp's or becomes so if it asks, and stores the one before. By a warp; whether it had anything to do. */
EP_DEV bool ep_hca_carry(const EpHcaArgs& a, EpHcaHands& hands, bool asks) {
    EpHcaPiece next = {};
    const bool has_next = ep_hca_take(a, hands, asks, next), has_held = hands.held.bytes != 0;
    if (!has_next && !has_held) return false;
    ep_hca_fetch(hands.room, hands.half, next);
    hands.half ^= 1;
    if (has_held) {
        ep_hca_store(hands.room, hands.half, hands.held);
        hands.stored += 1;
    }
    /* A piece of the job `last` was stored since. */
    if (hands.owed != 0) ep_hca_count<1>(a, hands.before, hands.owed);
    hands.owed = 0;
    if (!has_next || next.job != hands.last) {
        if (has_next) {
            hands.owed = hands.stored;
            hands.before = hands.last;
        } else if (hands.stored != 0) ep_hca_count<0>(a, hands.last, hands.stored);
        hands.stored = 0;
    }
    if (has_next) hands.last = next.job;
    hands.held = next;
    return true;
}

/* Fetches the first piece of a job that nobody else is let copy. By a warp. */
EP_DEV EpHcaPiece ep_hca_begin_alone(const EpHcaArgs& a, const EpHcaHands& hands, ep_u32 job) {
    const EpHcaPiece piece = ep_hca_piece(a, ep_hca_stretch(a, job), job, 0);
    ep_hca_fetch(hands.room, hands.half, piece);
    return piece;
}

/* Copies that and all behind it, and does not fence. By a warp. The next is fetched meanwhile, where the warp has room for it. */
EP_DEV void ep_hca_carry_alone(const EpHcaArgs& a, EpHcaHands& hands, EpHcaPiece piece, ep_u32 pieces) {
    const ep_u32 turns = hands.held.bytes == 0 ? 1 : 0;
    ep_u32 half = hands.half;
    for (ep_u32 number = 1; number <= pieces; ++number) {
        EpHcaPiece next = {};
        if (turns != 0 && number < pieces) next = ep_hca_piece(a, ep_hca_stretch(a, piece.job), piece.job, number);
        ep_hca_fetch(hands.room, half ^ turns, next);
        ep_hca_store(hands.room, half, piece);
        if (turns == 0 && number < pieces) {
            next = ep_hca_piece(a, ep_hca_stretch(a, piece.job), piece.job, number);
            ep_hca_fetch(hands.room, half, next);
        }
        half ^= turns;
        piece = next;
    }
}
#endif
