"""Which stream waits for what, and what is kept for it: of CPU ranks, whose order notes what a GPU's would be asked for."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import deep_ep
import oracle
import torch
import torch.distributed as dist
from deep_ep.utils import EventHandle, EventOverlap
from moexpress._order import HostOrder

MOST = 600
"""Tokens of a rank at most, more than a small batch of V2 has."""
SMALL = 64


class Stream:
    """Notes the events that it is to wait for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def take(self) -> list[Any]:
        waited, self.waited = self.waited, []
        return waited


class Noted:
    """What the orders of communicators are asked for."""

    def __init__(self) -> None:
        self.current, self.communication = Stream(), Stream()
        self.followed: list[tuple[Any, Any]] = []
        self.kept: list[Any] = []

    def __enter__(self) -> Noted:
        self._was = HostOrder.follow, HostOrder.beyond, torch.cuda.current_stream
        HostOrder.stream = self.communication
        HostOrder.follow = lambda order, other: self.followed.append((order, other))  # type: ignore[method-assign]
        HostOrder.beyond = lambda _, *tensors: self.kept.extend(tensors)  # type: ignore[method-assign]
        torch.cuda.current_stream = lambda *_: self.current  # type: ignore[assignment, return-value]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        HostOrder.stream = None
        HostOrder.follow, HostOrder.beyond, torch.cuda.current_stream = self._was  # type: ignore[method-assign]

    def keeps(self, tensor: torch.Tensor) -> bool:
        return any(one is tensor for one in self.kept)

    def take(self) -> tuple[list[Any], list[Any]]:
        """Events that the current stream was made to wait for, and those of the communicators' streams."""
        return self.current.take(), self.communication.take()


def previous(name: str) -> EventOverlap:
    """An event, with a hook that nobody but its owner calls."""
    event = EventOverlap(EventHandle(name))  # type: ignore[arg-type]

    def called() -> None:
        raise AssertionError("a call ran the hook of its previous_event")

    event.register_hook_after_wait(called)
    return event


def batch_of(rank: int, world: int) -> tuple[oracle.Layer, oracle.Batch]:
    layer = oracle.Layer(world=world, experts=2 * world, topk=2, hidden=256)
    return layer, oracle.batches(layer, [7] * world)[rank]


def coded(x: torch.Tensor, columns: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], columns)


class V1:
    def __init__(self, rank: int, world: int, **settings: Any) -> None:
        self.buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True, **settings)
        self.layer, self.batch = batch_of(rank, world)

    def layout(self, **asked: Any) -> Any:
        return self.buffer.get_dispatch_layout(self.batch.topk_idx, self.layer.experts, **asked)

    def dispatch(self, x: Any, topk_idx: torch.Tensor | None = None, **asked: Any) -> Any:
        batch, told = self.batch, self.layout()
        topk_idx = batch.topk_idx if topk_idx is None else topk_idx
        return self.buffer.dispatch(x, None, told[0], None, told[3], told[2], topk_idx, batch.topk_weights, **asked)


class V2:
    def __init__(self, rank: int, world: int, **settings: Any) -> None:
        self.layer, self.batch = batch_of(rank, world)
        sizes = {"num_max_tokens_per_rank": MOST, "hidden": self.layer.hidden}
        self.buffer = deep_ep.ElasticBuffer(dist.group.WORLD, **sizes, explicitly_destroy=True, **settings)

    def dispatch(self, most: int, **asked: Any) -> Any:
        batch = self.batch
        asked |= {"num_experts": self.layer.experts, "num_max_tokens_per_rank": most}
        return self.buffer.dispatch(asked.pop("x", batch.x), batch.topk_idx, batch.topk_weights, **asked)


def check_turns(rank: int, world: int) -> None:
    v1, asked = V1(rank, world), {"async_finish": True}
    x = v1.batch.x
    with Noted() as noted:
        of_fp8 = v1.dispatch(coded(x), **asked)[4]
        received, *_, of_bf16, _ = v1.dispatch(x, **asked)
        fp8, bf16 = (one.order for one in v1.buffer._communicators.all_normal())
        assert noted.followed == [(bf16, fp8)]
        v1.buffer.combine(received, of_bf16, **asked)
        assert noted.followed == [(bf16, fp8)], "one communicator has one stream"
        # Rows of another type come by a third communicator, and go back along the handle: from its memory.
        came = v1.buffer.dispatch(x, handle=of_fp8, **asked)[0]
        other = v1.buffer._communicators.all_normal()[2].order
        v1.buffer.combine(came, of_fp8, **asked)
        del came
        # Now that the rows are gone, their memory is used again.
        v1.buffer.dispatch(x, handle=of_fp8)
        assert noted.followed[1:] == [(other, bf16), (fp8, other), (other, fp8)]
    v1.buffer.destroy()
    v2 = V2(rank, world)
    with Noted() as noted:
        received, _, weights, handle, _ = v2.dispatch(SMALL, async_with_compute_stream=True)
        # Weights go back by throughput mode, which reads what the small batch brought.
        v2.buffer.combine(received, handle, weights, async_with_compute_stream=True)
        del received
        v2.dispatch(SMALL, async_with_compute_stream=True)
        (low,), (normal,) = v2.buffer._communicators.all_low(), v2.buffer._communicators.all_normal()
        assert noted.followed == [(normal.order, low.order), (low.order, normal.order)]
    v2.buffer.destroy()


