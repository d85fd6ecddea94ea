"""deep_ep as its callers use it: events without content, handles put together again, other index types, what frameworks ask for."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import deep_ep
import deep_ep_cpp
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep.utils import EventHandle, EventOverlap
from moexpress import errors
from packaging.version import Version

TOKENS = [37, 0, 64, 5]


def make_buffer(**options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, 1 << 26, 1 << 20, explicitly_destroy=True, **options)


def layer_of(world: int) -> oracle.Layer:
    return oracle.Layer(world=world, experts=8, topk=4, hidden=256)


class Job:
    """A batch of a rank, and what must become of it."""

    def __init__(self, rank: int, world: int, seed: int = 0) -> None:
        self.layer = layer_of(world)
        self.all = oracle.batches(self.layer, TOKENS[:world], seed)
        self.own, self.arrived = self.all[rank], oracle.arrived(self.layer, self.all, rank)
        results = [
            oracle.gathered([each.x for each in self.all], oracle.arrived(self.layer, self.all, r))
            for r in range(world)
        ]
        self.received, self.sums = results[rank], oracle.combined(self.layer, self.all, rank, results)

    def dispatch(self, buffer: deep_ep.Buffer, **options: Any) -> Any:
        batch, experts = self.own, self.layer.experts
        layout = buffer.get_dispatch_layout(batch.topk_idx, experts)
        arguments = {"topk_idx": batch.topk_idx, "topk_weights": batch.topk_weights, **options}
        return buffer.dispatch(batch.x, None, layout[0], layout[1], layout[3], layout[2], **arguments)


def check_events(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    batch = job.own
    # As Megatron-Core and SGLang call it when nothing is asynchronous.
    event = buffer.get_dispatch_layout(batch.topk_idx, job.layer.experts, EventOverlap())[4]
    assert event.event is None
    x, _, weights, _, handle, later = job.dispatch(buffer, previous_event=event)
    assert torch.equal(x, job.received)
    again = buffer.dispatch(batch.x, handle=handle, previous_event=later)[0]
    assert torch.equal(buffer.combine(again, handle, weights, previous_event=later)[0], job.sums)
    # Bare, and asynchronous behind nothing.
    assert torch.equal(job.dispatch(buffer, previous_event=EventHandle())[0], x)
    asked = {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}
    x, *_, later = job.dispatch(buffer, **asked)
    later.current_stream_wait()
    assert torch.equal(x, job.received)
    buffer.destroy()


def test_an_event_without_content_is_none(ranks: Any) -> None:
    ranks.run(check_events)


class SavedHandle(torch.autograd.Function):
    """A handle on its way through autograd: nothing but tensors comes out again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handle: Any, into: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(*handle)
        ctx.into = into
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.into.append(ctx.saved_tensors)
        return gradients[0], None, None


def through_autograd(handle: Any) -> Any:
    x, into = torch.ones(1, requires_grad=True), []
    y = SavedHandle.apply(x, handle, into)
    del handle
    gc.collect()
    y.backward()
    return into[0]


def through_hooks(handle: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return through_autograd(handle)


def through_torch_save(handle: Any) -> Any:
    file = io.BytesIO()
    torch.save(list(handle), file)
    file.seek(0)
    return torch.load(file)


WAYS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "slice": lambda handle: handle[:],
    "unpacked": lambda handle: (lambda a, b, c, d, e, f: [a, b, c, d, e, f])(*handle),
    "detached": lambda handle: [one.detach() for one in handle],
    "views": lambda handle: [one.view(-1).view(one.shape) for one in handle],
    "saved for backward": through_autograd,
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "cloned": lambda handle: [one.clone() for one in handle],
    "offloaded": through_hooks,
    "pickled": lambda handle: pickle.loads(pickle.dumps(handle)),
    "saved and loaded": through_torch_save,
}
COPIES = ["copied deeply", "cloned", "offloaded", "pickled", "saved and loaded"]


