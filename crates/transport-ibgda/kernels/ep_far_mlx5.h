/* ---- ep_far_mlx5.h: the verbs on lanes between nodes where a kernel posts to an mlx5 queue pair itself ----
 *
 * A lane is a queue pair with a completion queue of its own. Both have as many places. Every element takes one place of 64 bytes and asks for
 * a completion, so element `i`, counted from 0 and never wrapped, lies in place i mod places, and so does its completion.
 *
 *   put        an RDMA write, or several where it is long; no bell, unless EP_MLX5_BATCH elements wait for one
 *   publish    a fetch-add of 8 bytes on the rows' own queue pair, of what the cell lacks: an atomic comes after all earlier requests of its
 *              queue pair, however these were placed. It goes by the key of the cells, a region without relaxed ordering. Then the bell.
 *              With EP_MLX5_ORDERED_WRITE a write of the value, which lies in the element: into that region a write comes after all earlier ones
 *   bell       elements, and how many completions were read; a fence; the record; a fence; the register. With EP_MLX5_DOUBLE_BELL the register is rung before the record, too
 *   ticket     of a put: the number of elements up to its last, ever
 *   completed  the completion of element `i` is there when its owner bit is that of the round i / places and its opcode is not 15. One that
 *              succeeded says that all earlier ones did: after an error everything fails
 *   room       a place is written when the element that lay there has completed
 *   error      any other opcode, or a completion of another element: the lane is broken, and the host reads why
 *   F3         what the poster has seen or done comes before the bell: ep_fence_sys
 *   F4         one thread posts to a lane at a time, and hands over by what orders memory. ep_far_poll may be called by any
 *   pulse      of the device's clock: the adapter takes what kernels post, though the host stands still
 */

#define EP_MLX5_WRITE 0x08u
#define EP_MLX5_FETCH_ADD 0x12u
/* The bytes lie in the element, behind their number. */
#define EP_MLX5_INLINE 0x80000000u
/* Asks for a completion. */
#define EP_MLX5_COMPLETE 0x08u
/* An element that failed: at its own adapter, or at the peer's. */
#define EP_MLX5_FAILED 13u
#define EP_MLX5_FAILED_THERE 14u
#define EP_MLX5_INVALID 15u
/* Of ep_mlx5_look alone: it has not completed. */
#define EP_MLX5_UNDER_WAY 0xffu

EP_DEV EpMlx5* ep_mlx5(EpFar lane) { return (EpMlx5*)lane.state; }

EP_DEV ep_u32 ep_mlx5_big(ep_u32 v) { return v << 24 | (v & 0xff00u) << 8 | (v >> 8 & 0xff00u) | v >> 24; }
EP_DEV EpUnit ep_mlx5_unit(ep_u32 a, ep_u32 b, ep_u32 c, ep_u32 d) {
    return ep_unit((ep_i32)ep_mlx5_big(a), (ep_i32)ep_mlx5_big(b), (ep_i32)ep_mlx5_big(c), (ep_i32)ep_mlx5_big(d));
}
/* Two words of 32 bits of one of 64, the upper first, and two more words. */
EP_DEV EpUnit ep_mlx5_wide(ep_u64 a, ep_u32 c, ep_u32 d) { return ep_mlx5_unit((ep_u32)(a >> 32), (ep_u32)a, c, d); }

/* The end of an element's completion, counter 16 | signature 8 | opcode 4 | 3 | owner 1, written last: nothing else is read of one. */
EP_DEV ep_u32 ep_mlx5_end(const EpMlx5* q, ep_u64 index) {
    const ep_u64 place = index & ((1ull << q->log_slots) - 1);
    return ep_mlx5_big(ep_ld_acquire4((const ep_u8*)(q->completions + 64 * place + 60)));
}

/* Whether an element has completed: EP_FAR_OK, EP_FAR_BROKEN or EP_MLX5_UNDER_WAY. */
EP_DEV ep_u32 ep_mlx5_look(EpMlx5* q, ep_u64 index) {
    const ep_u32 end = ep_mlx5_end(q, index);
    const ep_u32 opcode = end >> 4 & 15, round = (ep_u32)(index >> q->log_slots);
    if (((end ^ round) & 1) != 0 || opcode == EP_MLX5_INVALID) return EP_MLX5_UNDER_WAY;
    if (opcode == 0 && end >> 16 == (ep_u32)(index & 0xffff)) return EP_FAR_OK;
    q->status = EP_FAR_BROKEN;
    return EP_FAR_BROKEN;
}