def test_calls_of_a_buffer_come_one_behind_the_other(two: Any) -> None:
    two.run(check_turns)


def check_previous(rank: int, world: int) -> None:
    v1 = V1(rank, world)
    x, codes, handles = v1.batch.x, coded(v1.batch.x), {}
    short = v1.batch.topk_idx.int()
    for rows in (x, codes):
        handles[type(rows)] = v1.dispatch(rows)[4]
        v1.buffer.dispatch(codes, handle=handles[type(rows)])
    received, *_, handle, _ = v1.dispatch(x)
    calls = {
        "dispatch": lambda **asked: v1.dispatch(x, **asked),
        "dispatch, fp8": lambda **asked: v1.dispatch(codes, **asked),
        "dispatch, int32": lambda **asked: v1.dispatch(x, short, **asked),
        "dispatch, few scales": lambda **asked: v1.dispatch(coded(x, 1), **asked),
        "cached": lambda **asked: v1.buffer.dispatch(x, handle=handle, **asked),
        "cached, fp8": lambda **asked: v1.buffer.dispatch(codes, handle=handles[tuple], **asked),
        "cached, of another type": lambda **asked: v1.buffer.dispatch(codes, handle=handles[torch.Tensor], **asked),
        "combine": lambda **asked: v1.buffer.combine(received, handle, **asked),
    }
    # Arguments are prepared on the current stream.
    prepares = {"dispatch, int32", "dispatch, few scales"}
    with Noted() as noted:
        for name, call in calls.items():
            call(previous_event=previous(name), async_finish=True)
            assert noted.take() == ([name] if name in prepares else [], [name]), name
            call(previous_event=previous(name))
            assert noted.take() == ([name], []), name
            call(previous_event=EventOverlap(), async_finish=True)
            assert noted.take() == ([], []), name
        # The first of these sizes: the host asks how many rows go where.
        v1.dispatch(x[:, :128].contiguous(), previous_event=previous("new"), async_finish=True)
        assert noted.take() == (["new"], ["new"])
        copied = [one.clone() for one in handle]
        v1.buffer.combine(received, copied, previous_event=previous("copied"), async_finish=True)
        assert noted.take() == (["copied"], ["copied"])
        v1.layout(previous_event=previous("layout"), async_finish=True)
        assert noted.take() == (["layout"], [])
    v1.buffer.destroy()


def test_an_asynchronous_call_alone_waits_for_its_previous_event(two: Any) -> None:
    two.run(check_previous)


def check_previous_of_v2(rank: int, world: int, twice: bool) -> None:
    v2 = V2(rank, world, allow_multiple_reduction=twice)
    buffer, x = v2.buffer, v2.batch.x
    for most in (SMALL, MOST):
        for expand in (False, True):
            rows, _, weights, handle, _ = v2.dispatch(most, do_expand=expand)
            buffer.combine(rows, handle, weights)
            calls = {
                "dispatch": lambda most=most, expand=expand, **asked: v2.dispatch(most, do_expand=expand, **asked),
                "cached": lambda handle=handle, expand=expand, **asked: buffer.dispatch(
                    x, handle=handle, do_expand=expand, **asked
                ),
                "combine": lambda rows=rows, handle=handle, **asked: buffer.combine(rows, handle, **asked),
                "weights": lambda rows=rows, handle=handle, weights=weights, **asked: buffer.combine(
                    rows, handle, weights, **asked
                ),
            }
            prepares = {"weights"} if expand else set()
            if expand and not twice and most == MOST:
                # On CPU ranks choice by choice.
                prepares.add("combine")
            with Noted() as noted:
                for name, call in calls.items():
                    told = (most, expand, name)
                    events = {
                        "previous_event": EventHandle(name),  # type: ignore[arg-type]
                        "previous_event_before_epilogue": previous("epilogue"),
                    }
                    call(**events, async_with_compute_stream=True)
                    current, communication = noted.take()
                    assert current == ([name, "epilogue"] if name in prepares else []), told
                    assert communication == [name, "epilogue"], told
                    call(**events)
                    assert noted.take() == ([name, "epilogue"], []), told
    buffer.destroy()


