"""What is wrong is said in Python, on every rank that it concerns, and nothing hangs."""

from __future__ import annotations

import time
from typing import Any

import deep_ep
import moexpress
import oracle
import pytest
import torch
import torch.distributed as dist
from moexpress import Communicator, errors


def make(**settings: Any) -> Communicator:
    world = dist.get_world_size()
    sizes = {"experts": 2 * world, "topk": 2, "hidden": 64, "max_tokens": 64, "device": "cpu", "timeout": 10.0}
    return Communicator(**{**sizes, **settings})


def check_arguments(rank: int, world: int) -> None:
    communicator = make()
    x, idx, weights = torch.zeros(4, 64).bfloat16(), torch.arange(8).view(4, 2) % (2 * world), torch.ones(4, 2)
    good = communicator.dispatch(x, idx, weights)
    dispatch = lambda **other: communicator.dispatch(  # noqa: E731
        **{"x": x, "topk_idx": idx, "topk_weights": weights, **other}
    )
    for other, told in [
        ({"x": x.float()}, "dtype of x is torch.float32, allowed: torch.bfloat16"),
        ({"x": x[:, :63]}, r"shape of x is \[4, 63\], allowed: \[rows, 64\]"),
        ({"x": x.T.contiguous().T}, r"strides of x is \[1, 4\], allowed: contiguous"),
        ({"x": x.to("meta")}, "device of x is meta, allowed: cpu, that of the communicator"),
        ({"x": [1]}, "x is a list, allowed: a tensor"),
        ({"topk_idx": idx.int()}, "dtype of topk_idx is torch.int32, allowed: torch.int64"),
        ({"topk_idx": idx[:3]}, r"shape of topk_idx is \[3, 2\], allowed: \[4, 2\]"),
        ({"topk_idx": idx + 2 * world}, f"topk_idx of token 0 is {2 * world}, allowed: -1 or 0 to"),
        ({"topk_idx": torch.zeros_like(idx)}, "topk_idx of token 0 is 0"),
        ({"topk_weights": weights.half()}, "dtype of topk_weights is torch.float16"),
        ({"scales": weights}, "scales is given, allowed: None"),
        ({"outbox_piece": 0}, "outbox_piece is 0, allowed: 1 to"),
        ({"outbox_slots": -1}, "outbox_slots is -1, allowed: 1 to"),
        ({"outbox_slots": 2.5}, "outbox_slots is 2.5, allowed: a whole number, 1 to"),
        ({"alignment": 0}, "expert alignment is 0, allowed: at least 1"),
        ({"worst_rows": 64 * world + 1}, f"worst-case rows is {64 * world + 1}, allowed: at most {64 * world}"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=told):
            dispatch(**other)
    y = torch.zeros(good.rows, 64).bfloat16()
    for given, told in [
        ((y[:-1], good.handle), f"rows of y is {good.rows - 1}, allowed: at least {good.rows}"),
        ((y.half(), good.handle), "dtype of y is torch.float16"),
        ((y, "handle"), "handle is a str, allowed: one that a dispatch gave"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=told):
            communicator.combine(*given)
    with pytest.raises(errors.InvalidArgument, match="outbox_piece is 0, allowed: 1 to"):
        communicator.combine(y, good.handle, outbox_piece=0)
    with pytest.raises(errors.InvalidArgument, match="outbox_slots is 0, allowed: 1 to"):
        communicator.redispatch(x, good.handle, outbox_slots=0)
    with pytest.raises(errors.InvalidArgument, match="number of biases is 3, allowed: at most 2"):
        communicator.combine(y, good.handle, bias=[x, x, x])
    with pytest.raises(errors.InvalidArgument, match=r"shape of bias 1 is \[3, 64\], allowed: \[4, 64\]"):
        communicator.combine(y, good.handle, bias=[x, x[:3]])
    with pytest.raises(errors.InvalidArgument, match="tokens of x is 3, allowed: 4"):
        communicator.redispatch(x[:3], good.handle)
    with pytest.raises(errors.Unsupported, match="low latency"):
        communicator.low_latency_dispatch(x, idx)
    with pytest.raises(errors.InvalidArgument, match="rank is 9, allowed: 0 to"):
        communicator.recover([9])
    # None of it has cost anything.
    assert torch.equal(dispatch().x, good.x)
    communicator.close()
    communicator.close()
    with pytest.raises(errors.Closed, match="was closed"):
        dispatch()


def test_bad_arguments_name_value_and_limit_and_cost_nothing(ranks: Any) -> None:
    ranks.run(check_arguments)


def check_sizes(rank: int, world: int) -> None:
    for settings, told in [
        ({"topk": 33, "experts": 64}, "topk is 33, allowed: 1 to 32"),
        ({"experts": 2 * world + 1}, f"experts is {2 * world + 1}, allowed: a multiple of the {world} ranks"),
        ({"hidden": 0}, "hidden is 0, allowed: 1 to"),
        ({"hidden": 1 << 17}, "hidden is 131072, allowed: 1 to 65536"),
        ({"element": "fp4"}, "element is fp4, allowed: bf16, fp8, fp8-pow2, fp8-ue8m0"),
        ({"placement": "heap"}, "placement is heap, allowed: direct, ring, pulled"),
        ({"device": "meta"}, "device is meta, allowed: cpu, cuda or npu"),
        ({"slots": 0}, "ring slots is 0, allowed: 1 to"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=told):
            make(**settings)
    if not moexpress.cuda_available():
        with pytest.raises(NotImplementedError, match="use device='cpu'"):
            make(device="cuda")


def test_sizes_outside_their_limits_are_named(two: Any) -> None:
    two.run(check_sizes)


def check_mismatch(rank: int, world: int) -> list[str]:
    """Ranks that do different things all find out."""
    told = []

    def raises(kind: type[errors.Error], call: Any) -> None:
        began = time.monotonic()
        with pytest.raises(kind) as raised:
            call()
        assert time.monotonic() - began < 20
        told.append(str(raised.value))

    raises(errors.InvalidArgument, lambda: make(hidden=64 + 2 * (rank == 1)))
    raises(errors.InvalidArgument, lambda: make(element="fp8" if rank == 1 else "bf16"))

    x, idx = torch.zeros(4, 64).bfloat16(), torch.arange(8).view(4, 2) % (2 * world)
    communicator = make()

    def recover() -> None:
        # Some have failed seconds before others; a recovery waits no longer than an operation.
        dist.barrier()
        communicator.recover()

    def two_handles() -> list[Any]:
        handles = [communicator.dispatch(x, idx).handle for _ in range(2)]
        # Who is still in the second dispatch when others fail in what follows fails with them.
        dist.barrier()
        return handles

    handles = two_handles()
    y = torch.zeros(handles[0].rows, 64).bfloat16()
    # Another operation, and another handle.
    raises(
        errors.OperationFailed,
        lambda: communicator.redispatch(x, handles[0]) if rank == 1 else communicator.combine(y, handles[0]),
    )
    recover()
    handles = two_handles()
    raises(errors.OperationFailed, lambda: communicator.combine(y, handles[rank == 1]))
    recover()
    # A rank that has made a mistake does not come: the others are told who.
    if rank == 1:
        raises(errors.InvalidArgument, lambda: communicator.dispatch(x.float(), idx))
    else:
        raises(errors.OperationFailed, lambda: communicator.dispatch(x, idx))
    recover()
    # More rows than one rank has room for.
    raises(errors.OperationFailed, lambda: communicator.dispatch(x, idx * 0 + torch.tensor([2, 3]), worst_rows=4))
    recover()
    communicator.dispatch(x, idx)
    communicator.close()
    return told


def test_ranks_that_do_different_things_all_raise(ranks: Any) -> None:
    for told in ranks.run(check_mismatch, limit=120):
        assert told[0] == "hidden is 66 on rank 1, allowed: 64, as on rank 0"
        assert told[1] == "element is fp8 on rank 1, allowed: bf16, as on rank 0"


def check_deep_ep(rank: int, world: int) -> None:
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    layer = oracle.Layer(world, 2 * world, 2, 128)
    batch = oracle.batches(layer, [6] * world)[rank]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    arguments = {
        "x": batch.x,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": batch.topk_idx,
        "topk_weights": batch.topk_weights,
    }
    scales = torch.ones(6, 1)
    codes = batch.x.float().to(torch.float8_e4m3fn)
    handle = buffer.dispatch(**arguments)[4]
    none = {"topk_idx": None, "topk_weights": None}
    for other, kind, told in [
        ({"x": batch.x.half()}, ValueError, "dtype of x is torch.float16, allowed: torch.bfloat16"),
        ({"x": batch.x.T.contiguous().T}, ValueError, "strides of x"),
        ({"x": (codes, scales.half())}, ValueError, r"dtype of x\[1\] is torch.float16"),
        ({"x": (codes, scales[:3])}, ValueError, r"shape of x\[1\] is \[3, 1\], allowed: \[6, scales\]"),
        ({"x": (codes, torch.ones(6, 2))}, NotImplementedError, "2 scales a row are not supported: use 1 to 1"),
        ({"num_tokens_per_rank": None}, ValueError, "is None, allowed: what get_dispatch_layout returned"),
        ({"num_tokens_per_expert": per_expert.long()}, ValueError, "dtype of num_tokens_per_expert is torch.int64"),
        ({"is_token_in_rank": ~in_rank}, ValueError, "is_token_in_rank is not that of topk_idx"),
        ({"is_token_in_rank": in_rank.int()}, ValueError, "dtype of is_token_in_rank"),
        ({"topk_weights": None}, ValueError, "both or neither"),
        ({"topk_idx": None, "topk_weights": None, "num_worst_tokens": 9}, ValueError, "without topk_idx"),
        ({"handle": handle}, ValueError, "topk_idx is given with a handle"),
        (
            {"handle": (1, 2), **none},
            ValueError,
            "handle is a tuple, allowed: the tuple that dispatch returned, or its",
        ),
        ({"handle": [*handle[:4], in_rank.int(), handle[5]], **none}, ValueError, r"handle\[4\] is torch.int32 \[6, "),
        (
            {"handle": [*handle[:3], in_rank, in_rank, handle[5]], **none},
            ValueError,
            r"handle\[3\] is torch.bool \[6, ",
        ),
        ({"allocate_on_comm_stream": True}, ValueError, "allowed: with previous_event and async_finish only"),
        ({"previous_event": 3}, ValueError, "previous_event is a int, allowed: an EventOverlap"),
        ({"config": 24}, ValueError, "config is a int, allowed: a deep_ep.Config"),
        ({"num_worst_tokens": 1 << 30}, ValueError, "num_worst_tokens is 1073741824, allowed: 0 to "),
    ]:
        with pytest.raises(kind, match=told):
            buffer.dispatch(**{**arguments, **other})
    # A refused call that was to be asynchronous does not make the next one so.
    with pytest.raises(ValueError, match="dtype of"):
        buffer.combine(batch.x.half(), handle, async_finish=True)
    assert buffer.combine(buffer.dispatch(batch.x, handle=handle)[0], handle)[2].event is None
    # A membership has no choices that weights could be of.
    x, *_, members, _ = buffer.dispatch(**{**arguments, **none})
    with pytest.raises(
        ValueError, match="topk_weights is given, allowed: None along this handle, which has no choices"
    ):
        buffer.combine(x, members, torch.ones(len(x), 2))
    buffer.combine(x, members)
    with pytest.raises(ValueError, match="num_experts is 1, allowed: a multiple"):
        buffer.get_dispatch_layout(batch.topk_idx, 1)
    with pytest.raises(ValueError, match=r"topk_idx is \[12\], allowed: \[tokens, topk\]"):
        buffer.get_dispatch_layout(batch.topk_idx.flatten(), layer.experts)
    with pytest.raises(AssertionError, match="no event"):
        buffer.dispatch(**arguments)[5].current_stream_wait()
    buffer.destroy()
    with pytest.raises(errors.Closed):
        buffer.dispatch(**arguments)


def test_deep_ep_refuses_what_is_wrong(ranks: Any) -> None:
    ranks.run(check_deep_ep)


def test_there_must_be_a_group() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        Communicator(experts=8, topk=2, hidden=64)
    with pytest.raises(ValueError, match="group is None, allowed: a process group, or comm"):
        deep_ep.Buffer(None)
    for name in ("num_nvl_bytes", "num_rdma_bytes"):
        with pytest.raises(ValueError, match=f"{name} is -1, allowed: 0 to 9223372036854775807"):
            deep_ep.Buffer(object(), **{name: -1})
        with pytest.raises(ValueError, match=f"{name} is 0.5, allowed: a whole number"):
            deep_ep.Buffer(object(), **{name: 0.5})


def check_memory(rank: int, world: int) -> None:
    with pytest.raises(
        errors.InvalidArgument, match=r"is about .* PiB .*, allowed: at most .*, what this machine has left; fewer"
    ):
        Communicator(experts=world, topk=1, hidden=64, max_tokens=4, arena_bytes=1 << 50)
    # Nobody has taken anything: the next one is made.
    Communicator(experts=world, topk=1, hidden=64, max_tokens=4).close()


def test_what_exceeds_the_machine_is_refused_before_it_is_taken(ranks: Any) -> None:
    ranks.run(check_memory)


def test_timeouts_are_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEXPRESS_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MOEXPRESS_TIMEOUT is 'soon', allowed: seconds, more than 0"):
        deep_ep.Buffer(object())


def check_every_exception(rank: int, world: int) -> None:
    """What once raised whatever Python, or torch, does."""
    options = {"low_latency_mode": True, "enable_shrink": True, "explicitly_destroy": True}
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 20, **options)
    huge = deep_ep.Buffer(dist.group.WORLD, 1 << 62, **options)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, 0, num_max_tokens_per_rank=8, explicitly_destroy=True)
    idx, hint = torch.zeros((3, 2), dtype=torch.int64), deep_ep.Buffer.get_low_latency_rdma_size_hint
    layout, local = buffer.get_dispatch_layout, buffer.get_local_buffer_tensor
    per_rank, _, per_expert, in_rank, _ = layout(idx, 8)
    batch = (torch.zeros(3, 64).bfloat16(), None, per_rank, None, in_rank)
    rates = elastic.get_theoretical_num_sms
    for call, given, told in [
        (hint, (-1, 128, 2, 8), "num_max_dispatch_tokens_per_rank is -1, allowed: 1 to"),
        (hint, (1 << 40, 128, 2, 8), "num_max_dispatch_tokens_per_rank is 1099511627776, allowed: 1 to"),
        (hint, (1, 128.0, 2, 8), "hidden is 128.0, allowed: a whole number"),
        (hint, (1, 128, None, 8), "num_ranks is None, allowed: a whole number"),
        (hint, (1, 128, 2, 10**6000), "num_experts is a number of 19932 bits, allowed: 1 to"),
        # Nothing of that size is taken first.
        (layout, (idx, 1 << 40), "num_experts is 1099511627776, allowed: 1 to 65536"),
        (layout, (idx, None), "num_experts is None, allowed: a whole number"),
        (layout, (idx, 8.0), "num_experts is 8.0, allowed: a whole number"),
        (layout, (idx, "8"), "num_experts is 8, allowed: a whole number"),
        (buffer.dispatch, (*batch, [1], idx, torch.ones(3, 2)), "num_tokens_per_expert is a list, allowed: a tensor"),
        (buffer.dispatch, (*batch, per_expert, None, None, 1, torch.zeros(2)), "num_worst_tokens is a Tensor, allowed"),
        (buffer.low_latency_query_mask_buffer, (None,), "mask_status is a NoneType, allowed: a tensor"),
        (local, (torch.int8, (-1,)), "size is -1, allowed: 0 to"),
        (local, (torch.int8, 5), "size is 5, allowed: a list of whole numbers"),
        (local, (torch.int8, None, 1.5), "offset is 1.5, allowed: a whole number"),
        (local, (5,), "dtype is 5, allowed: a torch.dtype"),
        (buffer.recover, (5,), "mask is 5, allowed: a list of whole numbers"),
        (deep_ep.Config, (3,), "num_sms is 3, allowed: an even number"),
        (deep_ep.Buffer.get_dispatch_config, (None,), "num_ranks is None, allowed: a whole number"),
        (rates, (8, 2, None), "num_scaleout_topk is None, allowed: a whole number"),
        (rates, (8, 2, 0, 0, -1), "nvlink_gbs is -1, allowed: 0 or more"),
        (rates, (8, 2, 0, 0, 0, []), "sm_read_gbs is a list, allowed: more than 0"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=told):
            call(*given)
    with pytest.raises(errors.Broken, match="memory of num_nvl_bytes, 4611686018427387904 bytes, is not to be had"):
        huge.get_local_buffer_tensor(torch.int8)
    assert rates(8, 2, 0, 0, float("inf")) % 2 == 0
    for one in (buffer, huge, elastic):
        one.destroy()


def test_every_exception_is_ours(one: Any) -> None:
    one.run(check_every_exception)


def check_other_calls(rank: int, world: int) -> None:
    meeting = moexpress.Meeting(timeout=5)
    for told in (b"\xe9\x00", b"no such line"):
        if rank == 1:
            meeting.all_gather(told)
            continue
        with pytest.raises(
            errors.MeetingFailed, match="rank 1 makes another call than rank 0, allowed: the same calls"
        ):
            meeting.agree({"hidden": 64})
    meeting.agree({"hidden": 64})
    meeting.close()


def test_a_rank_that_agrees_while_others_make_another_call_is_told(two: Any) -> None:
    two.run(check_other_calls)


def check_handler(rank: int, world: int) -> None:
    """A signal handler raises inside the call, or when it has returned: what is wrong is nothing that it was given."""
    communicator, calls = make(), []

    class Native:
        def dispatch(self, *given: Any) -> Any:
            calls.append(given)
            raise TypeError("of a handler")

    native, communicator.throughput.native = communicator.throughput.native, Native()  # type: ignore[assignment]
    x, idx = torch.zeros(4, 64).bfloat16(), torch.arange(8).view(4, 2) % (2 * world)
    with pytest.raises(TypeError, match="of a handler"):
        communicator.dispatch(x, idx)
    assert len(calls) == 1
    communicator.throughput.native = native
    # Switches of other kinds are those switches.
    assert communicator.dispatch(x, idx, device_counts=0, by_expert=1).by_expert is not None  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="by_expert is 2, allowed: True or False"):
        communicator.dispatch(x, idx, by_expert=2)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="alignment is -1, allowed: 0 to"):
        communicator.dispatch(x, idx, alignment=-1)
    communicator.close()


def test_what_a_signal_handler_raises_is_no_reason_to_call_again(one: Any) -> None:
    one.run(check_handler)
