"""What deep_ep.Buffer keeps and frees, and handles: by whom they are held, what becomes of them in torch.compile and along other calls."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from moexpress import errors
from test_dropin import Job, layer_of
from test_recovery import MOST, check_sums, impatient, low_dispatch, make_buffer, much_memory


def check_freed(rank: int, world: int) -> None:
    job = Job(rank, world)
    gc.collect()
    gc.disable()
    try:
        buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26, low_latency_mode=True)
        runtime = buffer.runtime
        check_sums(buffer, job)
        handle = low_dispatch(buffer, job)[2]
        buffer.get_next_low_latency_combine_buffer(handle)
        made = [weakref.ref(one) for one in (*buffer._communicators.all_low(), *buffer._communicators.all_normal())]
        assert len(made) == 2 and runtime.is_available()
        dist.barrier()
        del buffer, handle
        assert not runtime.is_available() and [one() for one in made] == [None, None]
        with pytest.raises(errors.Closed, match="keep it as long as its runtime"):
            runtime.get_num_rdma_ranks()
    finally:
        gc.enable()


def test_a_buffer_that_nobody_has_is_freed_at_once(two: Any) -> None:
    two.run(check_freed)


def mapped() -> int:
    """Bytes of memory that processes share, as windows are, which are mapped here."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    bounds = [line[0].split("-") for line in lines if line[1].endswith("s")]
    return sum(int(end, 16) - int(begin, 16) for begin, end in bounds)


def check_handles_of_gone(rank: int, world: int) -> None:
    """Handles do not keep the memory of a buffer that is gone; results do, and stay as they are."""
    job = Job(rank, world)
    other = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    gc.collect()
    before = mapped()
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26, low_latency_mode=True)
    x, _, weights, _, handle, _ = job.dispatch(buffer)
    received = x.clone()
    low = low_dispatch(buffer, job)[2]
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, 1 << 26, num_max_tokens_per_rank=600, hidden=256)
    given = (job.own.topk_idx, job.own.topk_weights)
    of_v2 = elastic.dispatch(job.own.x, *given, num_experts=job.layer.experts, num_max_tokens_per_rank=600)[3]
    made = [one for of in (buffer, elastic) for one in of._communicators._all()]
    assert len(made) == 3 and mapped() - before > 1 << 27
    dist.barrier()
    del buffer, elastic
    gc.collect()
    for one in made:
        with pytest.raises(errors.Closed):
            one.stats()
    assert torch.equal(x, received)
    del x
    # Ranks that are slower have the memory of this one still.
    dist.barrier()
    assert mapped() - before < 1 << 24
    assert (
        torch.equal(handle[4].sum(0), oracle.members(job.layer, job.own.topk_idx).sum(0))
        and handle[0].shape[0] == world
    )
    assert of_v2.num_unaligned_recv_tokens_per_expert.tolist() == job.arrived.counts
    with pytest.raises(errors.Closed):
        made[-1].throughput.combine(received, of_v2.routing.native, topk_weights=None, bias=None)
    with pytest.raises(errors.InvalidArgument, match="of another buffer"):
        deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True).get_next_low_latency_combine_buffer(low)
    # As along handles of whatever other buffer.
    assert torch.equal(other.combine(received, handle, weights)[0], job.sums)
    other.destroy()


def test_handles_do_not_keep_the_memory_of_a_buffer_that_is_gone(two: Any) -> None:
    two.run(check_handles_of_gone)