def test_an_asynchronous_call_of_v2_alone_waits_for_its_previous_events(two: Any) -> None:
    for twice in (True, False):
        two.run(check_previous_of_v2, twice)


def check_kept(rank: int, world: int) -> None:
    v2 = V2(rank, world)
    handle = v2.dispatch(MOST)[3]
    with Noted() as noted:
        v2.buffer.dispatch(v2.batch.x, handle=handle, async_with_compute_stream=True)
        assert noted.keeps(handle.routing.choices)
        v2.buffer.dispatch(v2.batch.x, handle=handle)
        noted.kept.clear()
        v2.buffer.dispatch(v2.batch.x, handle=handle, do_expand=True, async_with_compute_stream=True)
        tensors = [one for one in vars(handle.expansion).values() if isinstance(one, torch.Tensor)]
        # But where each expert's rows end, which nothing reads there.
        unread = [one for one in tensors if not noted.keeps(one)]
        assert len(tensors) == 5 and len(unread) == 1 and unread[0] is handle.expansion.psum
    v2.buffer.destroy()


def test_what_a_cached_dispatch_reads_behind_its_stream_is_kept(two: Any) -> None:
    two.run(check_kept)


class Ordered:
    """A stream that notes, in a list of all streams, which it is to wait for."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Ordered) -> None:
        self.log.append((self.name, other.name))

    def wait_event(self, event: Any) -> None:
        self.log.append((self.name, event))


def check_lent(rank: int, world: int) -> None:
    """Whichever communicator carries a call, and however it was learnt: first it waits for what the lent stream holds, and then that for it."""
    v1 = V1(rank, world, low_latency_mode=True)
    buffer, x, codes = v1.buffer, v1.batch.x, coded(v1.batch.x)
    choices, weights = v1.batch.topk_idx, v1.batch.topk_weights

    def low(hook: bool) -> None:
        rows, _, handle, _, receive = buffer.low_latency_dispatch(
            x, choices, MOST, v1.layer.experts, use_fp8=False, return_recv_hook=hook
        )
        if receive is not None:
            receive()
        buffer.low_latency_combine(rows, choices, weights, handle)

    received, *_, of_bf16, _ = v1.dispatch(x)
    of_fp8 = v1.dispatch(codes)[4]
    buffer.dispatch(x, handle=of_fp8)
    low(False)
    assert buffer._communicators.lent._stream is None
    log: list[tuple[str, str]] = []
    names = ["bf16", "fp8", "members", "low"]
    made = [*buffer._communicators.all_normal(), *buffer._communicators.all_low()]
    for name, one in zip(names, made, strict=True):
        one.order.stream = Ordered(name, log)
    buffer._communicators.lent._stream = Ordered("lent", log)
    calls = {
        "bf16": [lambda: v1.dispatch(x), lambda: buffer.combine(received, of_bf16)],
        "fp8": [lambda: v1.dispatch(codes, async_finish=True), lambda: buffer.dispatch(codes, handle=of_fp8)],
        "members": [lambda: buffer.dispatch(x, handle=of_fp8)],
    }
    for name, some in calls.items():
        for call in some:
            call()
            assert log == [(name, "lent"), ("lent", name)], (name, log)
            log.clear()
    for hook in (False, True):
        low(hook)
        assert log == [("low", "lent"), ("lent", "low")] * 2, log
        log.clear()
    buffer.destroy()
    v2 = V2(rank, world)
    for most in (SMALL, MOST):
        rows, _, _, handle, _ = v2.dispatch(most)
        one = handle.routing.communicator
        one.order.stream, v2.buffer._communicators.lent._stream = Ordered("carries", log), Ordered("lent", log)
        v2.buffer.combine(rows, handle)
        v2.buffer.dispatch(v2.batch.x, handle=handle)
        v2.dispatch(most)
        assert log == [("carries", "lent"), ("lent", "carries")] * 3, (most, log)
        log.clear()
        v2.buffer._communicators.lent._stream = None
    v2.buffer.destroy()


def test_the_stream_that_callers_have_comes_before_and_behind_each_call(two: Any) -> None:
    two.run(check_lent)
