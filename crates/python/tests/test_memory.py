"""What tensors claim is theirs: no call reads or writes memory that a tensor's storage does not have."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import moexpress
import pytest
import torch
import torch.distributed as dist
from moexpress import Communicator, autograd, errors
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS, TOPK, HIDDEN, EXPERTS = 6, 2, 128, 4


def make(**settings: Any) -> Communicator:
    sizes = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": 8, "device": "cpu", "timeout": 10.0}
    return Communicator(**{**sizes, "low_latency": True, **settings})


def rows(tokens: int = TOKENS) -> torch.Tensor:
    return torch.ones(tokens, HIDDEN).bfloat16()


def choices(tokens: int = TOKENS) -> torch.Tensor:
    return torch.arange(tokens * TOPK).view(tokens, TOPK) % EXPERTS


class Calls:
    """Every call that takes tensors, with good ones. A test puts others in their place."""

    def __init__(self) -> None:
        self.bf16 = make()
        self.fp8 = make(element="fp8")
        weights = torch.ones(TOKENS, TOPK)
        codes, scales = rows().to(torch.float8_e4m3fn), torch.ones(TOKENS, 1)
        of_bf16, of_fp8 = self.bf16.dispatch(rows(), choices()), self.fp8.dispatch(codes, choices(), scales=scales)
        low = self.bf16.low_latency_dispatch(rows(), choices())
        assert low.handle is not None
        results = torch.ones(self.bf16.local_experts, 8, HIDDEN).bfloat16()
        in_rank, counts = torch.ones(TOKENS, 1, dtype=torch.bool), [3] * EXPERTS
        stats = torch.zeros(EXPERTS, dtype=torch.int32)
        weighted = {"topk_weights": weights}
        both = {"y": results, "handle": low.handle, **weighted, "out": rows()}
        self.all: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (self.bf16.dispatch, {"x": rows(), "topk_idx": choices(), **weighted}),
            (self.fp8.dispatch, {"x": codes, "topk_idx": choices(), **weighted, "scales": scales}),
            (self.bf16.dispatch_members, {"x": rows(), "in_rank": in_rank, "tokens_per_expert": counts}),
            (
                self.fp8.dispatch_members,
                {"x": codes, "in_rank": in_rank, "tokens_per_expert": counts, "scales": scales},
            ),
            (self.bf16.redispatch, {"x": rows(), "handle": of_bf16.handle}),
            (self.fp8.redispatch, {"x": codes, "handle": of_fp8.handle, "scales": scales}),
            (self.bf16.combine, {"y": rows(), "handle": of_bf16.handle, **weighted, "bias": rows()}),
            (self.bf16.low_latency_dispatch, {"x": rows(), "topk_idx": choices()}),
            (self.bf16.in_low_latency.dispatch, {"x": rows(), "topk_idx": choices(), **weighted, "stats": stats}),
            (self.bf16.low_latency_combine, both),
        ]

    def each(self) -> Any:
        """Each call, its arguments, and the name of one of them that is a tensor."""
        for call, arguments in self.all:
            for name, given in arguments.items():
                if isinstance(given, torch.Tensor):
                    yield call, arguments, name, given

    def refused(self, changed: Callable[[torch.Tensor], Any | None], told: str) -> int:
        """All calls refuse every tensor that was ``changed``, where it can be, and go on as if nothing had been; how many."""
        seen = 0
        for call, arguments, name, given in self.each():
            other = changed(given.clone())
            if other is not None:
                seen += 1
                with pytest.raises(errors.InvalidArgument, match=told):
                    call(**{**arguments, name: other})
            call(**arguments)
        return seen

    def close(self) -> None:
        self.bf16.close()
        self.fp8.close()


def emptied(given: torch.Tensor) -> torch.Tensor:
    """FSDP's idiom: the tensor stays, its memory goes."""
    given.untyped_storage().resize_(0)
    return given


def shrunk(given: torch.Tensor) -> torch.Tensor:
    given.untyped_storage().resize_(given.nbytes - 1)
    return given


def beyond(given: torch.Tensor) -> torch.Tensor:
    """The last half of a storage that was cut there."""
    twice = torch.cat([given, given])
    late = twice[given.shape[0] :]
    twice.untyped_storage().resize_(given.nbytes)
    return late


