"""Ranks on NPUs, by their twin: the same calls as on CPUs bring the same bits, on memory of the NPU, in the order of the caller's stream."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
from moexpress import Communicator, Meeting, _native, errors
from tests import conftest, npus
from tests.conftest import Ranks
from tests.npus import both, clean, needs_twin, put, started

TOKENS, TOPK, HIDDEN, EXPERTS = 7, 3, 48, 8
SIZES = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": 8}
LIMIT = 240.0


PLACES = {"2 ranks": (2, 2), "4 ranks": (4, 4), "2 servers of 2": (4, 2)}


@pytest.fixture(params=PLACES.values(), ids=PLACES.keys())
def place(request: pytest.FixtureRequest) -> tuple[Ranks, int]:
    """Ranks, and how many of them a server has."""
    world, near = request.param
    return _group(world, near), near


def _group(world: int, near: int) -> Ranks:
    key = ("npu", world, near)
    return conftest._groups.setdefault(key, Ranks(world, None if near == world else near))


def _batch(rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tokens = TOKENS - rank
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)])
    topk_idx[0, 1] = -1
    return x, topk_idx, torch.rand(tokens, TOPK, generator=generator)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8)


def _same(here: Any, there: Any, what: str) -> None:
    if here is None or there is None:
        assert here is None and there is None, what
        return
    assert here.dtype == there.dtype and here.shape == there.shape, (
        what,
        here.dtype,
        there.dtype,
        here.shape,
        there.shape,
    )
    assert torch.equal(_bits(here), _bits(there)), what


NAMES = ("x", "scales", "topk_idx", "topk_weights", "source_token", "source_rank")


def _throughput(rank: int, world: int, near: int, library: str) -> None:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    cpus, npus_ = both(meeting, **SIZES)
    for seed in range(3):
        x, topk_idx, topk_weights = _batch(rank, seed)
        here = cpus.dispatch(x, topk_idx, topk_weights, alignment=4)
        there = npus_.dispatch(put(npu, x), put(npu, topk_idx), put(npu, topk_weights), alignment=4)
        assert (here.rows, here.expert_counts) == (there.rows, there.expert_counts)
        for name in NAMES:
            _same(getattr(here, name), getattr(there, name), name)
        y, weights, bias = here.x * 2, here.topk_weights, torch.randn_like(x)
        back = cpus.combine(y, here.handle, topk_weights=weights, bias=bias)
        again = npus_.combine(put(npu, y), there.handle, topk_weights=put(npu, weights), bias=put(npu, bias))
        _same(back.x, again.x, "sums")
        _same(back.topk_weights, again.topk_weights, "weights")
        cached, other = cpus.redispatch(x + 1, here.handle), npus_.redispatch(put(npu, x + 1), there.handle)
        _same(cached.x, other.x, "cached rows")
        in_rank = (topk_idx[:, :, None] // (EXPERTS // world) == torch.arange(world)).any(1)
        counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=EXPERTS).tolist()
        _same(
            cpus.dispatch_members(x, in_rank, counts).x,
            npus_.dispatch_members(put(npu, x), put(npu, in_rank), counts).x,
            "members",
        )
    assert npus_.stats()["rows_sent"] == cpus.stats()["rows_sent"]
    cpus.close()
    npus_.close()
    meeting.close()
    del here, there, back, again, cached, other
    gc.collect()
    clean(npu)


@needs_twin
def test_throughput_brings_what_cpu_ranks_bring(place: tuple[Ranks, int]) -> None:
    ranks, near = place
    ranks.run(_throughput, near, npus.library(), limit=LIMIT)


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 rows as a caller makes them."""
    scales = rows.float().abs().amax(1, keepdim=True).clamp(1e-3) / 127
    return (rows.float() / scales).round().to(torch.int8), scales


