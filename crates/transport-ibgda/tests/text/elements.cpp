/*
 * elements.cpp: what the verbs write, byte for byte: elements, record and doorbell. What they read: completions. With ORACLE the bytes are those that
 * rdma-core's own setters and structs have, else those of vectors written by hand.
 */
#include <stdio.h>
#include <stdlib.h>

#include <initializer_list>

#include "ep_device.h"
#include "ep_far_lanes.h"
#ifdef ORACLE
#include <endian.h>
#include <infiniband/mlx5dv.h>
#endif

namespace {

alignas(64) ep_u8 elements[64 * 64], completions[64 * 64];
ep_u32 record, taken;
ep_u64 bell, last[32];
EpMlx5 state;

constexpr ep_u64 kFrom = 0x99aabbccdd000000, kTo = 0x1122334455000000, kReturned = 0x99aabbccddeeff00;
constexpr ep_u32 kNumber = 0xabcdef, kOwn = 0x01020304, kRows = 0xaabbccdd, kCells = 0x0badcafe;

void begin(ep_u64 posted) {
    memset(elements, 0, sizeof elements);
    memset(completions, 0xff, sizeof completions);
    memset(last, 0, sizeof last);
    record = taken = 0;
    bell = 0;
    state = EpMlx5{};
    state.elements = (ep_u64)elements;
    state.completions = (ep_u64)completions;
    state.record = (ep_u64)&record;
    state.read = (ep_u64)&taken;
    state.bell = (ep_u64)&bell;
    state.last = (ep_u64)last;
    state.from = kFrom;
    state.to = kTo;
    state.bytes = 1ull << 40;
    state.cells[0] = 0x660000;
    state.cells[1] = 0x770000;
    state.cell_bytes = 128;
    state.returned = kReturned;
    state.own_key = kOwn;
    state.rows_key = kRows;
    state.cells_key = kCells;
    state.returned_key = kOwn;
    state.number = kNumber;
    state.log_slots = 6;
    state.posted = state.rung = state.completed = posted;
}

void expect(const char* what, const void* seen, const void* expected, size_t bytes) {
    if (memcmp(seen, expected, bytes) == 0) return;
    printf("%s\n", what);
    for (const void* of : {seen, expected}) {
        for (size_t i = 0; i < bytes; ++i) printf("%02x%s", ((const ep_u8*)of)[i], i % 4 == 3 ? " " : "");
        printf("\n");
    }
    exit(1);
}
void expect(const char* what, ep_u64 seen, ep_u64 expected) {
    if (seen == expected) return;
    printf("%s: %llx, expected %llx\n", what, seen, expected);
    exit(1);
}

/* Bytes of words as the vectors write them. */
template <size_t N> struct Vector {
    ep_u8 bytes[4 * N];
    Vector(const ep_u32 (&words)[N]) {
        for (size_t i = 0; i < 4 * N; ++i) bytes[i] = (ep_u8)(words[i / 4] >> (24 - i % 4 * 8));
    }
};

void complete(ep_u64 index, ep_u8 opcode, uint16_t counter) {
    ep_u8* at = completions + 64 * (index % 64);
#ifdef ORACLE
    mlx5_cqe64* entry = (mlx5_cqe64*)at;
    entry->wqe_counter = htobe16(counter);
    entry->op_own = (ep_u8)(opcode << 4 | (index / 64 & 1));
#else
    at[60] = (ep_u8)(counter >> 8);
    at[61] = (ep_u8)counter;
    at[63] = (ep_u8)(opcode << 4 | (index / 64 & 1));
#endif
}

void a_put_is_a_write_and_rings_no_bell() {
    begin(0x51234);
    ep_u64 ticket = 0;
    expect("put", ep_far_put({(ep_u64)&state}, 0xeeff00, 0x667788, 7168, 0, &ticket), EP_FAR_OK);
    expect("ticket", ticket, 0x51235);
    const ep_u8* element = elements + 64 * (0x51234 % 64);
#ifdef ORACLE
    struct {
        mlx5_wqe_ctrl_seg control;
        mlx5_wqe_raddr_seg remote;
        mlx5_wqe_data_seg data;
    } wanted{};
    mlx5dv_set_ctrl_seg(&wanted.control, 0x1234, MLX5_OPCODE_RDMA_WRITE, 0, kNumber, MLX5_WQE_CTRL_CQ_UPDATE, 3, 0, 0);
    wanted.remote.raddr = htobe64(kTo + 0x667788);
    wanted.remote.rkey = htobe32(kRows);
    mlx5dv_set_data_seg(&wanted.data, 7168, kOwn, kFrom + 0xeeff00);
    static_assert(sizeof wanted == 48, "three segments");
    expect("write", element, &wanted, sizeof wanted);
#else
    const Vector<12> wanted({0x00123408, 0xabcdef03, 0x00000008, 0x00000000, 0x11223344, 0x55667788, 0xaabbccdd, 0, 0x00001c00,
                             0x01020304, 0x99aabbcc, 0xddeeff00});
    expect("write", element, wanted.bytes, sizeof wanted.bytes);
#endif
    expect("no bell", bell, 0);
    expect("no record", record, 0);
}

void a_publish_is_a_fetch_add_of_what_the_cell_lacks_or_a_write_and_rings() {
    begin(0x51233);
    ep_u64 ticket = 0;
    expect("put", ep_far_put({(ep_u64)&state}, 0, 0, 64, 0, &ticket), EP_FAR_OK);
    last[16 + 3] = 0x0001000000000005; /* of the second bank */
    expect("publish", ep_far_publish({(ep_u64)&state}, 0x770018, 0x0001000000000107, 0), EP_FAR_OK);
    expect("kept", last[16 + 3], 0x0001000000000107);
    const ep_u8* element = elements + 64 * (0x51234 % 64);
#if EP_MLX5_ORDERED_WRITE
    /* The value as this machine has it, behind its length. */
    const ep_u64 value = 0x0001000000000107;
#ifdef ORACLE
    struct {
        mlx5_wqe_ctrl_seg control;
        mlx5_wqe_raddr_seg remote;
        mlx5_wqe_inl_data_seg inlined;
        ep_u8 bytes[8];
    } wanted{};
    mlx5dv_set_ctrl_seg(&wanted.control, 0x1234, MLX5_OPCODE_RDMA_WRITE, 0, kNumber, MLX5_WQE_CTRL_CQ_UPDATE, 3, 0, 0);
    wanted.remote.raddr = htobe64(kTo + 0x770018);
    wanted.remote.rkey = htobe32(kCells);
    wanted.inlined.byte_count = htobe32(8 | MLX5_INLINE_SEG);
    memcpy(wanted.bytes, &value, 8);
    static_assert(offsetof(decltype(wanted), bytes) == 36, "behind its length");
    /* The last word says nothing. */
    expect("inline write", element, &wanted, 44);
#else
    const Vector<9> wanted({0x00123408, 0xabcdef03, 0x00000008, 0, 0x11223344, 0x55770018, 0x0badcafe, 0, 0x80000008});
    expect("inline write", element, wanted.bytes, sizeof wanted.bytes);
    expect("its value", element + 36, &value, 8);
#endif
#elif defined(ORACLE)
    struct {
        mlx5_wqe_ctrl_seg control;
        mlx5_wqe_raddr_seg remote;
        mlx5_wqe_atomic_seg atomic;
        mlx5_wqe_data_seg data;
    } wanted{};
    mlx5dv_set_ctrl_seg(&wanted.control, 0x1234, MLX5_OPCODE_ATOMIC_FA, 0, kNumber, MLX5_WQE_CTRL_CQ_UPDATE, 4, 0, 0);
    wanted.remote.raddr = htobe64(kTo + 0x770018);
    wanted.remote.rkey = htobe32(kCells);
    wanted.atomic.swap_add = htobe64(0x102);
    mlx5dv_set_data_seg(&wanted.data, 8, kOwn, kReturned);
    static_assert(sizeof wanted == MLX5_SEND_WQE_BB, "one place");
    expect("fetch-add", element, &wanted, sizeof wanted);
#else
    const Vector<16> wanted({0x00123412, 0xabcdef04, 0x00000008, 0, 0x11223344, 0x55770018, 0x0badcafe, 0, 0, 0x102, 0, 0, 8, 0x01020304,
                             0x99aabbcc, 0xddeeff00});
    expect("fetch-add", element, wanted.bytes, sizeof wanted.bytes);
#endif
    const Vector<2> doorbell({0x00123500, 0xabcdef00});
    const Vector<1> counted({0x00001235});
    expect("doorbell", &bell, doorbell.bytes, 8);
    expect("record", &record, counted.bytes, 4);
    const Vector<1> read({0x00051233});
    expect("completions that were read", &taken, read.bytes, 4);
}

void long_messages_are_split() {
    begin(0);
    ep_u64 ticket = 0;
    expect("put", ep_far_put({(ep_u64)&state}, 0, 0, 2 * EP_MLX5_LONGEST + 1, 0, &ticket), EP_FAR_OK);
    expect("elements", ticket, 3);
    for (ep_u32 i = 0; i < 3; ++i) {
        const ep_u64 bytes = i < 2 ? EP_MLX5_LONGEST : 1, at = kFrom + i * EP_MLX5_LONGEST;
        const Vector<4> data({(ep_u32)bytes, kOwn, (ep_u32)(at >> 32), (ep_u32)at});
        expect("piece", elements + 64 * i + 32, data.bytes, 16);
    }
}

void a_batch_rings_by_itself() {
    begin(0);
    ep_u64 ticket = 0;
    for (ep_u32 i = 1; i <= EP_MLX5_BATCH; ++i) {
        expect("no bell yet", bell, 0);
        expect("put", ep_far_put({(ep_u64)&state}, 0, 0, 8, 0, &ticket), EP_FAR_OK);
    }
    expect("rung", state.rung, EP_MLX5_BATCH);
}

void a_place_is_written_when_its_element_has_completed() {
    begin(0);
    ep_u64 ticket = 0;
    for (ep_u32 i = 0; i < 64; ++i) expect("put", ep_far_put({(ep_u64)&state}, 0, i, 8, 0, &ticket), EP_FAR_OK);
    ep_u8 before[64];
    memcpy(before, elements, 64);
    expect("full", ep_far_put({(ep_u64)&state}, 0, 999, 8, ep_now(), &ticket), EP_FAR_TIMEOUT);
    expect("untouched", elements, before, 64);
    expect("all was rung", state.rung, 64);
    expect("its ticket is that of the last put", ticket, 64);
    complete(0, 0, 0);
    expect("put", ep_far_put({(ep_u64)&state}, 0, 999, 8, ep_now(), &ticket), EP_FAR_OK);
    expect("one place", ep_far_put({(ep_u64)&state}, 0, 999, 8, ep_now(), &ticket), EP_FAR_TIMEOUT);
    for (ep_u64 i = 1; i < 64; ++i) complete(i, 0, (uint16_t)i);
    expect("put", ep_far_put({(ep_u64)&state}, 0, 999, 8, ep_now(), &ticket), EP_FAR_OK);
    expect("half at a time", state.completed, 33);
}

/* Text that is wrong may wait in vain. */
ep_u64 soon() { return ep_now() + 100000000ull; }

/* A flush waits for the very element, in the very round. */
void flush_reads_owner_opcode_and_counter() {
    for (const ep_u64 at : {0ull, 63ull, 64ull, 127ull, 128ull, 0xffffull, 0x10000ull, 0x1ffffull}) {
        begin(at);
        ep_u64 ticket = 0;
        expect("put", ep_far_put({(ep_u64)&state}, 0, 0, 8, 0, &ticket), EP_FAR_OK);
        expect("never written", ep_far_flush({(ep_u64)&state}, ticket, ep_now()), EP_FAR_TIMEOUT);
        complete(at + 64, 0, (uint16_t)at); /* the other round's owner */
        expect("owner", ep_far_flush({(ep_u64)&state}, ticket, ep_now()), EP_FAR_TIMEOUT);
        expect("under way", ep_far_poll({(ep_u64)&state}), EP_FAR_OK);
        complete(at, 0, (uint16_t)at);
        expect("done", ep_far_flush({(ep_u64)&state}, ticket, ep_now()), EP_FAR_OK);
        expect("rung by the flush", state.rung, at + 1);
    }
    for (const ep_u8 opcode : {1, 2, 13, 14}) {
        begin(7);
        ep_u64 ticket = 0;
        expect("put", ep_far_put({(ep_u64)&state}, 0, 0, 8, 0, &ticket), EP_FAR_OK);
        expect("under way", ep_far_flush({(ep_u64)&state}, ticket, ep_now()), EP_FAR_TIMEOUT);
        complete(7, opcode, 7);
        /* Only an error is news to whoever does not know which element it is of. */
        expect("poll", ep_far_poll({(ep_u64)&state}), opcode >= 13 ? EP_FAR_BROKEN : EP_FAR_OK);
        expect("flush", ep_far_flush({(ep_u64)&state}, ticket, soon()), EP_FAR_BROKEN);
        expect("put", ep_far_put({(ep_u64)&state}, 0, 0, 8, ~0ull, &ticket), EP_FAR_BROKEN);
        expect("publish", ep_far_publish({(ep_u64)&state}, 0x660000, 1, ~0ull), EP_FAR_BROKEN);
    }
    begin(7);
    ep_u64 ticket = 0;
    expect("put", ep_far_put({(ep_u64)&state}, 0, 0, 8, 0, &ticket), EP_FAR_OK);
    complete(7, 0, 8);
    expect("of another element", ep_far_flush({(ep_u64)&state}, ticket, soon()), EP_FAR_BROKEN);
}

void what_reaches_out_is_refused_and_touches_nothing() {
    const auto refused = [](const char* what, ep_u64 from, ep_u64 to, ep_u64 bytes) {
        begin(0);
        ep_u64 ticket = 0;
        expect(what, ep_far_put({(ep_u64)&state}, from, to, bytes, 0, &ticket), EP_FAR_REFUSED);
        expect(what, state.posted, 0);
        expect(what, ep_far_poll({(ep_u64)&state}), EP_FAR_REFUSED);
    };
    const ep_u64 all = 1ull << 40;
    refused("source", all - 7, 0, 8);
    refused("destination", 0, all - 7, 8);
    refused("length", 0, 0, all + 1);
    refused("wrapped", ~0ull - 3, 0, 8);
    for (const ep_u64 cell : {0x660080ull, 0x65fff8ull, 0x770004ull, 0x770080ull, 0ull}) {
        begin(0);
        expect("no cell", ep_far_publish({(ep_u64)&state}, cell, 1, 0), EP_FAR_REFUSED);
        expect("no cell", state.posted, 0);
    }
    begin(0);
    ep_u64 ticket = 77;
    expect("nothing", ep_far_put({(ep_u64)&state}, 0, 0, 0, 0, &ticket), EP_FAR_OK);
    expect("the last put's", ticket, 0);
}

} /* namespace */

#ifdef ORACLE
static_assert(EP_MLX5_WRITE == MLX5_OPCODE_RDMA_WRITE && EP_MLX5_FETCH_ADD == MLX5_OPCODE_ATOMIC_FA, "opcodes");
static_assert(EP_MLX5_COMPLETE == MLX5_WQE_CTRL_CQ_UPDATE && EP_MLX5_INVALID == MLX5_CQE_INVALID, "marks");
static_assert(sizeof(mlx5_cqe64) == 64 && MLX5_CQE_OWNER_MASK == 1 && MLX5_CQE_REQ == 0 && MLX5_SND_DBR == 1, "places");
static_assert(offsetof(mlx5_cqe64, wqe_counter) == 60 && offsetof(mlx5_cqe64, op_own) == 63, "completions");
#endif

int main() {
    a_put_is_a_write_and_rings_no_bell();
    a_publish_is_a_fetch_add_of_what_the_cell_lacks_or_a_write_and_rings();
    long_messages_are_split();
    a_batch_rings_by_itself();
    a_place_is_written_when_its_element_has_completed();
    flush_reads_owner_opcode_and_counter();
    what_reaches_out_is_refused_and_touches_nothing();
    printf("all as expected\n");
}