def check_handles(rank: int, world: int, way: str) -> None:
    buffer = make_buffer()
    jobs = [Job(rank, world, seed) for seed in range(3)]
    # Several at a time, so that one taken for another shows.
    dispatched = [job.dispatch(buffer) for job in jobs]
    weights = [one[2] for one in dispatched]
    handles = [WAYS[way](one[4]) for one in dispatched]
    assert not any(isinstance(handle, type(dispatched[0][4])) for handle in handles)
    del dispatched
    gc.collect()
    operations = buffer._communicators.all_normal()[0].stats()["operations"]
    for job, handle, weight in reversed(list(zip(jobs, handles, weights, strict=True))):
        sums, summed, _ = buffer.combine(job.received, handle, weight)
        assert torch.equal(sums, job.sums)
        assert torch.equal(summed, job.own.topk_weights * (job.own.topk_idx >= 0))
        assert torch.equal(buffer.dispatch(job.own.x, handle=handle)[0], job.received)
        codes = job.own.x.float().to(torch.float8_e4m3fn)
        scales = torch.ones(len(codes), 2)
        assert torch.equal(
            buffer.dispatch((codes, scales), handle=handle)[0][0].view(torch.uint8).sum(),
            sum(
                each.x.float()
                .to(torch.float8_e4m3fn)
                .view(torch.uint8)[job.arrived.source_token[job.arrived.source_rank == r].long()]
                .sum()
                for r, each in enumerate(job.all)
            ),
        )
    # A combine and a dispatch of bf16 for each, and where the handle was copied one dispatch that learns it.
    done = buffer._communicators.all_normal()[0].stats()["operations"] - operations
    assert done == 3 * (3 if way in COPIES else 2)
    # What is beneath goes with the tensors.
    known = buffer._throughput._known
    del handles, handle
    gc.collect()
    assert all(storage.expired() for storage, _ in known._of.values())
    buffer.destroy()


@pytest.mark.parametrize("way", WAYS)
def test_a_handle_is_what_its_tensors_say(ranks: Any, way: str) -> None:
    ranks.run(check_handles, way)


def check_many_handles(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    kept = [tuple(job.dispatch(buffer)[4]) for _ in range(3)]
    for _ in range(300):
        tuple(job.dispatch(buffer)[4])
    assert len(buffer._throughput._known._of) < 100
    for handle in kept:
        assert torch.equal(buffer.combine(job.received, handle)[0], job.sums)
    buffer.destroy()


def test_handles_that_are_gone_are_forgotten(two: Any) -> None:
    two.run(check_many_handles)


def check_low_handles(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer(low_latency_mode=True)
    batch = job.own
    expected = batch.x.float() * batch.topk_weights.masked_fill(batch.topk_idx < 0, 0).sum(1, keepdim=True)
    for rebuilt in (
        list,
        tuple,
        copy.copy,
        lambda handle: [None, *handle[1:]],
        lambda handle: [handle[0], *handle[1:]],
    ):
        sent = buffer.low_latency_dispatch(batch.x, batch.topk_idx, 64, job.layer.experts, use_fp8=False)
        x, handle = sent[0], rebuilt(sent[2])
        del sent
        gc.collect()
        # Logarithms are accepted, and results travel as they are.
        sums = buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle, use_logfmt=True)[0]
        torch.testing.assert_close(sums.float(), expected, rtol=1e-2, atol=1e-2)
    # One that is still to be received; and nothing is kept for handles that are gone.
    *_, handle, _, hook = buffer.low_latency_dispatch(
        batch.x, batch.topk_idx, 64, job.layer.experts, use_fp8=False, return_recv_hook=True
    )
    handle = list(handle)
    with pytest.raises(ValueError, match="has not been received"):
        buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle)
    hook()
    sums = buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle)[0]
    torch.testing.assert_close(sums.float(), expected, rtol=1e-2, atol=1e-2)
    del handle, hook
    gc.collect()
    assert all(storage.expired() for storage, _ in buffer._low_latency._known._of.values())
    buffer.destroy()


def test_low_latency_handles_may_be_put_together_again(ranks: Any) -> None:
    ranks.run(check_low_handles)