def _int8_rows(rank: int, world: int, near: int, library: str, hidden: int) -> None:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    cpus, npus_ = both(meeting, **SIZES | {"hidden": hidden}, element="int8")
    _, topk_idx, topk_weights = _batch(rank)
    x, scales = _int8(torch.randn(TOKENS - rank, hidden))
    there_idx, there_weights = put(npu, topk_idx), put(npu, topk_weights)
    here = cpus.dispatch(x, topk_idx, topk_weights, scales=scales)
    there = npus_.dispatch(put(npu, x), there_idx, there_weights, scales=put(npu, scales))
    for name in NAMES:
        _same(getattr(here, name), getattr(there, name), name)
    with pytest.raises(errors.InvalidArgument, match="scales is a NoneType"):
        npus_.dispatch(put(npu, x), there_idx)
    # Rows and scales that came lie as they travel: they are read where they lie.
    packed, came = npus_.order.packed, (there.x, there.scales)
    assert (
        packed.of(*came)[0].data_ptr() == there.x.data_ptr() != packed.of(there.x, there.scales.clone())[0].data_ptr()
    )
    idx = torch.zeros(here.rows, TOPK, dtype=torch.int64)
    idx[:, 1:] = -1
    again, other = (
        cpus.dispatch(here.x.contiguous(), idx, scales=here.scales),
        npus_.dispatch(came[0], put(npu, idx), scales=came[1]),
    )
    _same(again.x, other.x, "codes")
    _same(again.scales, other.scales, "scales")
    y = here.x.bfloat16()
    _same(cpus.combine(y, here.handle).x, npus_.combine(put(npu, y), there.handle).x, "sums")
    for one in (cpus, npus_, meeting):
        one.close()
    clean(npu)


@needs_twin
@pytest.mark.parametrize("hidden", [48, 300], ids=["aligned", "odd"])
def test_int8_rows_and_their_scales_travel(place: tuple[Ranks, int], hidden: int) -> None:
    ranks, near = place
    ranks.run(_int8_rows, near, npus.library(), hidden, limit=LIMIT)


