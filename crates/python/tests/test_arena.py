"""Where the rows of deep_ep.Buffer lie: how large an arena is made, when it grows, what happens when it is full."""

from __future__ import annotations

import logging
from typing import Any

import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep import _arena, _communicators
from moexpress import errors

MIB = 1 << 20
HIDDEN = 7168
MUCH = 1 << 40
"""Free memory, said to be there whatever this machine has."""


class Log(logging.Handler):
    """What was said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> Log:
        _arena.LOG.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _arena.LOG.removeHandler(self)


def dispatch(buffer: deep_ep.Buffer, tokens: int, rank: int, world: int, **options: Any) -> Any:
    """Every token goes to every rank, its rows filled with its rank's number. Each rank receives ``tokens`` from each."""
    experts = 2 * world
    x = torch.full((tokens, HIDDEN), rank + 1.0, dtype=torch.bfloat16)
    topk_idx = (2 * torch.arange(world)).repeat(tokens, 1)
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    given = (layout[0], None, layout[3], layout[2], topk_idx, torch.ones(tokens, world))
    return buffer.dispatch(x, None, *given, **options)


def check_rows(x: torch.Tensor, tokens: int, world: int) -> None:
    expected = torch.arange(1, world + 1).repeat_interleave(tokens).bfloat16()
    assert torch.equal(x[: world * tokens, 0], expected) and torch.equal(x[: world * tokens, -1], expected)


def limit_memory(free: int) -> None:
    """Says that a rank has so much free memory."""
    _arena.free_bytes = lambda device, ranks: free


def check_layers(rank: int, world: int) -> None:
    """Megatron's hint, and results of 60 layers that are kept."""
    limit_memory(MUCH)
    hint = deep_ep.Config(24, 24, 256).get_nvl_buffer_size_hint(2 * HIDDEN, world)
    buffer = deep_ep.Buffer(dist.group.WORLD, hint, explicitly_destroy=True)
    tokens = 512 // world
    with Log() as log:
        kept = [dispatch(buffer, tokens, rank, world) for _ in range(60)]
        assert not log.said
    for x, *_ in kept:
        check_rows(x, tokens, world)
    stats = buffer.stats()
    assert stats["rows_placed"] == 60 * tokens * world and stats["rows_through_rings"] == 0
    # Most of them have no room there.
    assert max(64 * MIB, hint) <= stats["arena_bytes"] < 60 * tokens * world * 2 * HIDDEN / 2
    # On the way back each layer's rows go once more along its handle, and nothing of it is kept.
    while kept:
        x, *_, handle, _ = kept.pop()
        y = buffer.combine(x, handle)[0]
        assert bool((y == world * (rank + 1)).all())
        check_rows(buffer.dispatch(y, handle=handle)[0] / world, tokens, world)
    stats = buffer.stats()
    assert stats["rows_placed"] == 120 * tokens * world and stats["rows_through_rings"] == 0
    assert stats["results_pulled"] + stats["results_through_rings"] == 60 * tokens * world
    buffer.destroy()


def test_sixty_layers_whose_results_are_kept_never_go_through_rings(ranks: Any) -> None:
    ranks.run(check_layers)


def check_steps(rank: int, world: int) -> None:
    """Results of 20 layers that are kept in each step: after some steps all of them have room."""
    limit_memory(MUCH)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    tokens = 512 // world
    copies = []
    for _ in range(5):
        kept = [dispatch(buffer, tokens, rank, world)[0] for _ in range(20)]
        for x in kept:
            check_rows(x, tokens, world)
        (arena,) = buffer._communicators._normal.values()
        copies.append(len(arena._copies.numbers))
        del kept, x
    assert copies[0] > 0 and copies[-1] == 0, copies
    assert 20 * tokens * world * 2 * HIDDEN < buffer.stats()["arena_bytes"] < 2 * 20 * tokens * world * 2 * HIDDEN
    limit_memory(8 * 64 * MIB)
    small = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    kept = [dispatch(small, tokens, rank, world)[0] for _ in range(20)]
    assert small.stats()["arena_bytes"] == 64 * MIB and len(kept) == 20
    limit_memory(MUCH)
    buffer.destroy()
    small.destroy()


def test_an_arena_grows_for_what_is_kept_step_by_step(two: Any) -> None:
    two.run(check_steps)