def check_int32(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer(low_latency_mode=True)
    batch, experts = job.own, job.layer.experts
    short = batch.topk_idx.int()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(short, experts)
    wide = buffer.get_dispatch_layout(batch.topk_idx, experts)
    assert torch.equal(per_rank, wide[0]) and torch.equal(per_expert, wide[2]) and torch.equal(in_rank, wide[3])
    x, idx, _, _, handle, _ = job.dispatch(buffer, topk_idx=short)
    assert idx.dtype == torch.int32 and torch.equal(idx, job.arrived.topk_idx.int())
    assert torch.equal(buffer.combine(x, handle)[0], job.sums)
    assert job.dispatch(buffer)[1].dtype == torch.int64
    x, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, short, 64, experts, use_fp8=False)
    sums = buffer.low_latency_combine(x, short, batch.topk_weights, handle)[0]
    assert torch.equal(sums, buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle)[0])
    for given in (short.short(), short.float()):
        with pytest.raises(ValueError, match=r"allowed: torch.int64 \(deep_ep.topk_idx_t\) or torch.int32"):
            buffer.get_dispatch_layout(given, experts)
    buffer.destroy()


def test_choices_may_be_int32(ranks: Any) -> None:
    ranks.run(check_int32)


def check_worst(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer()
    batch = oracle.batches(layer, TOKENS[:world])[rank]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    given = (per_rank, None, in_rank, per_expert, batch.topk_idx, batch.topk_weights)
    for worst in (1 << 62, -1, "many"):
        with pytest.raises(errors.InvalidArgument, match=f"num_worst_tokens is .*allowed: .*0 to {world << 20}"):
            buffer.dispatch(batch.x, None, *given, num_worst_tokens=worst)
    buffer.destroy()


def test_a_bound_beyond_all_limits_is_refused(ranks: Any) -> None:
    ranks.run(check_worst)


def check_repeats(rank: int, world: int) -> None:
    """What DeepEP does: a row goes once to a rank, carries all choices as they are, and each of them counts."""
    layer, buffer = layer_of(world), make_buffer()
    all_batches = oracle.batches(layer, TOKENS[:world], drop=0)
    for each in all_batches:
        each.topk_idx[:, 2] = each.topk_idx[:, 0]
        each.topk_idx[::3, 1] = each.topk_idx[::3, 0]
    batch, expected = all_batches[rank], oracle.arrived(layer, all_batches, rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    assert torch.equal(in_rank, oracle.members(layer, batch.topk_idx))
    counts = torch.stack([(batch.topk_idx == expert).sum() for expert in range(layer.experts)]).int()
    assert torch.equal(per_expert, counts)
    given = (per_rank, None, in_rank, per_expert, batch.topk_idx, batch.topk_weights)
    for worst in (0, 4 * sum(TOKENS)):
        x, idx, weights, counts, handle, _ = buffer.dispatch(batch.x, None, *given, num_worst_tokens=worst)
        rows = len(expected.topk_idx)
        assert torch.equal(idx[:rows], expected.topk_idx) and torch.equal(weights[:rows], expected.topk_weights)
        mine = range(rank * layer.local, (rank + 1) * layer.local)
        named = [sum(int((each.topk_idx == expert).sum()) for each in all_batches) for expert in mine]
        assert counts == ([] if worst else named)
    assert torch.equal(buffer.combine(x, handle, weights)[1], batch.topk_weights)
    buffer.destroy()


def test_a_token_may_name_an_expert_twice(ranks: Any) -> None:
    ranks.run(check_repeats)


def low_latency_repeats(rank: int, world: int, where: torch.device) -> None:
    """An expert gets a row once however often a token names it, and its result counts with each weight."""
    layer = layer_of(world)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, low_latency_mode=True, explicitly_destroy=True)
    batch = oracle.batches(layer, TOKENS[:world], drop=0)[rank]
    x, weights = batch.x.to(where), batch.topk_weights.to(where)
    twice, most = batch.topk_idx.clone(), max(TOKENS)
    twice[:, 2] = twice[:, 0]
    twice[::3, 1] = twice[::3, 0]
    twice = twice.to(where)
    received, counts, handle, _, _ = buffer.low_latency_dispatch(x, twice, most, layer.experts, use_fp8=False)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, twice.cpu())
    mine = range(rank * layer.local, (rank + 1) * layer.local)
    named = [sum(int((each == expert).any(dim=1).sum()) for each in gathered) for expert in mine]
    assert counts.tolist() == named
    factors = torch.tensor([2.0 ** (expert % 3) for expert in range(layer.experts)], device=where)
    results = (received.float() * factors[mine.start : mine.stop, None, None]).bfloat16()
    for hook in (False, True):
        if hook:
            _, _, handle, _, receive = buffer.low_latency_dispatch(
                x, twice, most, layer.experts, use_fp8=False, return_recv_hook=True
            )
            receive()
        sums = buffer.low_latency_combine(results, twice, weights, handle)[0]
        share = (weights * factors[twice]).sum(dim=1, keepdim=True)
        torch.testing.assert_close(sums.float(), x.float() * share, rtol=1e-2, atol=1e-2)
    buffer.destroy()