def _low_latency(rank: int, world: int, near: int, library: str, element: str, at_dispatch: bool, halves: bool) -> None:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    cpus, npus_ = both(meeting, **SIZES, element=element, low_latency=True)
    stats = [put(npu, torch.zeros(EXPERTS // world, dtype=torch.int32)) for _ in range(2)]
    for seed in range(3):
        x, topk_idx, topk_weights = _batch(rank, seed)
        given = topk_weights if at_dispatch else None
        later = None if at_dispatch else topk_weights
        results = []
        for number, one in enumerate((cpus, npus_)):
            sent_x, idx, first, last = (None if t is None else put(npu, t) for t in (x, topk_idx, given, later))
            if halves:
                sent = one.in_low_latency.send_dispatch(sent_x, idx, first, stats[number])
                # Choices and weights are the caller's again, rows are not.
                idx.fill_(-1)
                if first is not None:
                    first.zero_()
                got = sent.receive()
            else:
                got = one.in_low_latency.dispatch(sent_x, idx, first, stats[number])
            y = put(npu, torch.zeros(got.x.shape, dtype=torch.bfloat16))
            for expert, rows in enumerate(got.expert_counts.tolist()):
                part = got.x[expert, :rows].float()
                y[expert, :rows] = (part if got.scales is None else part * got.scales[expert, :rows]).bfloat16()
            if halves:
                back = one.send_combine(y, got.handle, last).receive()
            else:
                back = one.low_latency_combine(y, got.handle, last, out=npu.empty(tuple(x.shape), torch.bfloat16))
            results.append((got, back))
        (here, sums), (there, again) = results
        for name in ("expert_counts", "segments"):
            _same(getattr(here, name), getattr(there, name), name)
        for expert, rows in enumerate(here.expert_counts.tolist()):
            for name in ("x", "scales", "source_token"):
                some, other = getattr(here, name), getattr(there, name)
                if some is not None:
                    _same(some[expert, :rows], other[expert, :rows], name)
        _same(sums, again, "sums")
        _same(stats[0], stats[1], "stats")
    for closing in (cpus, npus_, meeting):
        closing.close()
    clean(npu)


@needs_twin
@pytest.mark.parametrize("halves", [False, True], ids=["at once", "in halves"])
@pytest.mark.parametrize("at_dispatch", [False, True], ids=["a row a choice", "a row a rank"])
@pytest.mark.parametrize("element", ["bf16", "int8"])
def test_low_latency_brings_what_cpu_ranks_bring(
    place: tuple[Ranks, int], element: str, at_dispatch: bool, halves: bool
) -> None:
    ranks, near = place
    ranks.run(_low_latency, near, npus.library(), element, at_dispatch, halves, limit=LIMIT)


def _masked(rank: int, world: int, near: int, library: str) -> list[int]:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    one = Communicator(meeting, **SIZES, device="npu", low_latency=True)
    x, topk_idx, topk_weights = (put(npu, tensor) for tensor in _batch(rank))
    gone = world - 1
    if rank != gone:
        one.mask_rank(gone)
        got = one.low_latency_dispatch(x, topk_idx)
        back = one.low_latency_combine(put(npu, torch.ones_like(got.x)), got.handle, topk_weights)
        kept = (topk_idx >= 0) & (topk_idx < gone * (EXPERTS // world))
        expected = (topk_weights * kept).double().sum(1)
        torch.testing.assert_close(back[:, 0].double(), expected, atol=0.02, rtol=0.02)
    mask = one.low_latency_mask
    meeting.barrier()
    one.rejoin()
    got = one.low_latency_dispatch(x, topk_idx)
    assert int(got.expert_counts.sum()) > 0
    one.close()
    meeting.close()
    clean(npu)
    return mask


@needs_twin
def test_a_masked_rank_is_left_out_until_all_rejoin() -> None:
    assert _group(4, 4).run(_masked, 4, npus.library(), limit=LIMIT) == [[3], [3], [3], []]


def _bad(rank: int, world: int, near: int, library: str) -> None:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    with pytest.raises(errors.InvalidArgument, match=r"far is loop, allowed: roce" if near < world else "pulled"):
        Communicator(meeting, **SIZES, device="npu", far="loop", placement="pulled" if near == world else "ring")
    with pytest.raises(errors.Unsupported, match="NPUs have no FP8"):
        Communicator(meeting, **SIZES, device="npu", far="roce", element="fp8")
    with pytest.raises(errors.InvalidArgument, match=r"device is (cpu|npu) on rank 1, allowed: (cpu|npu)"):
        Communicator(meeting, **SIZES, device="npu" if rank == 1 else "cpu")
    one = Communicator(meeting, **SIZES, device="npu", far="roce")
    x, topk_idx, topk_weights = (put(npu, tensor) for tensor in _batch(rank))
    wrong = put(npu, topk_idx)
    wrong[1, 0] = EXPERTS
    refused = [
        (lambda: one.dispatch(x, wrong, topk_weights), "token 1.*8"),
        (lambda: one.dispatch(x.float(), topk_idx), "dtype of x is torch.float32"),
        (lambda: one.dispatch(x, topk_idx[:1]), "shape of topk_idx"),
        (
            lambda: one.dispatch(torch.ones(x.shape).bfloat16(), topk_idx),
            "memory of a tensor is the host's, allowed: the NPU's",
        ),
        (lambda: one.dispatch(x, topk_idx, scales=topk_weights), "scales is given"),
        (lambda: one.low_latency_dispatch(x, topk_idx), "low_latency"),
    ]
    for call, text in refused:
        with pytest.raises((errors.InvalidArgument, errors.Unsupported), match=text):
            call()
    # Nothing has moved: the next call is as good as the first.
    got = one.dispatch(x, topk_idx, topk_weights)
    assert got.rows == got.x.shape[0] > 0
    one.close()
    meeting.close()
    clean(npu)


@needs_twin
def test_bad_input_is_refused_by_name_and_nothing_moves(place: tuple[Ranks, int]) -> None:
    ranks, near = place
    ranks.run(_bad, near, npus.library(), limit=LIMIT)


def _behind(rank: int, world: int, near: int, library: str) -> None:
    """What a caller's stream is still to bring is there when a call reads it, and memory that torch has handed out is his until then."""
    npu = started(rank, world, near, library)
    meeting = Meeting()
    one = Communicator(meeting, **SIZES, device="npu")
    x, topk_idx, topk_weights = (put(npu, tensor) for tensor in _batch(rank))
    expected = one.dispatch(x, topk_idx, topk_weights).x
    trash: list[torch.Tensor] = []

    class Late(npus.TwinNpu):
        """As an allocator does that gives memory back to its stream: something that was enqueued before still writes there."""

        def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = super().empty(shape, dtype)
            trash.append(put(npu, torch.full(shape, 3).to(dtype)))
            _native.Twin.copy(tensor.data_ptr(), trash[-1].data_ptr(), tensor.nbytes)
            return tensor

    one.order._npu = Late(rank)
    for number in range(10):
        now, idx = put(npu, torch.zeros_like(x)), put(npu, torch.full_like(topk_idx, -1))
        _native.Twin.copy(now.data_ptr(), x.data_ptr(), x.nbytes)
        _native.Twin.copy(idx.data_ptr(), topk_idx.data_ptr(), idx.nbytes)
        _same(one.dispatch(now, idx, topk_weights).x, expected, "rows")
        assert len(trash) == number + 1
    _native.Twin.synchronize()
    one.close()
    meeting.close()
    clean(npu)


@needs_twin
def test_calls_and_results_come_behind_the_callers_stream() -> None:
    _group(2, 2).run(_behind, 2, npus.library(), limit=LIMIT)


def _recovers_behind(rank: int, world: int, near: int, library: str) -> None:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    one = Communicator(meeting, **SIZES, device="npu")
    late = put(npu, torch.ones(32 << 20, dtype=torch.uint8))
    places = [put(npu, torch.zeros_like(late)) for _ in range(8)]
    for goes_on in (one.recover, one.rejoin):
        for place in places:
            _native.Twin.copy(place.data_ptr(), late.data_ptr(), late.nbytes)
        goes_on()
        assert bool(places[-1].all()), "it went on before what the caller's stream held"
        places[-1].zero_()
    _native.Twin.synchronize()
    one.close()
    meeting.close()
    clean(npu)


@needs_twin
def test_a_recovery_comes_behind_the_callers_stream() -> None:
    """Replays of graphs are there, whose kernels must not run into the next generation."""
    _group(2, 2).run(_recovers_behind, 2, npus.library(), limit=LIMIT)


def _unfollowed(rank: int, world: int, near: int, library: str) -> int:
    """As above, with the order broken on purpose: how often other bytes came."""
    npu = started(rank, world, near, library)
    meeting = Meeting()
    one = Communicator(meeting, **SIZES, device="npu")
    other = _native.Endpoint.stream(one.native)
    one.order.current = lambda: other
    x, topk_idx, topk_weights = (put(npu, tensor) for tensor in _batch(rank))
    misses = 0
    for _ in range(10):
        now = put(npu, torch.zeros_like(x))
        _native.Twin.copy(now.data_ptr(), x.data_ptr(), x.nbytes)
        misses += int((one.dispatch(now, topk_idx, topk_weights).x == 0).any())
        _native.Twin.synchronize()
    one.close()
    meeting.close()
    return misses


@needs_twin
def test_a_call_that_follows_another_stream_is_found_out() -> None:
    assert sum(_group(2, 2).run(_unfollowed, 2, npus.library(), limit=LIMIT)) > 0


def _nothing_left(rank: int, world: int, near: int, library: str) -> None:
    npu = started(rank, world, near, library)
    gc.collect()
    before = _native.Twin.left()
    _low_latency(rank, world, near, library, "int8", False, True)
    _throughput(rank, world, near, library)
    gc.collect()
    assert _native.Twin.left() == before
    clean(npu)


@needs_twin
def test_nothing_is_left_of_closed_communicators_and_dropped_results(place: tuple[Ranks, int]) -> None:
    ranks, near = place
    ranks.run(_nothing_left, near, npus.library(), limit=LIMIT)


def _lost(rank: int, world: int, near: int, library: str, how: int) -> Any:
    npu = started(rank, world, near, library)
    meeting = Meeting(timeout=60)
    one = Communicator(meeting, **SIZES, device="npu", far="roce", timeout=5)
    x, topk_idx, topk_weights = (put(npu, tensor) for tensor in _batch(rank))
    one.dispatch(x, topk_idx, topk_weights)
    gone = world - 1
    if rank == gone:
        if how == signal.SIGSTOP:
            # Somebody has to let it go on, or end it: the test ends its processes.
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(3)
    began = time.monotonic()
    with pytest.raises(errors.OperationFailed) as failed:
        while time.monotonic() - began < 30:
            one.dispatch(x, topk_idx, topk_weights)
    with pytest.raises(errors.Poisoned):
        one.dispatch(x, topk_idx, topk_weights)
    lost = [gone] if near == world else [other for other in range(world) if other // near == gone // near]
    left = None
    if rank not in lost:
        one.recover(lost)
        got = one.dispatch(x, topk_idx, topk_weights)
        back = one.combine(put(npu, torch.ones_like(got.x)), got.handle).x
        reached = ((topk_idx[:, :, None] // (EXPERTS // world)) == torch.arange(world)).any(1)
        reached[:, lost] = False
        left = bool((back[:, 0] == reached.sum(1)).all())
        clean(npu)
    return failed.value.culprit, left


def _outcomes(ranks: Ranks, near: int, how: int) -> list[Any]:
    """What the ranks but the last say; the processes are ended."""
    try:
        if not ranks._processes:
            ranks._start()
        for pipe in ranks._pipes:
            pipe.send((_lost, (near, npus.library(), how)))
        said = []
        for pipe in ranks._pipes[:-1]:
            assert pipe.poll(LIMIT), "a rank waits for one that is lost"
            outcome = pipe.recv()
            assert outcome.error is None, outcome.trace
            said.append(outcome.value)
        return said
    finally:
        ranks.stop()


@needs_twin
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["ends", "stops"])
def test_a_rank_that_is_lost_is_named_and_the_others_go_on(how: int) -> None:
    assert _outcomes(Ranks(4), 4, how) == [(3, True)] * 3


@needs_twin
def test_a_server_that_is_lost_is_left_behind() -> None:
    assert _outcomes(Ranks(4, 2), 2, signal.SIGKILL) == [(3, True), (3, True), (3, None)]


class _Interrupted(Exception):
    pass


def _interrupted(rank: int, world: int, near: int, library: str) -> None:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    one = Communicator(meeting, **SIZES, device="npu", timeout=8)
    x, topk_idx, topk_weights = (put(npu, tensor) for tensor in _batch(rank))
    one.dispatch(x, topk_idx, topk_weights)
    if rank == 0:

        def interrupt(*_: object) -> None:
            raise _Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(_Interrupted):
            one.dispatch(x, topk_idx, topk_weights)
        assert time.monotonic() - began < 6
        # The others do not come, so the kernels wait to their deadline; and the caller's stream for them.
        _native.Twin.synchronize()
        assert time.monotonic() - began > 6
        # What is enqueued now to give the memory away comes behind the kernels.
        del x, topk_idx, topk_weights
        gc.collect()
    meeting.barrier()
    one.recover()
    x, topk_idx, topk_weights = (put(npu, tensor) for tensor in _batch(rank))
    assert one.dispatch(x, topk_idx, topk_weights).rows > 0
    one.close()
    meeting.close()
    clean(npu)


@needs_twin
def test_after_an_interrupt_the_callers_stream_waits_for_the_kernels() -> None:
    _group(2, 2).run(_interrupted, 2, npus.library(), limit=LIMIT)


# Without NPUs.


def test_what_is_missing_for_npus_is_named() -> None:
    with pytest.raises(errors.Unsupported) as refused:
        Communicator(**SIZES, device="npu")
    text = str(refused.value)
    assert "torch_npu cannot be imported" in text and "install" in text
    assert "libascendcl.so is missing: install CANN" in text
    assert isinstance(refused.value, NotImplementedError)


@pytest.mark.parametrize("device", ["npu:x", "npu:-1", "npu:", "npu:99999"])
def test_a_name_that_is_no_npu_is_refused(device: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="device is"):
        Communicator(**SIZES, device=device)


def test_torch_npu_is_not_imported_by_others() -> None:
    import subprocess
    import sys

    text = """
import sys
class Refuses:
    def find_spec(self, name, *_):
        assert name.split(".")[0] != "torch_npu", "torch_npu was looked for"
sys.meta_path.insert(0, Refuses())
import moexpress, deep_ep
from moexpress import Communicator
try:
    Communicator(experts=2, topk=1, hidden=16, device="cpu")
except moexpress.errors.InvalidArgument:
    pass
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)