def check_destroyed_alone(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    check_sums(buffer, job)
    dist.barrier()
    if rank == 0:
        with impatient(buffer._meeting), pytest.raises(errors.MeetingFailed):
            buffer.destroy()
        assert not buffer.runtime.is_available()
        with pytest.raises(errors.Closed):
            job.dispatch(buffer)
        buffer.destroy()
    dist.barrier()


def test_who_destroys_alone_frees_its_memory(two: Any) -> None:
    two.run(check_destroyed_alone)


def check_destroyed(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer(enable_shrink=True)
    runtime, experts = buffer.runtime, job.layer.experts
    check_sums(buffer, job)
    buffer.destroy()
    assert buffer.runtime is None and not runtime.is_available()
    status = torch.zeros(world, dtype=torch.int32)
    calls = (
        lambda: buffer.get_dispatch_layout(job.own.topk_idx, experts),
        lambda: buffer.clean_low_latency_buffer(MOST, 256, experts),
        lambda: runtime.clean_low_latency_buffer(MOST, 256, experts),
        lambda: buffer.low_latency_query_mask_buffer(status),
        buffer.get_comm_stream,
        runtime.get_comm_stream,
    )
    for call in calls:
        with pytest.raises(errors.Closed, match="the buffer was destroyed"):
            call()


def test_a_destroyed_buffer_says_so(two: Any) -> None:
    two.run(check_destroyed)


@much_memory()
def check_replaced(rank: int, world: int) -> None:
    buffer, layer = make_buffer(), layer_of(world)
    communicators, former = buffer._communicators, None

    batches = {tokens: oracle.batches(layer, [tokens] * world, tokens)[rank] for tokens in (50, 20_000)}

    def dispatch(tokens: int) -> Any:
        own = batches[tokens]
        layout = buffer.get_dispatch_layout(own.topk_idx, layer.experts)
        given = {"topk_idx": own.topk_idx, "topk_weights": own.topk_weights}
        return buffer.dispatch(own.x, None, layout[0], layout[1], layout[3], layout[2], **given)

    seen, kept, tokens = {"rows_placed": 0, "rows_through_rings": 0}, None, 50
    for count in range(40):
        result = dispatch(tokens)
        if count == 4:
            # Larger batches than the arena was made for; one rank keeps a handle of before.
            tokens, kept = 20_000, result if rank == 0 else None
            former = weakref.ref(communicators.all_normal()[0])
            # Rows alone keep nobody waiting.
            rows, came = result[0], result[0].clone()
        if count == 25:
            assert former() is not None and len(communicators._former.all()) == 1
            kept = None
        stats = buffer.stats()
        assert all(stats[name] >= seen[name] for name in seen), (stats, seen)
        seen = {name: stats[name] for name in seen}
        del result
    assert former() is None and communicators._former.all() == [] and kept is None
    assert torch.equal(rows, came)
    buffer.destroy()


def test_an_arena_that_was_replaced_goes_when_no_rank_has_handles_of_it(two: Any) -> None:
    two.run(check_replaced)


@much_memory()
def check_replaced_before(rank: int, world: int) -> None:
    buffer, layer = make_buffer(), layer_of(world)
    results = []
    for tokens in (50, 20_000, 20_000):
        own = oracle.batches(layer, [tokens] * world, tokens)[rank]
        layout = buffer.get_dispatch_layout(own.topk_idx, layer.experts)
        given = {"topk_idx": own.topk_idx, "topk_weights": own.topk_weights}
        results.append(buffer.dispatch(own.x, None, layout[0], layout[1], layout[3], layout[2], **given))
    communicators, rows = buffer._communicators, [result[0].clone() for result in results]
    assert len(communicators._former.all()) == 1
    dist.barrier()
    before = buffer.stats()
    buffer.recover()
    assert communicators._former.all() == communicators._apart == [] and buffer.stats() == before
    for result, row in zip(results, rows, strict=True):
        assert torch.equal(result[0], row)
        with pytest.raises(ValueError, match="handle is of before a recovery"):
            buffer.combine(result[0], result[4])
    buffer.destroy()


def test_arenas_that_were_replaced_go_with_a_recovery(two: Any) -> None:
    two.run(check_replaced_before)


def check_handles_of_others(rank: int, world: int, worst: bool) -> None:
    job, first, second = Job(rank, world), make_buffer(), make_buffer()
    options = {"num_worst_tokens": sum(len(batch.x) for batch in job.all)} if worst else {}
    x, _, weights, _, handle, _ = job.dispatch(first, **options)
    low = low_dispatch(first, job)
    assert torch.equal(first.combine(x, handle)[0], job.sums)
    # Whatever became of the buffer that it is of, and as the backward pass has it: rows first, then weights.
    for step in ("both", "after destroy"):
        if step == "after destroy":
            first.destroy()
        before = second.stats()
        again = second.dispatch(job.own.x, handle)[0]
        assert len(again) == len(x) and torch.equal(again[: len(job.received)], job.received)
        sums, back, _ = second.combine(x, handle, weights)
        assert torch.equal(sums, job.sums)
        assert torch.equal(back, job.own.topk_weights.masked_fill(job.own.topk_idx < 0, 0))
        assert not len(job.received) or second.stats() != before
    assert len(second._communicators.all_normal()) == 1
    calls = [
        lambda: second.low_latency_combine(low[0], job.own.topk_idx, job.own.topk_weights, low[2]),
        lambda: second.get_next_low_latency_combine_buffer(low[2]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="handle is of another buffer, allowed: one of this buffer"):
            call()
    second.destroy()
    calls += [lambda: second.combine(x, handle), lambda: second.dispatch(job.own.x, handle)]
    for call in calls:
        with pytest.raises(errors.Closed, match="the buffer was destroyed"):
            call()


@pytest.mark.parametrize("worst", [False, True], ids=["rows that came", "a worst case"])
def test_handles_of_another_buffer_are_learnt_or_refused(ranks: Any, worst: bool) -> None:
    ranks.run(check_handles_of_others, worst)


def check_sizes(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    own, experts = job.own, job.layer.experts
    for _ in range(3):
        buffer.low_latency_dispatch(own.x, own.topk_idx, torch.tensor(MOST), torch.tensor(experts), use_fp8=False)
    low_dispatch(buffer, job)
    assert len(buffer._communicators.all_low()) == 1
    with pytest.raises(ValueError, match=r"num_experts is a list, allowed: a whole number"):
        buffer.low_latency_dispatch(own.x, own.topk_idx, MOST, [experts], use_fp8=False)
    with pytest.raises(ValueError, match=r"num_max_dispatch_tokens_per_rank is -1, allowed"):
        buffer.low_latency_dispatch(own.x, own.topk_idx, -1, experts, use_fp8=False)
    buffer.destroy()


def test_a_size_may_be_any_whole_number(two: Any) -> None:
    two.run(check_sizes)


def check_choices(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    topk_idx = job.own.topk_idx.clone()
    x, _, handle, _, _ = buffer.low_latency_dispatch(job.own.x, topk_idx, MOST, job.layer.experts, use_fp8=False)
    # The caller's tensor is used for the next batch.
    topk_idx.fill_(-1)
    if len(topk_idx):
        with pytest.raises(ValueError, match="topk_idx differs from that of the dispatch"):
            buffer.low_latency_combine(x, topk_idx, job.own.topk_weights, handle)
    buffer.low_latency_combine(x, job.own.topk_idx, job.own.topk_weights, handle)
    buffer.destroy()


def test_choices_of_a_combine_are_those_that_were_sent(ranks: Any) -> None:
    ranks.run(check_choices)


def check_compiled(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    own = job.own

    def layer(x: torch.Tensor) -> torch.Tensor:
        layout = buffer.get_dispatch_layout(own.topk_idx, job.layer.experts)
        given = {"topk_idx": own.topk_idx, "topk_weights": own.topk_weights}
        rows, *_, handle, _ = buffer.dispatch(x, None, layout[0], layout[1], layout[3], layout[2], **given)
        back = buffer.combine(rows * 1, handle)[0]
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, own.topk_idx, MOST, job.layer.experts, use_fp8=False)
        return back + buffer.low_latency_combine(rows * 1, own.topk_idx, own.topk_weights, handle)[0]

    assert torch.equal(torch.compile(layer, backend="eager")(own.x), layer(own.x))
    handle = job.dispatch(buffer)[4]
    # What callers do with a tuple.
    source, *_ = handle[3:]
    assert len(handle) == 6 and source is handle[3] and isinstance(copy.copy(handle), tuple)
    buffer.destroy()


def test_handles_go_through_torch_compile(two: Any) -> None:
    two.run(check_compiled)


def check_worst(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    worst = 4 * sum(len(batch.x) for batch in job.all)
    handle = job.dispatch(buffer, num_worst_tokens=worst)[4]
    codes = job.own.x.to(torch.float8_e4m3fn)
    scales = torch.ones(len(codes), 2)
    for _ in range(2):
        rows, came = buffer.dispatch((codes, scales), handle)[0]
        assert rows.shape[0] == came.shape[0] == worst == buffer.dispatch(job.own.x, handle)[0].shape[0]
        arrived = len(job.received)
        assert torch.equal(rows[:arrived].float(), job.received.to(torch.float8_e4m3fn).float())
    buffer.destroy()


def test_rows_of_another_type_along_a_handle_of_a_worst_case(ranks: Any) -> None:
    ranks.run(check_worst)