def check_low_latency_repeats(rank: int, world: int) -> None:
    low_latency_repeats(rank, world, torch.device("cpu"))


def test_in_low_latency_a_token_may_name_an_expert_twice(ranks: Any) -> None:
    ranks.run(check_low_latency_repeats)


def check_local_memory(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    whole = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
    assert whole.shape == (1 << 20,) and buffer.runtime.get_local_buffer_tensor(torch.int32).shape == (1 << 24,)
    whole.fill_(rank + 1)
    part = buffer.get_local_buffer_tensor(torch.int16, torch.Size([3, 5]), offset=4, use_rdma_buffer=True)
    assert part.shape == (3, 5) and part.data_ptr() == whole.data_ptr() + 4
    assert bool((part == 257 * (rank + 1)).all())
    # It is the caller's: calls leave it alone.
    x, *_, handle, _ = job.dispatch(buffer)
    assert torch.equal(buffer.combine(x, handle)[0], job.sums)
    assert bool((whole == rank + 1).all())
    for given, told in [
        ({"offset": 3}, "offset is 3, allowed: multiples of 2, 0 to num_rdma_bytes, 1048576"),
        ({"offset": 2 << 20}, "offset is 2097152, allowed"),
        ({"size": torch.Size([1 << 20])}, r"size is \[1048576\], allowed: at most 524288 elements"),
    ]:
        with pytest.raises(ValueError, match=told):
            buffer.get_local_buffer_tensor(torch.int16, use_rdma_buffer=True, **given)
    buffer.destroy()
    with pytest.raises(errors.Closed):
        buffer.get_local_buffer_tensor(torch.uint8)


def test_memory_for_the_callers_own_use(two: Any) -> None:
    two.run(check_local_memory)


def check_runtime(rank: int, world: int) -> None:
    buffer = make_buffer(low_latency_mode=True, enable_shrink=True)
    runtime = buffer.runtime
    assert runtime.is_available()
    assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank(), runtime.get_local_device_id()) == (1, 0, 0)
    assert (runtime.get_root_rdma_rank(True), runtime.get_root_rdma_rank(False)) == (rank, 0)
    runtime.clean_low_latency_buffer(64, 256, 8)
    status = torch.full((world,), 7, dtype=torch.int32)
    runtime.low_latency_update_mask_buffer(1 - rank, True)
    runtime.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(other != rank) for other in range(world)]
    dist.barrier()
    runtime.low_latency_clean_mask_buffer()
    runtime.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * world
    Job(rank, world).dispatch(buffer)
    with pytest.raises(NotImplementedError, match="CPUs"):
        runtime.get_comm_stream()
    runtime.destroy()
    assert not runtime.is_available()


def test_what_callers_ask_the_runtime(two: Any) -> None:
    two.run(check_runtime)