/* Tells the adapter of all elements that are written. */
EP_DEV void ep_mlx5_ring(EpMlx5* q) {
    if (q->rung == q->posted) return;
    const ep_u32 count = (ep_u32)q->posted & 0xffff;
    const ep_u64 bell = (ep_u64)ep_mlx5_big(q->number << 8) << 32 | ep_mlx5_big(count << 8);
    /* Before the adapter knows of any element whose completion may need the place of one that was read. */
    ep_st_relaxed4((ep_u32*)q->read, ep_mlx5_big((ep_u32)q->completed & 0xffffff));
    ep_fence_sys();
#if EP_MLX5_DOUBLE_BELL
    ep_st_register((void*)q->bell, bell);
#endif
    ep_st_relaxed4((ep_u32*)q->record, ep_mlx5_big(count));
    ep_fence_sys();
    ep_st_register((void*)q->bell, bell);
    q->rung = q->posted;
}

/* Waits until the element before `count` has completed. */
EP_DEV ep_u32 ep_mlx5_await(EpMlx5* q, ep_u64 count, ep_u64 until) {
    for (ep_u32 spin = 1;; ++spin) {
        const ep_u32 status = ep_mlx5_look(q, count - 1);
        if (status == EP_FAR_OK) q->completed = count;
        if (status != EP_MLX5_UNDER_WAY) return status;
        if (spin % 64 != 0) continue;
        if (q->status != EP_FAR_OK) return (ep_u32)q->status;
        if (ep_now() >= until) return EP_FAR_TIMEOUT;
        ep_nap(100);
    }
}

/* Waits until there is a place for one more element. */
EP_DEV ep_u32 ep_mlx5_room(EpMlx5* q, ep_u64 until) {
    const ep_u64 places = 1ull << q->log_slots;
    if (q->posted - q->completed < places) return EP_FAR_OK;
    ep_mlx5_ring(q);
    /* One look serves half of the queue, where that much has completed. */
    const ep_u64 half = q->completed + places / 2;
    if (ep_mlx5_look(q, half - 1) == EP_FAR_OK) {
        q->completed = half;
        return EP_FAR_OK;
    }
    return ep_mlx5_await(q, q->completed + 1, until);
}

/* Writes an element of four segments of 16 bytes, of which the first `segments` count: control, remote address, and two that are given. */
EP_DEV ep_u32 ep_mlx5_post(EpMlx5* q, ep_u32 opcode, ep_u32 segments, ep_u64 to, ep_u32 key, EpUnit third, EpUnit fourth, ep_u64 until) {
    const ep_u32 status = ep_mlx5_room(q, until);
    if (status != EP_FAR_OK) return status;
    EpUnit* at = (EpUnit*)(q->elements + 64 * (q->posted & ((1ull << q->log_slots) - 1)));
    const ep_u32 index = (ep_u32)q->posted & 0xffff;
    ep_st16(at, ep_mlx5_unit(index << 8 | opcode, q->number << 8 | segments, EP_MLX5_COMPLETE, 0));
    ep_st16(at + 1, ep_mlx5_wide(to, key, 0));
    ep_st16(at + 2, third);
    ep_st16(at + 3, fourth);
    q->posted += 1;
    return EP_FAR_OK;
}

EP_DEV EpUnit ep_mlx5_data(ep_u64 bytes, ep_u32 key, ep_u64 address) {
    return ep_mlx5_unit((ep_u32)bytes, key, (ep_u32)(address >> 32), (ep_u32)address);
}

/* Eight bytes as they lie in memory. */
EP_DEV EpUnit ep_mlx5_inline(ep_u64 bits) {
    return ep_unit((ep_i32)ep_mlx5_big(EP_MLX5_INLINE | 8), (ep_i32)bits, (ep_i32)(bits >> 32), 0);
}