def check_storages(rank: int, world: int) -> None:
    calls = Calls()
    assert calls.refused(emptied, r"storage of .* is 0 bytes, allowed: at least \d+; it was resized") == 27
    calls.refused(shrunk, r"storage of .* is \d+ bytes, allowed: at least")
    calls.refused(beyond, r"storage of .* is \d+ bytes, allowed: at least")
    calls.close()


def test_a_storage_that_does_not_hold_its_tensor_is_refused(one: Any) -> None:
    one.run(check_storages)


def check_no_tokens(rank: int, world: int) -> None:
    """Zero tokens need no memory, whatever became of it."""
    communicator = make()
    for empty in (lambda given: given[:0], lambda given: emptied(given[:0]), lambda given: emptied(given)[:0]):
        x, topk_idx, weights = empty(rows()), empty(choices()), empty(torch.ones(TOKENS, TOPK))
        received = communicator.dispatch(x, topk_idx, weights)
        assert received.rows == 0 and received.x.shape == (0, HIDDEN)
        back = communicator.combine(
            empty(rows()), received.handle, topk_weights=empty(torch.ones(TOKENS, TOPK)), bias=x
        )
        assert back.x.shape == (0, HIDDEN)
        low = communicator.low_latency_dispatch(x, topk_idx)
        out = communicator.low_latency_combine(low.x, low.handle, weights, out=empty(rows()))
        assert out.shape == (0, HIDDEN) and low.expert_counts.tolist() == [0] * EXPERTS
        sent = communicator.send_combine(low.x, low.handle, weights, out=empty(rows()))
        assert sent.receive().shape == (0, HIDDEN)
    communicator.close()


def test_no_tokens_need_no_memory(one: Any) -> None:
    one.run(check_no_tokens)


class Colourful(torch.Tensor):
    """A tensor of a class of its own."""


def unaligned(given: torch.Tensor) -> torch.Tensor | None:
    if given.itemsize == 1:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory = torch.frombuffer(bytearray(given.nbytes + 1), dtype=given.dtype, offset=1, count=given.numel())
    return memory.view(given.shape)


def sparse(given: torch.Tensor) -> torch.Tensor | None:
    try:
        return given.to_sparse()
    except RuntimeError:  # FP8 cannot be
        return None