def check_recovery(rank: int, world: int) -> None:
    os.environ["MOEXPRESS_TIMEOUT"] = "10"
    try:
        buffer = make_buffer(low_latency_mode=True)
    finally:
        os.environ["MOEXPRESS_TIMEOUT"] = "20"
    job = Job(rank, world)
    before = job.dispatch(buffer)[4]
    batch = job.own
    low = lambda **options: buffer.low_latency_dispatch(batch.x, batch.topk_idx, 64, 8, use_fp8=False, **options)  # noqa: E731
    low()
    # One rank makes a mistake, so the others wait in vain.
    if rank == 1:
        with pytest.raises(ValueError, match="dtype of y"):
            buffer.combine(job.received.float(), before)
    else:
        with pytest.raises(errors.OperationFailed):
            buffer.combine(job.received, before)
        with pytest.raises(errors.Poisoned, match="call recover"):
            buffer.combine(job.received, before)
    low(return_recv_hook=True)
    dist.barrier()
    with pytest.raises(ValueError, match=f"mask is {world}, allowed: 0 to {world - 1}"):
        buffer.recover([world])
    buffer.recover()
    with pytest.raises(ValueError, match="handle"):
        buffer.combine(job.received, before)
    dist.barrier()
    x, *_, handle, _ = job.dispatch(buffer)
    assert torch.equal(buffer.combine(x, handle)[0], job.sums)
    low()
    low()[4]
    # The same for low latency alone.
    dist.barrier()
    buffer.rejoin()
    low()
    assert torch.equal(buffer.combine(x, handle)[0], job.sums)
    buffer.destroy()


def test_a_buffer_goes_on_after_a_failure(ranks: Any) -> None:
    ranks.run(check_recovery)


def test_deep_ep_cpp_has_what_callers_import() -> None:
    assert deep_ep_cpp.Config is deep_ep.Config and deep_ep_cpp.EventHandle is EventHandle
    assert deep_ep_cpp.topk_idx_t is torch.int64 and deep_ep_cpp.is_sm90_compiled()
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert deep_ep_cpp.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == hint
    # As xtuner makes events.
    EventOverlap(deep_ep_cpp.EventHandle()).current_stream_wait()


def test_the_version_of_deep_ep_is_told_and_goes_with_the_wheel() -> None:
    told = importlib.metadata.version("deep_ep")
    assert told == importlib.metadata.version("deep-ep") == deep_ep.__version__
    assert Version("1.2.1") <= Version(told) < Version("2")
    # Removed with the wheel that brought it, and by nobody else.
    files = importlib.metadata.files("moexpress") or []
    assert any(file.match("deep_ep-*.dist-info/METADATA") for file in files)
    assert not importlib.metadata.distribution("deep_ep").read_text("RECORD")


def check_lost_membership(rank: int, world: int) -> None:
    buffer, job = make_buffer(), Job(rank, world)
    handle = job.dispatch(buffer)[4]
    handle[4].untyped_storage().resize_(0)
    x = job.own.x
    codes = x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], x.shape[1] // 128)
    with pytest.raises(errors.InvalidArgument, match="storage of is_token_in_rank of the handle is 0 bytes"):
        buffer.dispatch(codes, handle=handle)
    buffer.destroy()


def test_a_membership_whose_memory_is_gone_is_not_read(one: Any) -> None:
    one.run(check_lost_membership)


def check_changed_membership(rank: int, world: int) -> None:
    """Rank 0 takes a token out of its membership after the dispatch. What is learnt from it would be another routing, and all ranks hear so."""
    buffer, other, job = make_buffer(), make_buffer(), Job(rank, world)
    x = job.own.x
    codes = x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], x.shape[1] // 128)
    told = "is_token_in_rank of the handle brings other rows than its dispatch did"
    for change in (True, False):
        received, *_, handle, _ = job.dispatch(buffer)
        copied = [one.clone() for one in handle]
        if rank == 0 and change:
            for in_rank in (handle[4], copied[4]):
                in_rank[3] = False
        calls = (
            lambda handle=handle: buffer.dispatch(codes, handle=handle),
            lambda copied=copied, received=received: buffer.combine(received, copied),
            lambda handle=handle, received=received: other.combine(received, handle),
        )
        for call in calls:
            for _ in range(2):  # nothing of it is remembered
                if change:
                    with pytest.raises(errors.InvalidArgument, match=told):
                        call()
                else:
                    call()
        # The handle itself is as it was.
        assert torch.equal(buffer.combine(received, handle)[0], job.sums)
    buffer.destroy()
    other.destroy()


def test_a_membership_that_was_changed_is_not_learnt(ranks: Any) -> None:
    ranks.run(check_changed_membership)