def check_asynchronous(rank: int, world: int) -> None:
    """Copies keep both parts of FP8 rows, also where the caller waits for himself."""
    limit_memory(MUCH)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    tokens, experts = 4096 // world, 2 * world
    codes = torch.full((tokens, HIDDEN), rank + 1.0).to(torch.float8_e4m3fn)
    scales = torch.full((tokens, HIDDEN // 128), rank + 10.0)
    topk_idx = (2 * torch.arange(world)).repeat(tokens, 1)
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    given = (layout[0], None, layout[3], layout[2], topk_idx, torch.ones(tokens, world))
    kept = []
    for _ in range(5):
        (x, s), *_, event = buffer.dispatch((codes, scales), None, *given, async_finish=True)
        event.current_stream_wait()
        kept.append((x, s))
    expected = torch.arange(world).repeat_interleave(tokens)
    for x, s in kept:
        assert x.is_contiguous() and s.is_contiguous()
        assert torch.equal(x[:, 3].float(), expected + 1.0) and torch.equal(s[:, 1], expected + 10.0)
    assert buffer.stats()["rows_through_rings"] == 0
    buffer.destroy()


def test_copied_fp8_rows_keep_their_scales(two: Any) -> None:
    two.run(check_asynchronous)


def check_trimmed(rank: int, world: int) -> None:
    """Nothing comes and goes on CPUs."""
    limit_memory(MUCH)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    tokens = 512 // world
    kept = dispatch(buffer, tokens, rank, world)[0]
    before = buffer.stats()["arena_bytes"]
    buffer.trim()
    assert buffer.stats()["arena_bytes"] == before >= 64 * MIB
    check_rows(kept, tokens, world)
    check_rows(dispatch(buffer, tokens, rank, world)[0], tokens, world)
    assert buffer.stats()["rows_through_rings"] == 0
    buffer.destroy()


def test_trim_leaves_an_arena_that_does_not_grow_as_it_is(two: Any) -> None:
    two.run(check_trimmed)


def check_growth(rank: int, world: int) -> None:
    limit_memory(MUCH)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    few = dispatch(buffer, 3, rank, world)
    small = buffer.stats()["arena_bytes"]
    assert 64 * MIB <= small < 65 * MIB
    tokens = 8192 // world
    with Log() as log:
        # The first that is larger than all before it does not fit; the arena is larger from then on.
        first = dispatch(buffer, tokens, rank, world)
        assert (
            len(log.said) == 1 and f"{tokens * world} dispatched rows of 7168 elements were not placed" in log.said[0]
        )
        assert "the arena of 64 MiB" in log.said[0] and "larger num_nvl_bytes" in log.said[0]
        second = dispatch(buffer, tokens, rank, world)
        assert len(log.said) == 1
    stats = buffer.stats()
    assert stats["arena_bytes"] > 5 * 8192 * 2 * HIDDEN and stats["rows_through_rings"] == tokens * world
    # What was made before still goes along its own handle, where both are kept.
    for (x, *_, handle, _), count in [(few, 3), (first, tokens), (second, tokens)]:
        check_rows(x, count, world)
        assert bool((buffer.combine(x, handle)[0] == world * (rank + 1)).all())
    largest = stats["arena_bytes"]
    dispatch(buffer, 3, rank, world)
    dispatch(buffer, tokens, rank, world)
    assert buffer.stats()["arena_bytes"] == largest
    buffer.destroy()


def test_an_arena_grows_with_the_largest_batch(two: Any) -> None:
    two.run(check_growth)


def check_shortage(rank: int, world: int) -> None:
    """An arena takes an eighth of what the rank with least memory has, and says what is the matter."""
    limit_memory(8 * (70 + rank) * MIB)
    try:
        buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
        tokens = 8192 // world
        with Log() as log:
            for _ in range(3):
                x = dispatch(buffer, tokens, rank, world)[0]
                check_rows(x, tokens, world)
        assert buffer.stats()["arena_bytes"] == 70 * MIB
        assert len(log.said) == 1 and "an 8th of the memory that was free" in log.said[0]
        buffer.destroy()
        # What the caller asks for he gets, up to 1 GiB, or more where there is more.
        for hint, free, given in [(100 * MIB, 0, 100), (5000 * MIB, 0, 1024), (5000 * MIB, 8 * 2000 * MIB, 2000)]:
            limit_memory(free)
            buffer = deep_ep.Buffer(dist.group.WORLD, hint, explicitly_destroy=True)
            dispatch(buffer, 1, rank, world)
            assert buffer.stats()["arena_bytes"] == given * MIB
            buffer.destroy()
    finally:
        limit_memory(MUCH)


def test_an_arena_leaves_memory_to_the_model(two: Any) -> None:
    two.run(check_shortage)


def check_hint(rank: int, world: int) -> None:
    """What the caller asks for he gets once, whatever rows go by: later arenas have what is left of it, or what their batches need of it."""
    limit_memory(0)
    try:
        buffer = deep_ep.Buffer(dist.group.WORLD, 400 * MIB, explicitly_destroy=True)
        told, experts = [], 2 * world

        def send(tokens: int, hidden: int, choices: bool = True, coded: bool = False) -> None:
            x = torch.full((tokens, hidden), rank + 1.0, dtype=torch.bfloat16)
            topk_idx = (2 * torch.arange(world)).repeat(tokens, 1)
            layout = buffer.get_dispatch_layout(topk_idx, experts)
            given = (topk_idx, torch.ones(tokens, world)) if choices else ()
            rows = (x.to(torch.float8_e4m3fn), torch.ones(tokens, hidden // 128)) if coded else x
            buffer.dispatch(rows, None, layout[0], layout[1], layout[3], layout[2], *given)
            told.append(buffer.stats()["arena_bytes"] // MIB)

        send(1, HIDDEN)
        send(1, HIDDEN, coded=True)
        send(1, HIDDEN, choices=False)
        assert told == [400, 464, 528]
        # A batch that needs some 180 MiB.
        send(6000 // world, HIDDEN // 2, coded=True)
        assert 150 < told[-1] - told[-2] < 300 and buffer.stats()["rows_through_rings"] == 0
        # It is taken by now, and by more than was asked for.
        send(1, HIDDEN // 4)
        assert told[-1] - told[-2] == 64
        buffer.destroy()
    finally:
        limit_memory(MUCH)


def test_what_is_asked_for_is_taken_once(two: Any) -> None:
    two.run(check_hint)


def check_outboxes(rank: int, world: int) -> None:
    """What GPUs do where memory is short, here on CPUs: no arena, and results are the caller's as long as he wants."""
    limit_memory(8 * 70 * MIB)
    decides, _arena.has_outboxes = _arena.has_outboxes, lambda device, room, nodes: room.is_all
    try:
        buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
        tokens = 8192 // world
        with Log() as log:
            kept = [dispatch(buffer, tokens, rank, world) for _ in range(4)]
            for x, *_, handle, _ in kept:
                check_rows(x, tokens, world)
                y = buffer.combine(x, handle)[0]
                assert bool((y == world * (rank + 1)).all())
                check_rows(buffer.dispatch(y, handle=handle)[0] / world, tokens, world)
        assert len(log.said) == 1 and "go through outboxes of" in log.said[0]
        stats = buffer.stats()
        assert stats["arena_bytes"] == 0 and stats["rows_placed"] == 0
        assert stats["rows_through_rings"] == 8 * tokens * world
        (arena,) = buffer._communicators._normal.values()
        slots, used = arena.communicator.outbox_slots, arena.communicator.stats
        # A Config's sizes hold for its call alone.
        for made, piece, held in [
            (deep_ep.Config(20, 6 + rank, 40 + rank), 8, 40 + rank),
            (deep_ep.Config(20, 24, 256), min(24, slots // 8), slots),
            (None, 8, slots),
        ]:
            x, *_, handle, _ = dispatch(buffer, tokens, rank, world, config=made)
            readers = world - 1
            assert (used()["outbox_piece"], used()["outbox_slots"]) == (piece, held * readers), (made, slots)
            y = buffer.combine(x, handle, config=made)[0]
            assert (used()["outbox_piece"], used()["outbox_slots"]) == (piece, held), (made, slots)
            check_rows(buffer.dispatch(y, handle=handle, config=made)[0] / world, tokens, world)
            assert (used()["outbox_piece"], used()["outbox_slots"]) == (piece, held * readers), (made, slots)
        buffer.destroy()
        # So it is where memory has become short since the first batch, which was small.
        limit_memory(8 * 64 * MIB)
        buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
        few = dispatch(buffer, 3, rank, world)
        assert buffer.stats()["arena_bytes"] >= 64 * MIB
        with Log() as log:
            for _ in range(2):
                check_rows(dispatch(buffer, tokens, rank, world)[0], tokens, world)
        assert buffer.stats()["arena_bytes"] == 0 and any("go through outboxes of" in said for said in log.said)
        assert bool((buffer.combine(few[0], few[4])[0] == world * (rank + 1)).all())
        buffer.destroy()
    finally:
        limit_memory(MUCH)
        _arena.has_outboxes = decides


def test_where_memory_is_short_rows_go_through_outboxes(two: Any) -> None:
    two.run(check_outboxes)


def check_failed_growth(rank: int, world: int, error: type[errors.Error]) -> None:
    """One rank has no memory for a larger arena: all go on with what they have."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    dispatch(buffer, 3, rank, world)
    make = _communicators.Communicator

    def fails(*arguments: Any, **settings: Any) -> Any:
        made = make(*arguments, **settings)
        if rank == 1:
            made.close()
            raise error("no memory")
        return made

    _communicators.Communicator = fails  # type: ignore[assignment, misc]
    try:
        for _ in range(2):
            check_rows(dispatch(buffer, 8192 // world, rank, world)[0], 8192 // world, world)
    finally:
        _communicators.Communicator = make  # type: ignore[misc]
    assert buffer.stats()["arena_bytes"] < 65 * MIB
    buffer.destroy()


@pytest.mark.parametrize("error", [errors.Broken, errors.InvalidArgument])
def test_a_growth_that_fails_on_one_rank_is_none_on_all(two: Any, error: type[errors.Error]) -> None:
    two.run(check_failed_growth, error)


def check_worst(rank: int, world: int, before: int) -> None:
    """Room for the worst case is room that is made, also where calls without one came before."""
    limit_memory(MUCH)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    for _ in range(before):
        check_rows(dispatch(buffer, 5, rank, world)[0], 5, world)
    for _ in range(3):
        x = dispatch(buffer, 5, rank, world, num_worst_tokens=6000)[0]
        check_rows(x, 5, world)
    stats = buffer.stats()
    assert stats["rows_placed"] >= 3 * 6000 and stats["rows_through_rings"] == 0
    buffer.destroy()


@pytest.mark.parametrize("before", [0, 2])
def test_the_worst_case_has_room(two: Any, before: int) -> None:
    two.run(check_worst, before)


def check_uneven(rank: int, world: int) -> None:
    """All tokens go to rank 1: its rows count, on all ranks."""
    limit_memory(MUCH)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    layer = oracle.Layer(world, 2 * world, 1, HIDDEN)
    for tokens in (500, 1500):
        x = torch.full((tokens, HIDDEN), 1.0, dtype=torch.bfloat16)
        topk_idx = torch.full((tokens, 1), 2)
        layout = buffer.get_dispatch_layout(topk_idx, layer.experts)
        given = (layout[0], None, layout[3], layout[2], topk_idx, torch.ones(tokens, 1))
        for _ in range(2):
            buffer.dispatch(x, None, *given)
    dist.barrier()
    told: list[Any] = [None] * world
    dist.all_gather_object(told, buffer.stats()["arena_bytes"])
    assert len(set(told)) == 1 and told[0] > 5 * 1500 * world * 2 * HIDDEN
    buffer.destroy()


def test_an_arena_is_made_for_the_rank_that_receives_most(two: Any) -> None:
    two.run(check_uneven)


def check_other_calls(rank: int, world: int) -> str:
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, low_latency_mode=True)
    x, topk_idx = torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    layout = buffer.get_dispatch_layout(topk_idx, world)
    with pytest.raises(errors.MeetingFailed) as raised:
        if rank == 0:
            buffer.dispatch(x, None, layout[0], None, layout[3], layout[2], topk_idx, torch.ones(2, 1))
        else:
            buffer.low_latency_dispatch(x, topk_idx, 4, world, use_fp8=False)
    return str(raised.value)


def test_ranks_that_make_different_first_calls_are_told(two: Any) -> None:
    for told in two.run(check_other_calls):
        assert "the ranks make different calls" in told


def test_what_two_threads_forget_at_a_time_is_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stand-ins for weak references: negative ones are of storages that are gone.
    freed: list[int] = []
    kept, others = _arena.Kept(), iter([1])
    kept.numbers.extend((number, 10) for number in (-1, -2, 3, -4))
    kept.bytes = 40

    def expired(number: int) -> bool:
        # As if another thread, or a signal handler, had its turn here.
        for _ in others:
            kept.sweep()
            kept.numbers.append((5, 10))
            kept.bytes += 10
        return number < 0

    monkeypatch.setattr(_arena, "_expired", expired)
    monkeypatch.setattr(_arena, "_free", freed.append)
    kept.sweep()
    assert sorted(freed) == [-4, -2, -1]
    assert sorted(kept.numbers) == [(3, 10), (5, 10)] and kept.bytes == 20
    kept = _arena.Kept()
    assert sorted(freed) == [-4, -2, -1, 3, 5]


def test_what_is_free_is_found_out() -> None:
    assert 1 << 20 < _arena.free_bytes(torch.device("cpu"), 1) < 1 << 45
    assert _arena.free_bytes(torch.device("cpu"), 1 << 20) < 1 << 25