def fake(given: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(given)


def check_kinds(rank: int, world: int) -> None:
    calls = Calls()
    calls.refused(lambda given: given.as_subclass(Colourful), "is a Colourful, allowed: a plain torch.Tensor")
    calls.refused(fake, "is a FakeTensor, allowed: a plain")
    calls.refused(sparse, r"layout of .* is torch.sparse_coo, allowed: torch.strided")
    calls.refused(lambda given: given.to("meta"), "device of .* is meta, allowed: cpu")
    calls.refused(lambda given: torch._neg_view(given) if given.is_floating_point() else None, "negative bit set")
    calls.refused(unaligned, r"address of .* is \d bytes beyond a multiple of \d, allowed: a multiple; call .clone")
    with pytest.raises(errors.InvalidArgument, match="layout of x is nested"):
        calls.bf16.dispatch(torch.nested.nested_tensor([rows(), rows()]), choices())
    codes = torch.quantize_per_tensor(torch.ones(TOKENS, HIDDEN), 1.0, 0, torch.qint8)
    with pytest.raises(errors.InvalidArgument, match=r"dtype of x is quantized torch.qint8, allowed: one that is not"):
        calls.bf16.dispatch(codes, choices())
    with pytest.raises(errors.InvalidArgument, match="x is a tensor without storage, allowed: one with memory"):
        torch.func.vmap(lambda x: calls.bf16.dispatch(x, choices()).x)(torch.stack([rows(), rows()]))
    # Of these torch says that they have bytes, which lie nowhere.
    with pytest.raises(errors.InvalidArgument, match="x is a tensor without storage, allowed: one with memory"):
        torch.func.functionalize(lambda x: calls.bf16.dispatch(x, choices()).x)(rows())
    # Parameters are tensors with memory.
    calls.bf16.dispatch(torch.nn.Parameter(rows()), choices())
    calls.close()


def test_tensors_that_are_not_plain_memory_are_refused_by_name(one: Any) -> None:
    one.run(check_kinds)


def check_overlaps(rank: int, world: int) -> None:
    communicator = make()
    weights = torch.ones(TOKENS, TOPK)
    low = communicator.low_latency_dispatch(rows(), choices())
    y = torch.ones(EXPERTS, 8, HIDDEN).bfloat16()
    for out, told in [
        (y.view(-1, HIDDEN)[3 : 3 + TOKENS], "out is memory of y, allowed: memory of its own"),
        (torch.zeros(1, HIDDEN).bfloat16().expand(TOKENS, HIDDEN), r"strides of out is \[0, 1\], allowed: contiguous"),
    ]:
        for call in (communicator.low_latency_combine, communicator.send_combine):
            with pytest.raises(errors.InvalidArgument, match=told):
                call(y, low.handle, weights, out=out)
    memory = torch.ones(TOKENS * HIDDEN).bfloat16()
    inside = memory[: 2 * TOKENS * TOPK].view(torch.float32).view(TOKENS, TOPK)
    with pytest.raises(errors.InvalidArgument, match="out is memory of topk_weights"):
        communicator.low_latency_combine(y, low.handle, inside, out=memory.view(TOKENS, HIDDEN))
    x = rows()
    stats = x.flatten()[: 2 * EXPERTS].view(torch.int32)
    for call in (communicator.in_low_latency.dispatch, communicator.in_low_latency.send_dispatch):
        with pytest.raises(errors.InvalidArgument, match="stats is memory of x"):
            call(x, choices(), None, stats)
    # Neighbours do not overlap.
    memory = torch.ones(2 * TOKENS, HIDDEN).bfloat16()
    communicator.low_latency_dispatch(memory[:TOKENS], choices())
    communicator.low_latency_combine(y, low.handle, weights, out=memory[TOKENS:])
    communicator.close()


def test_what_is_written_is_no_memory_that_is_read(one: Any) -> None:
    one.run(check_overlaps)


def check_split_dispatch(rank: int, world: int) -> None:
    communicator = make()
    weights = torch.ones(TOKENS, TOPK)
    y = torch.ones(EXPERTS, 8, HIDDEN).bfloat16()
    # The number of tokens is that of the sending half, whatever becomes of the tensor.
    for change in (emptied, lambda x: x.resize_(8, HIDDEN), lambda x: x.set_(torch.zeros(1).bfloat16())):
        x = rows()
        sent = communicator.send_dispatch(x, choices())
        change(x)
        low = sent.receive()
        assert low.handle is not None and low.handle.tokens == TOKENS
        assert communicator.low_latency_combine(y, low.handle, weights).shape == (TOKENS, HIDDEN)
        with pytest.raises(errors.InvalidArgument, match="the operation has been received, allowed: one that has not"):
            sent.receive()
    # So is what counts are added to.
    stats = torch.zeros(EXPERTS, dtype=torch.int32)
    sent = communicator.in_low_latency.send_dispatch(rows(), choices(), None, stats)
    emptied(stats)
    with pytest.raises(errors.InvalidArgument, match="stats is a storage that was resized, allowed: what was given"):
        sent.receive()
    communicator.rejoin()
    communicator.close()


def check_resized_out(rank: int, world: int) -> None:
    """Nobody gets sums of another shape than those that were asked for, none at all among them."""
    communicator, y = make(), torch.ones(EXPERTS, 8, HIDDEN).bfloat16()
    for tokens in (0, TOKENS):
        low = communicator.low_latency_dispatch(rows(tokens), choices(tokens))
        out = rows()[:tokens]
        sent = communicator.send_combine(y, low.handle, torch.ones(tokens, TOPK), out=out)
        out.resize_(2, HIDDEN)
        with pytest.raises(errors.InvalidArgument, match=r"out is of shape \[2, 128\], allowed: what was given"):
            sent.receive()
        out.resize_(tokens, HIDDEN)
        assert sent.receive().shape == (tokens, HIDDEN)
    communicator.close()


def test_sums_have_the_shape_that_was_asked_for(one: Any) -> None:
    one.run(check_resized_out)


def test_a_dispatch_is_received_as_it_was_sent(one: Any) -> None:
    one.run(check_split_dispatch)


def check_split_combine(rank: int, world: int) -> None:
    weights = torch.ones(TOKENS, TOPK)
    y = torch.ones(EXPERTS, 8, HIDDEN).bfloat16()
    for change, told in [
        (emptied, "out is a storage that was resized, allowed: what was given when the operation was sent"),
        (lambda out: out.set_(out.clone()), "out is a tensor whose memory was replaced, allowed: what was given when"),
        (lambda out: out.resize_(1 << 16, HIDDEN).resize_(TOKENS, HIDDEN), "out is a storage that was resized"),
    ]:
        for given in (rows(), None):
            communicator = make()
            low = communicator.low_latency_dispatch(rows(), choices())
            canary = torch.zeros(64, HIDDEN).bfloat16()
            sent = communicator.send_combine(y, low.handle, weights, out=given)
            change(sent.result)
            with pytest.raises(errors.InvalidArgument, match=told):
                sent.receive()
            assert not canary.any()
            communicator.close()


def test_a_combine_is_received_where_it_was_to_be(one: Any) -> None:
    one.run(check_split_combine)


def check_others(rank: int, world: int) -> None:
    one, other = make(), make(experts=2, hidden=64, max_tokens=64)
    x, idx = torch.ones(64, 64).bfloat16(), torch.tensor([[0, 1]] * 64)
    low, normal = other.low_latency_dispatch(x, idx), other.dispatch(x, idx)
    weights = torch.ones(64, TOPK)
    for call in (one.low_latency_combine, one.send_combine):
        with pytest.raises(errors.InvalidArgument, match="handle is of another communicator, allowed: one of this"):
            call(torch.ones(EXPERTS, 8, HIDDEN).bfloat16(), low.handle, weights)
    for refused in (
        lambda: one.combine(rows(64), normal.handle),
        lambda: one.redispatch(rows(64), normal.handle),
        lambda: one.low_latency_combine(low.x, normal.handle, weights),
        lambda: one.combine(rows(64), low.handle),
    ):
        with pytest.raises(errors.InvalidArgument, match="handle is "):
            refused()
    one.close()
    other.close()


def test_handles_of_another_communicator_are_refused(one: Any) -> None:
    one.run(check_others)


def check_numbers(rank: int, world: int) -> None:
    communicator = make()
    call = {"x": rows(), "topk_idx": choices()}
    members = {"x": rows(), "in_rank": torch.ones(TOKENS, 1, dtype=torch.bool)}
    huge = 10**6000  # which Python refuses to write
    for refused, told in [
        (lambda: communicator.dispatch(**call, alignment=-1), "alignment is -1, allowed: 0 to 4294967295"),
        (lambda: communicator.dispatch(**call, alignment=1.5), "alignment is 1.5, allowed: a whole number, 0 to"),
        (lambda: communicator.dispatch(**call, worst_rows=huge), "worst_rows is a number of 19932 bits, allowed: 0 to"),
        (lambda: communicator.dispatch(**call, worst_rows=None), "worst_rows is None, allowed: a whole number"),
        (lambda: communicator.dispatch(**call, device_counts=2), "device_counts is 2, allowed: True or False"),
        (lambda: communicator.dispatch_members(**members, tokens_per_expert=[-1] * 4), "tokens_per_expert is -1"),
        (lambda: communicator.dispatch_members(**members, tokens_per_expert=range(1 << 40)), "length of tokens_per"),
        (
            lambda: communicator.dispatch_members(**members, tokens_per_expert=3),
            "tokens_per_expert is 3, allowed: a list",
        ),
        (
            lambda: communicator.combine(rows(), communicator.dispatch(**call).handle, bias=3),
            "bias is a int, allowed: a",
        ),
        (lambda: autograd.dispatch(communicator, **call, topk_weights=None), "topk_weights is None, allowed: a tensor"),
        (lambda: communicator.mask_rank(-1), "rank is -1, allowed: 0 to 0"),
        (lambda: communicator.mask_rank("0"), "rank is 0, allowed: a whole number, 0 to 0"),
        (lambda: communicator.recover([huge]), "mask is a number of 19932 bits"),
        (lambda: communicator.recover("0"), "mask is 0, allowed: a list of whole numbers"),
        (lambda: make(experts=4.0), "experts is 4.0, allowed: a whole number, 1 to 2147483647"),
        (lambda: make(hidden=-huge), "hidden is a number of 19932 bits, allowed: 1 to 2147483647"),
        (lambda: make(arena_bytes=-1), "arena_bytes is -1, allowed: 0 to"),
        (lambda: make(channels=-1), "channels is -1, allowed: 0 to 4294967295"),
        (lambda: make(multiprocessors=torch.zeros(2)), "multiprocessors is a Tensor, allowed: a whole number"),
        (lambda: make(low_latency=3), "low_latency is 3, allowed: True or False"),
        (lambda: make(element=3), "element is 3, allowed: a name"),
        (lambda: make(placement=None), "placement is None, allowed: a name"),
        (lambda: make(device="moon"), "device is moon, allowed: cpu, cuda or npu"),
        (lambda: make(device=[]), "device is a list, allowed: cpu, cuda or npu"),
        (lambda: make(timeout=float("nan")), "timeout is not a number, allowed: seconds, more than 0"),
        (lambda: make(timeout=0), "timeout is 0, allowed: seconds, more than 0"),
        (lambda: make(timeout="1"), "timeout is 1, allowed: seconds, more than 0"),
        (lambda: make(group=3), "group is 3, allowed: a torch.distributed process group, a Meeting, or None"),
        (lambda: communicator.meeting.all_gather("told"), "what is told is told, allowed: bytes"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=told):
            refused()
    assert communicator.dispatch(**call, alignment=True, worst_rows=torch.tensor(8)).rows == TOKENS
    make(timeout=float("inf")).close()
    communicator.close()


def test_numbers_and_names_outside_their_limits_are_named(one: Any) -> None:
    one.run(check_numbers)


class Pool:
    """A framework's pool for what is captured."""

    def __init__(self) -> None:
        self._blocks: list[weakref.ref[torch.Tensor]] = []
        self.lacks = 0
        """Bytes that blocks are too short by."""

    def room(self, sizes: list[int], defer: bool) -> list[tuple[int, int, torch.Tensor]]:
        blocks = [torch.empty(size + 256, dtype=torch.uint8) for size in sizes]
        self._blocks += map(weakref.ref, blocks)
        begins = [block.data_ptr() + -block.data_ptr() % 256 for block in blocks]
        return [(at, size - self.lacks, block) for at, size, block in zip(begins, sizes, blocks, strict=True)]

    def alive(self, communicator: Communicator) -> int:
        """Blocks that somebody has. What was dropped outside of native calls goes with the next one."""
        communicator.stats()
        return sum(block() is not None for block in self._blocks)


def row_bytes(got: Any, by_expert: bool) -> torch.Tensor:
    """Those of the rows that came first."""
    rows = got.x[0, : int(got.expert_counts[0])] if by_expert else got.x[:TOKENS]
    return rows.view(torch.uint8).clone()


def check_room(element: str, more: dict[str, Any]) -> None:
    one, pool = make(element=element), Pool()
    expected = row_bytes(one.low_latency_dispatch(rows(), choices(), **more), not more)
    one.order.captures, one.order.room = lambda: True, pool.room  # type: ignore[method-assign]
    got = one.low_latency_dispatch(rows(), choices(), **more)
    assert torch.equal(row_bytes(got, not more), expected) and pool.alive(one) == 2
    counts, handle = got.expert_counts, got.handle
    del got
    assert pool.alive(one) == 1, "counts are no reason to keep rows"
    assert handle is not None and counts.sum() > 0
    del counts
    assert pool.alive(one) == 0, "nor is a handle"
    if not more:
        sent = one.send_dispatch(rows(), choices())
        assert pool.alive(one) == 2
        got = sent.receive()
        assert torch.equal(row_bytes(got, True), expected)
        del sent, got
        assert pool.alive(one) == 0
    pool.lacks = 1
    with pytest.raises(errors.InvalidArgument, match="room for results"):
        one.low_latency_dispatch(rows(), choices(), **more)
    pool.lacks = 0
    one.low_latency_dispatch(rows(), choices(), **more)
    one.close()


def check_rooms(rank: int, world: int) -> None:
    check_room("bf16", {})
    check_room("fp8", {})
    check_room("bf16", {"by_source": True})
    check_room("bf16", {"packed": 4})


def test_what_a_captured_call_brings_lies_in_memory_of_the_frameworks(one: Any) -> None:
    one.run(check_rooms)


def check_shared_meeting(rank: int, world: int) -> None:
    meeting = moexpress.Meeting(dist.group.WORLD, timeout=5)
    first, second = make(group=meeting), make(group=meeting)
    sent = first.send_dispatch(rows(), choices())
    with pytest.raises(errors.InvalidArgument, match="operation is of another communicator, allowed: one of this"):
        second.native.receive_dispatch((0, False), sent._pending, None)
    assert sent.receive().handle is not None
    first.close()
    second.close()
    meeting.close()


def test_operations_of_another_communicator_are_refused(one: Any) -> None:
    one.run(check_shared_meeting)
