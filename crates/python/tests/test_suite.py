"""The cases that every backend must pass, through Python: `moexpress.Communicator` against the oracle, bit for bit. Names are those of
the suite in `crates/ep-conformance`."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from moexpress import Communicator, Meeting, errors


@dataclass
class Case:
    """A batch, and how it is moved."""

    tokens: list[int]
    experts_a_rank: int = 2
    topk: int = 2
    hidden: int = 64
    drop: float = 0.1
    route: str = "random"
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "engine_one_rank_alone_gets_everything": Case([30, 0, 0, 0]),
    "engine_hidden_of_one": Case([9, 8, 7, 6], hidden=1),
    "engine_hidden_that_is_no_multiple_of_anything": Case([9, 8, 7, 6], hidden=301),
    "engine_topk_of_all_experts": Case([9, 8, 7, 6], experts_a_rank=1, topk=2),
    "engine_no_tokens_anywhere": Case([0, 0, 0, 0]),
    "engine_a_rank_without_tokens": Case([20, 0, 13, 1]),
    "engine_all_tokens_to_one_expert": Case([20, 7, 13, 1], topk=1, route="one expert"),
    "engine_every_choice_dropped": Case([20, 7, 13, 1], drop=1.1),
    "memory_rings_of_one_slot": Case([20, 7, 13, 1], settings={"placement": "ring", "slots": 1}),
    "memory_outboxes_of_one_slot": Case([20, 7, 13, 1], settings={"placement": "pulled", "slots": 1, "channels": 2}),
    "memory_rings_of_several_channels": Case([40, 7, 13, 1], settings={"placement": "ring", "slots": 3, "channels": 4}),
    "memory_a_batch_a_thousand_times_the_rings": Case(
        [4000, 4000, 4000, 4000], hidden=8, settings={"placement": "ring", "slots": 4}
    ),
    "memory_an_arena_too_small_falls_back_to_rings": Case([300, 200, 100, 50], settings={"arena_bytes": 1 << 10}),
}


def make_batches(layer: oracle.Layer, case: Case, seed: int) -> list[oracle.Batch]:
    made = oracle.batches(layer, case.tokens[: layer.world], seed=seed, drop=case.drop)
    if case.route == "one expert":
        for batch in made:
            batch.topk_idx.fill_(1)
    return made


def check_move(
    communicator: Communicator, layer: oracle.Layer, all_batches: list[oracle.Batch], rank: int, **use: Any
) -> None:
    """A dispatch, a cached one, and a combine; ``use``: what they say of outboxes."""
    batch, expected = all_batches[rank], oracle.arrived(layer, all_batches, rank)
    received = communicator.dispatch(batch.x, batch.topk_idx, batch.topk_weights, **use)
    rows = oracle.gathered([each.x for each in all_batches], expected)
    assert received.rows == len(rows) == received.handle.rows
    assert torch.equal(received.x, rows)
    assert torch.equal(received.topk_idx, expected.topk_idx)
    assert torch.equal(received.topk_weights, expected.topk_weights)
    assert torch.equal(received.source_rank, expected.source_rank)
    assert torch.equal(received.source_token, expected.source_token)
    assert received.expert_counts == expected.counts

    again = communicator.redispatch(batch.x * 2, received.handle, **use)
    assert torch.equal(again.x, rows * 2) and again.topk_idx is None and again.expert_counts == []

    # Experts that add their rank, so that rows of the wrong rank show.
    scaled = [
        oracle.gathered([each.x for each in all_batches], oracle.arrived(layer, all_batches, r)) * (r + 1)
        for r in range(layer.world)
    ]
    y = received.x * (rank + 1)
    combined = communicator.combine(y, received.handle, topk_weights=received.topk_weights, **use)
    assert torch.equal(combined.x, oracle.combined(layer, all_batches, rank, scaled))
    kept = batch.topk_weights.masked_fill(batch.topk_idx < 0, 0)
    assert torch.equal(combined.topk_weights, kept)


def check_case(rank: int, world: int, case: Case) -> None:
    layer = oracle.Layer(world, case.experts_a_rank * world, case.topk, case.hidden)
    with Communicator(
        experts=layer.experts, topk=layer.topk, hidden=layer.hidden, max_tokens=64, device="cpu", **case.settings
    ) as communicator:
        for seed in range(3):
            check_move(communicator, layer, make_batches(layer, case, seed), rank)


@pytest.mark.parametrize("name", CASES)
def test_engine(ranks: Any, name: str) -> None:
    ranks.run(check_case, CASES[name])


def small(meeting: Meeting | None = None, **settings: Any) -> tuple[oracle.Layer, Communicator]:
    """A layer of 2 experts a rank, top-2, hidden 64."""
    world = dist.get_world_size()
    layer = oracle.Layer(world, 2 * world, 2, 64)
    sizes = {"experts": layer.experts, "topk": layer.topk, "hidden": layer.hidden, "max_tokens": 64}
    return layer, Communicator(meeting, **{**sizes, "device": "cpu", **settings})


TOKENS = [20, 0, 13, 7]


def check_uses(rank: int, world: int) -> None:
    layer, communicator = small(placement="pulled", channels=1, slots=40)
    with communicator:
        assert communicator.outbox_slots == 40
        stats = communicator.stats()
        assert stats["outbox_piece"] == stats["outbox_slots"] == 0
        for seed, (piece, slots) in enumerate([(1, 1), (3, None), (None, 33), (24, 40), (36, 256)]):
            # Each rank has its own.
            use = {"outbox_piece": piece and piece + rank, "outbox_slots": slots and slots + rank}
            batches = oracle.batches(layer, [300, 90, 60, 45][:world], seed=seed)
            check_move(communicator, layer, batches, rank, **use)
            stats = communicator.stats()
            assert stats["outbox_piece"] == min(use["outbox_piece"] or 8, 32)
            # The last call was a combine, whose outboxes have one reader each.
            assert stats["outbox_slots"] == min(max(use["outbox_slots"] or 40, 32), 40)
    with small()[1] as communicator:
        assert communicator.outbox_slots == 0


def test_ranks_use_their_outboxes_as_they_like(ranks: Any) -> None:
    ranks.run(check_uses)


def check_many(rank: int, world: int) -> None:
    layer, communicator = small()
    for seed in range(200):
        check_move(communicator, layer, oracle.batches(layer, TOKENS[:world], seed=seed), rank)
    stats = communicator.stats()
    assert stats["operations"] == 600
    communicator.close()


def test_engine_many_operations(ranks: Any) -> None:
    ranks.run(check_many)


def check_concurrent(rank: int, world: int) -> None:
    """Communicators of one meeting and of another, with calls in turn."""
    meeting = Meeting()
    made = [small(meeting), small(meeting, hidden=32), small(None)]
    made[1][0].hidden = 32
    for seed in range(5):
        for layer, communicator in made:
            check_move(communicator, layer, oracle.batches(layer, TOKENS[:world], seed=seed), rank)
    foreign = made[0][1].dispatch(*inputs(made[0][0], rank)).handle
    for _, communicator in made[1:]:
        with pytest.raises(errors.InvalidArgument, match="handle is of another endpoint"):
            communicator.redispatch(torch.zeros(TOKENS[rank], communicator.hidden).bfloat16(), foreign)
    for _, communicator in made:
        communicator.close()


def inputs(layer: oracle.Layer, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = oracle.batches(layer, TOKENS[: layer.world])[rank]
    return batch.x, batch.topk_idx, batch.topk_weights


def test_engine_concurrent_communicators(ranks: Any) -> None:
    ranks.run(check_concurrent)


def check_statistics(rank: int, world: int) -> None:
    layer, communicator = small()
    all_batches = oracle.batches(layer, TOKENS[:world])
    batch = all_batches[rank]
    received = communicator.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
    stats = communicator.stats()
    sent = oracle.members(layer, batch.topk_idx).sum(0).tolist()
    came = [int((received.source_rank == source).sum()) for source in range(world)]
    assert stats["rows_sent"] == sent and stats["rows_received"] == came
    assert stats["expert_rows"] == received.expert_counts
    assert all(size == 0 or size >= rows * 128 for size, rows in zip(stats["bytes_sent"], sent, strict=True))
    assert len(stats["waited_ns"]) == world and stats["waited_ns"][rank] == 0
    communicator.close()


def test_engine_statistics_count_what_moved(ranks: Any) -> None:
    ranks.run(check_statistics)


def check_leases(rank: int, world: int) -> None:
    """Held rows are never overwritten, and their memory is granted again when the last view is gone."""
    layer, communicator = small(arena_bytes=1 << 20)
    held = []
    for seed in range(50):
        all_batches = oracle.batches(layer, TOKENS[:world], seed=seed)
        batch = all_batches[rank]
        received = communicator.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
        expected = oracle.gathered([each.x for each in all_batches], oracle.arrived(layer, all_batches, rank))
        held.append((received.x.view(-1), expected.view(-1)))
        if seed % 3 == 2:
            del held[0]
    assert all(torch.equal(got, expected) for got, expected in held)

    def address() -> int:
        batch = oracle.batches(layer, [20] * world, drop=0)[rank]
        return communicator.dispatch(batch.x, batch.topk_idx).x.data_ptr()

    held.clear()
    gc.collect()
    dist.barrier()
    # Dropped at once, so each lies where the one before did.
    assert len({address() for _ in range(20)}) == 1
    # What is held outlives the communicator.
    batch = oracle.batches(layer, [20] * world, drop=0)[rank]
    received = communicator.dispatch(batch.x, batch.topk_idx)
    copy = received.x.clone()
    communicator.close()
    assert torch.equal(received.x, copy)


def test_memory_a_dropped_lease_is_granted_again(ranks: Any) -> None:
    ranks.run(check_leases)


def check_leases_of_scales(rank: int, world: int) -> None:
    """Codes and scales hold the memory of both, each alone."""
    layer, communicator = small(element="fp8", hidden=512, arena_bytes=1 << 20)
    layer.hidden = 512
    held = []
    for seed in range(30):
        all_batches = oracle.batches(layer, TOKENS[:world], seed=seed)
        batch, expected = all_batches[rank], oracle.arrived(layer, all_batches, rank)
        codes = [each.x.float().to(torch.float8_e4m3fn) for each in all_batches]
        scales = [each.x[:, :4].float() for each in all_batches]
        received = communicator.dispatch(codes[rank], batch.topk_idx, scales=scales[rank])
        x, their = received.x, received.scales
        assert their is not None and x.is_contiguous() and their.is_contiguous()
        if seed % 2:
            held.append((x.view(torch.uint8), oracle.gathered([one.view(torch.uint8) for one in codes], expected)))
        else:
            held.append((their, oracle.gathered(scales, expected)))
        del received, x, their
        if seed % 5 == 4:
            del held[0]
    assert all(torch.equal(got, wanted) for got, wanted in held)
    communicator.close()


def test_memory_codes_and_scales_each_hold_it(ranks: Any) -> None:
    ranks.run(check_leases_of_scales)


def check_fp8(rank: int, world: int) -> None:
    for element, placement in [(e, p) for e in ("fp8", "fp8-ue8m0") for p in ("direct", "ring", "pulled")]:
        layer, communicator = small(element=element, hidden=300, placement=placement)
        layer.hidden = 300
        all_batches = oracle.batches(layer, TOKENS[:world])
        batch, expected = all_batches[rank], oracle.arrived(layer, all_batches, rank)
        codes = [each.x.float().to(torch.float8_e4m3fn) for each in all_batches]
        # 300 elements have 3 scales: an int32 holds them, its fourth byte is not kept.
        if element == "fp8":
            scales = [
                torch.rand(len(each.x), 6, generator=torch.Generator().manual_seed(7))[:, ::2] for each in all_batches
            ]
        else:
            scales = [torch.arange(len(each.x), dtype=torch.int32)[:, None] * 77 + 0x010203 for each in all_batches]
        received = communicator.dispatch(codes[rank], batch.topk_idx, scales=scales[rank])
        assert received.scales is not None
        assert torch.equal(
            received.x.view(torch.uint8), oracle.gathered([one.view(torch.uint8) for one in codes], expected)
        )
        assert received.scales.is_contiguous() and received.x.stride() == (304, 1)
        kept = received.scales & 0xFFFFFF if element == "fp8-ue8m0" else received.scales
        assert torch.equal(kept, oracle.gathered(scales, expected))
        back = communicator.combine(received.x.to(torch.bfloat16), received.handle)
        results = [
            oracle.gathered([one.to(torch.bfloat16) for one in codes], oracle.arrived(layer, all_batches, r))
            for r in range(world)
        ]
        assert torch.equal(back.x, oracle.combined(layer, all_batches, rank, results))
        communicator.close()


def test_engine_fp8_rows_come_back_as_bf16(ranks: Any) -> None:
    ranks.run(check_fp8)


def check_recovery(rank: int, world: int) -> None:
    """A rank does not take part, all survivors name it and recover, without it and then with nobody missing."""
    layer, communicator = small(timeout=12.0, low_latency=True)
    x, idx, weights = inputs(layer, rank)
    handle = communicator.dispatch(x, idx, weights).handle
    lost = world - 1
    if rank != lost:
        with pytest.raises(errors.OperationFailed) as failed:
            communicator.dispatch(x, idx, weights)
        assert failed.value.culprit == lost and failed.value.op == 2
        with pytest.raises(errors.Poisoned):
            communicator.dispatch(x, idx, weights)
        communicator.recover([lost])
        assert communicator.mask == [lost]
        with pytest.raises(errors.InvalidArgument, match="generation of the handle"):
            communicator.combine(torch.zeros(handle.rows, layer.hidden).bfloat16(), handle)
        received = communicator.dispatch(x, idx, weights)
        assert lost not in received.source_rank.tolist()
        low = communicator.low_latency_dispatch(x, idx)
        communicator.low_latency_combine(low.x, low.handle, weights)
    else:
        # Somebody recovers without it; it finds out when it wants to go on.
        with pytest.raises((errors.OperationFailed, errors.Excluded)):
            communicator.recover([])
    communicator.close()


def test_failure_survivors_name_the_culprit_and_recover(four: Any) -> None:
    four.run(check_recovery)


def check_death(rank: int, world: int) -> str:
    import os

    layer, communicator = small(timeout=60.0)
    x, idx, weights = inputs(layer, rank)
    communicator.dispatch(x, idx, weights)
    if rank == 2:
        os._exit(3)
    try:
        for _ in range(3):
            communicator.dispatch(x, idx, weights)
    except errors.OperationFailed as failed:
        return f"{failed.culprit}"
    return "nothing"


def test_failure_a_process_that_dies_is_named_at_once(four: Any) -> None:
    """Its own outcome never comes: the pipe breaks."""
    import time

    four.run(check_nothing)
    began = time.monotonic()
    for pipe in four._pipes:
        pipe.send((check_death, ()))
    told = []
    try:
        for rank in (0, 1, 3):
            assert four._pipes[rank].poll(50), "told by the deadline only"
            told.append(four._pipes[rank].recv().value)
    finally:
        # Nobody else has use for those that are left.
        four.stop()
    assert told == ["2", "2", "2"] and time.monotonic() - began < 50


def check_nothing(rank: int, world: int) -> None:
    pass


def check_reduced(rank: int, world: int) -> None:
    """Low latency with weights at dispatch: each rank sums its own experts' results first."""
    layer, communicator = small(low_latency=True)
    x, idx, weights = inputs(layer, rank)
    low = communicator.low_latency_dispatch(x, idx, weights)
    back = communicator.low_latency_combine(low.x, low.handle)
    kept = weights.masked_fill(idx < 0, 0).sum(1, keepdim=True)
    torch.testing.assert_close(back.float(), x.float() * kept, rtol=1e-2, atol=1e-2)
    with pytest.raises(errors.InvalidArgument, match="given twice"):
        communicator.low_latency_combine(low.x, low.handle, weights)
    # Beside throughput mode.
    check_move(communicator, layer, oracle.batches(layer, TOKENS[:world]), rank)
    communicator.close()


def test_low_latency_both_forms(ranks: Any) -> None:
    ranks.run(check_reduced)