/* Nothing is posted any more. */
EP_DEV ep_u32 ep_mlx5_refuse(EpMlx5* q) {
    q->status = EP_FAR_REFUSED;
    return EP_FAR_REFUSED;
}

/* By any thread, so what is read of the state may be old: only an error is taken for news. After one all that follows fails, so the last element
 * that the adapter was told of shows it, whoever reads its completion otherwise. */
EP_DEV ep_u32 ep_far_poll(EpFar lane) {
    EpMlx5* q = ep_mlx5(lane);
    const ep_u64 rung = q->rung;
    if (q->status != EP_FAR_OK || rung == 0) return (ep_u32)q->status;
    const ep_u32 opcode = ep_mlx5_end(q, rung - 1) >> 4 & 15;
    if (opcode == EP_MLX5_FAILED || opcode == EP_MLX5_FAILED_THERE) q->status = EP_FAR_BROKEN;
    return (ep_u32)q->status;
}

EP_DEV ep_u64 ep_far_pulse(EpFar) { return ep_now(); }

EP_DEV ep_u32 ep_far_put(EpFar lane, ep_u64 from, ep_u64 to, ep_u64 bytes, ep_u64 until, ep_u64* ticket) {
    EpMlx5* q = ep_mlx5(lane);
    *ticket = q->put;
    if (bytes == 0) return EP_FAR_OK;
    if (q->status != EP_FAR_OK) return (ep_u32)q->status;
    if (bytes > q->bytes || from > q->bytes - bytes || to > q->bytes - bytes) return ep_mlx5_refuse(q);
    for (ep_u64 at = 0; at < bytes;) {
        const ep_u64 piece = bytes - at < EP_MLX5_LONGEST ? bytes - at : EP_MLX5_LONGEST;
        const EpUnit data = ep_mlx5_data(piece, q->own_key, q->from + from + at);
        const ep_u32 status = ep_mlx5_post(q, EP_MLX5_WRITE, 3, q->to + to + at, q->rows_key, data, ep_unit(0, 0, 0, 0), until);
        if (status != EP_FAR_OK) return status;
        at += piece;
        if (q->posted - q->rung >= EP_MLX5_BATCH) ep_mlx5_ring(q);
    }
    *ticket = q->put = q->posted;
    return EP_FAR_OK;
}

EP_DEV ep_u32 ep_far_publish(EpFar lane, ep_u64 cell, ep_u64 bits, ep_u64 until) {
    EpMlx5* q = ep_mlx5(lane);
    if (q->status != EP_FAR_OK) return (ep_u32)q->status;
    const ep_u32 bank = cell - q->cells[1] < q->cell_bytes;
    const ep_u64 at = cell - q->cells[bank];
    if (at >= q->cell_bytes || at % 8 != 0) return ep_mlx5_refuse(q);
    ep_u64* last = (ep_u64*)(q->last + bank * q->cell_bytes + at);
#if EP_MLX5_ORDERED_WRITE
    const EpUnit value = ep_mlx5_inline(bits), unused = ep_unit(0, 0, 0, 0);
    const ep_u32 status = ep_mlx5_post(q, EP_MLX5_WRITE, 3, q->to + cell, q->cells_key, value, unused, until);
#else
    const EpUnit add = ep_mlx5_wide(bits - *last, 0, 0), returned = ep_mlx5_data(8, q->returned_key, q->returned);
    const ep_u32 status = ep_mlx5_post(q, EP_MLX5_FETCH_ADD, 4, q->to + cell, q->cells_key, add, returned, until);
#endif
    if (status != EP_FAR_OK) return status;
    *last = bits;
    ep_mlx5_ring(q);
    return EP_FAR_OK;
}

EP_DEV ep_u32 ep_far_flush(EpFar lane, ep_u64 ticket, ep_u64 until) {
    EpMlx5* q = ep_mlx5(lane);
    if (ticket <= q->completed) return EP_FAR_OK;
    if (q->status != EP_FAR_OK) return (ep_u32)q->status;
    if (ticket > q->posted) return ep_mlx5_refuse(q);
    if (ticket > q->rung) ep_mlx5_ring(q);
    return ep_mlx5_await(q, ticket, until);
}

#endif
