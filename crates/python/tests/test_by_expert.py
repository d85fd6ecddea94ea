"""Rows by expert from one call, and their combine: on CPU ranks and GPUs against the oracle, on NPUs' twin against CPU ranks.

Those of GPUs are skipped, and counted so, on machines without two of them.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import oracle
import oracle_elastic
import pytest
import torch
from deep_ep.utils.math import per_token_cast_to_fp8
from gpus import LIMIT, device, needs_two
from moexpress import ByExpert, Communicator, LowReceived, Meeting, Received, adapter, errors
from tests import npus
from tests.npus import both, clean, needs_twin, put, started
from tests.test_npu import EXPERTS, SIZES, _batch, _group, _same

TOKENS = [37, 0, 64, 5]
MOST = 64


def layer_of(world: int) -> oracle.Layer:
    return oracle.Layer(world=world, experts=8, topk=4, hidden=256)


def make(layer: oracle.Layer, where: torch.device, **options: Any) -> Communicator:
    sizes = {"experts": layer.experts, "topk": layer.topk, "hidden": layer.hidden, "max_tokens": MOST}
    return Communicator(device=where, **sizes, **options)


def parts(x: torch.Tensor, element: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as they travel, and their scales."""
    return per_token_cast_to_fp8(x) if element == "fp8" else (x, None)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def numbers(told: ByExpert) -> tuple[list[int], list[int]]:
    """First slots and rows of experts, wherever they are."""
    if told.device_counts is None:
        return told.first, told.counts
    assert told.first == [] and told.counts == []
    first, counts = (one.cpu() for one in told.device_counts)
    assert first.dtype == counts.dtype == torch.int32
    return first.tolist(), counts.tolist()


class Expected:
    """What a rank is to receive of all ranks' batches."""

    def __init__(self, layer: oracle.Layer, rank: int, alignment: int, element: str) -> None:
        self.layer, self.rank, self.alignment = layer, rank, alignment
        self.all = oracle.batches(layer, TOKENS[: layer.world])
        self.rows = oracle.arrived(layer, self.all, rank)
        self.expanded = oracle_elastic.expanded(layer, self.rows, alignment)
        self.slots = self.expanded.slots(self.rows)
        self.element = element

    def check_rows(
        self, got: Received | LowReceived, scale: float = 1.0, room: int | None = None, zeros: bool = True
    ) -> None:
        """Rows of all batches times ``scale``, and scales with them; with ``zeros`` between experts and up to ``room``."""
        is_row = torch.tensor([pick is not None for pick in self.expanded.choices], dtype=torch.bool)
        sent = [parts(each.x * scale, self.element) for each in self.all]
        for mine, one in ((got.x, [each[0] for each in sent]), (got.scales, [each[1] for each in sent])):
            if mine is None:
                assert one[0] is None
                continue
            wanted = oracle.gathered([part.view(torch.uint8) for part in one], self.rows)  # type: ignore[union-attr]
            placed = self.expanded.of(wanted)
            rows = len(placed) if room is None else room
            assert len(mine) == rows and torch.equal(bits(mine)[: len(placed)][is_row], placed[is_row])
            if zeros:
                assert torch.equal(bits(mine)[: len(placed)], placed)
                assert not bits(mine)[len(placed) :].any()

    def check_places(self, told: ByExpert | None, worst_rows: int = 0) -> None:
        """``worst_rows``: rows that there is room for, where the host is not to know how many come."""
        assert told is not None
        assert (told.device_counts is None) == (worst_rows == 0)
        if worst_rows:
            rows = len(self.slots)
            assert told.slots.shape == (worst_rows, self.layer.topk) and (told.slots[rows:] == -1).all()
            told = ByExpert(*numbers(told), told.slots[:rows], told.offsets)
        layer, local = self.layer, self.layer.local
        ends = torch.tensor([-(-count // self.alignment) * self.alignment for count in self.rows.counts]).cumsum(0)
        assert told.first == [0, *ends.tolist()] and told.counts == self.rows.counts
        assert torch.equal(told.slots.cpu(), self.slots) and told.slots.dtype == torch.int32
        choices, sources = self.rows.topk_idx, self.rows.source_rank
        for source in range(layer.world):
            for expert in range(local):
                before = int((choices[sources < source] == expert).sum())
                assert int(told.offsets[source, expert]) == told.first[expert] + before
        assert told.offsets.dtype == torch.int32 and told.offsets.shape == (layer.world, local)

    def check_weights(self, got: Received, told: bool) -> None:
        """Of all slots, 0 where one is no choice's; ``told``: of rows whose choices travelled."""
        assert got.by_expert is not None
        weights = got.by_expert.weights
        if not told:
            assert weights is None
            return
        assert weights is not None and got.topk_weights is not None
        expected, places = torch.zeros(len(got.x)), got.by_expert.slots.cpu()
        expected[places[places >= 0].long()] = got.topk_weights.cpu()[places >= 0]
        assert torch.equal(weights.cpu(), expected)

    def results(self) -> torch.Tensor:
        """What experts give, NaN where no row is."""
        y = torch.full((len(self.expanded.choices), self.layer.hidden), torch.nan).bfloat16()
        for slot, pick in enumerate(self.expanded.choices):
            if pick is not None:
                row, choice = pick
                source, token = int(self.rows.source_rank[row]), int(self.rows.source_token[row])
                y[slot] = oracle_elastic.results(self.layer, source, token, choice)
        return y


def check(rank: int, world: int, element: str, alignment: int, placement: str, kind: str) -> None:
    layer, where = layer_of(world), torch.device("cpu") if kind == "cpu" else device(rank)
    expected = Expected(layer, rank, alignment, element)
    with make(layer, where, element=element, placement=placement) as communicator:
        batch = expected.all[rank]
        x, scales = parts(batch.x, element)
        scales = None if scales is None else scales.to(where)
        idx, weights = batch.topk_idx.to(where), batch.topk_weights.to(where)
        for zeros in (False, True):  # the second in memory that the first has left
            asked: dict[str, Any] = {"alignment": alignment, "by_expert": True, "zero_spare": zeros}
            got = communicator.dispatch(x.to(where), idx, weights, scales=scales, **asked)
            expected.check_rows(got, zeros=zeros)
            expected.check_places(got.by_expert)
            expected.check_weights(got, True)
            rows = len(expected.rows.source_rank)
            assert got.rows == rows and got.handle.rows == rows and got.handle.result_rows == len(got.x)
            assert torch.equal(got.source_token.cpu(), expected.rows.source_token)
            assert got.topk_idx is not None and torch.equal(got.topk_idx.cpu(), expected.rows.topk_idx)
            bias = torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(rank)).bfloat16()
            back = communicator.combine(
                expected.results().to(where), got.handle, topk_weights=got.topk_weights, bias=bias.to(where)
            )
            assert torch.equal(bits(back.x), bits(oracle_elastic.summed(layer, expected.all, rank, [bias], True)))
            assert back.topk_weights is not None
            assert torch.equal(back.topk_weights.cpu(), batch.topk_weights.masked_fill(batch.topk_idx < 0, 0))
            x2, scales2 = parts(batch.x * 2, element)
            scales2 = None if scales2 is None else scales2.to(where)
            cached = communicator.redispatch(x2.to(where), got.handle, scales=scales2)
            expected.check_rows(cached, 2.0, zeros=zeros)
            expected.check_places(cached.by_expert)
            expected.check_weights(cached, False)
            by_source = communicator.dispatch(x.to(where), idx, weights, scales=scales, alignment=alignment)
            assert by_source.by_expert is None and len(by_source.x) == rows
            del got, cached, by_source


def check_uncounted(rank: int, world: int, element: str, alignment: int, placement: str, spare: int, kind: str) -> None:
    """Room for ``spare`` rows more than come, whose number stays on the device."""
    layer, where = layer_of(world), torch.device("cpu") if kind == "cpu" else device(rank)
    expected = Expected(layer, rank, alignment, element)
    rows = len(expected.rows.source_rank)
    worst = min(rows + spare, world * MOST)
    room = worst * min(layer.topk, layer.local) + (alignment - 1) * layer.local
    room = -(-room // alignment) * alignment
    asked: dict[str, Any] = {"alignment": alignment, "by_expert": True, "worst_rows": worst, "device_counts": True}
    with make(layer, where, element=element, placement=placement) as communicator:
        batch = expected.all[rank]
        x, scales = parts(batch.x, element)
        scales = None if scales is None else scales.to(where)
        idx, weights = batch.topk_idx.to(where), batch.topk_weights.to(where)
        for zeros in (False, True):
            got = communicator.dispatch(x.to(where), idx, weights, scales=scales, zero_spare=zeros, **asked)
            expected.check_rows(got, room=room, zeros=zeros)
            expected.check_places(got.by_expert, worst)
            expected.check_weights(got, True)
            assert got.rows == worst and got.handle.rows == worst and got.handle.result_rows == room
            assert got.device_counts is not None and got.device_counts[0].tolist() == [rows]
            assert got.topk_idx is not None and torch.equal(got.topk_idx[:rows].cpu(), expected.rows.topk_idx)
            assert (got.topk_idx[rows:] == -1).all()
            y = torch.full((room, layer.hidden), torch.nan).bfloat16()
            y[: len(expected.results())] = expected.results()
            back = communicator.combine(y.to(where), got.handle, topk_weights=got.topk_weights)
            assert torch.equal(bits(back.x), bits(oracle_elastic.summed(layer, expected.all, rank, [], True)))
            assert back.topk_weights is not None
            assert torch.equal(back.topk_weights.cpu(), batch.topk_weights.masked_fill(batch.topk_idx < 0, 0))
            x2, scales2 = parts(batch.x * 2, element)
            scales2 = None if scales2 is None else scales2.to(where)
            cached = communicator.redispatch(x2.to(where), got.handle, scales=scales2)
            expected.check_rows(cached, 2.0, room, zeros)
            expected.check_places(cached.by_expert, worst)
            expected.check_weights(cached, False)
            del got, cached


@pytest.mark.parametrize(("element", "placement"), [("bf16", "ring"), ("fp8", "direct")])
@pytest.mark.parametrize(("alignment", "spare"), [(1, 0), (3, 7), (16, 4 * MOST)])
def test_rows_stand_so_where_counts_stay(ranks: Any, element: str, alignment: int, placement: str, spare: int) -> None:
    ranks.run(check_uncounted, element, alignment, placement, spare, "cpu")


@needs_two
@pytest.mark.parametrize(("alignment", "spare"), [(1, 0), (16, 4 * MOST)])
@pytest.mark.parametrize("element", ["bf16", "fp8"])
@pytest.mark.parametrize("placement", ["ring", "direct", "pulled"])
def test_rows_stand_so_on_gpus_where_counts_stay(
    two: Any, element: str, alignment: int, placement: str, spare: int
) -> None:
    two.run(check_uncounted, element, alignment, placement, spare, "cuda", limit=LIMIT)


def check_low(rank: int, world: int, element: str, alignment: int, kind: str) -> None:
    """Low latency brings the same packed."""
    layer, where = layer_of(world), torch.device("cpu") if kind == "cpu" else device(rank)
    expected = Expected(layer, rank, alignment, element)
    with make(layer, where, element=element, low_latency=True) as communicator:
        batch, rows = expected.all[rank], len(expected.rows.source_rank)
        x, scales = parts(batch.x, element)
        idx, weights = batch.topk_idx.to(where), batch.topk_weights.to(where)
        for zeros, counted in ((False, False), (True, False), (False, True), (True, True)):
            asked: dict[str, Any] = {"packed": alignment, "zero_spare": zeros, "host_counts": counted}
            if scales is not None:
                asked["scales"] = scales.to(where)
            got = communicator.low_latency_dispatch(x.to(where), idx, weights, **asked)
            assert got.handle is not None and got.handle.order == (alignment, zeros)
            expected.check_rows(got, room=len(got.x), zeros=zeros)
            assert got.slots is not None and got.first_slots is not None and got.slot_weights is not None
            assert got.topk_idx is not None and got.topk_weights is not None and got.source_rank is not None
            assert torch.equal(got.slots[:rows].cpu(), expected.slots) and (got.slots[rows:] == -1).all()
            ends = torch.tensor([-(-count // alignment) * alignment for count in expected.rows.counts]).cumsum(0)
            assert got.first_slots.tolist() == [0, *ends.tolist()]
            assert got.expert_counts.tolist() == expected.rows.counts
            placed = expected.expanded.weights(expected.rows)
            assert (
                torch.equal(got.slot_weights[: len(placed)].cpu(), placed) and not got.slot_weights[len(placed) :].any()
            )
            assert torch.equal(got.topk_idx[:rows].cpu(), expected.rows.topk_idx) and (got.topk_idx[rows:] == -1).all()
            assert torch.equal(got.source_rank[:rows].cpu(), expected.rows.source_rank)
            assert torch.equal(got.source_token[:rows].cpu(), expected.rows.source_token)
            taken = len(expected.expanded.choices)
            assert got.handle.rows == (rows if counted or kind == "cpu" else None)
            assert got.handle.result_rows == (taken if counted or kind == "cpu" else len(got.x))
            y = torch.full((got.handle.result_rows, layer.hidden), torch.nan).bfloat16()
            y[:taken] = expected.results()
            sums = communicator.low_latency_combine(y.to(where), got.handle)
            assert torch.equal(bits(sums), bits(oracle_elastic.summed(layer, expected.all, rank, [], True)))
            ones = torch.ones_like(batch.topk_weights).to(where)
            once = communicator.low_latency_combine(y.to(where), got.handle, ones)
            assert torch.equal(bits(once), bits(oracle_elastic.summed(layer, expected.all, rank, [], False)))
            if taken:
                with pytest.raises(errors.InvalidArgument, match="at least"):
                    communicator.low_latency_combine(y[:-1].to(where), got.handle)
            del got
        with pytest.raises(errors.InvalidArgument, match="packed is 0, allowed: 1 to"):
            communicator.low_latency_dispatch(batch.x.to(where), idx, packed=0)
        with pytest.raises(errors.InvalidArgument, match="by_source is True, allowed: without packed only"):
            communicator.low_latency_dispatch(batch.x.to(where), idx, packed=4, by_source=True)
        with pytest.raises(errors.InvalidArgument, match="zero_spare is True, allowed: with packed only"):
            communicator.low_latency_dispatch(batch.x.to(where), idx, zero_spare=True)
        for lies, what in ((adapter.BY_SOURCE, "rows of all sources"), ((alignment, False), "rows by expert")):
            # More rows than results are to have are refused by the kernel: nobody reads beyond the caller's. Ranks that get fewer hear nothing.
            calls, refused = communicator.in_low_latency, kind == "cuda" and rows > 1
            with pytest.raises(errors.OperationFailed, match=what) if refused else nullcontext():
                calls.dispatch(
                    x.to(where),
                    idx,
                    scales=None if scales is None else scales.to(where),
                    topk_weights=weights,
                    lies=lies,
                    host_counts=True,
                    most_rows=1 if kind == "cuda" else None,
                )


@pytest.mark.parametrize("element", ["bf16", "fp8"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_low_latency_brings_the_same_packed(ranks: Any, element: str, alignment: int) -> None:
    ranks.run(check_low, element, alignment, "cpu")


@needs_two
@pytest.mark.parametrize("element", ["bf16", "fp8"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_low_latency_brings_the_same_packed_on_gpus(two: Any, element: str, alignment: int) -> None:
    two.run(check_low, element, alignment, "cuda", limit=LIMIT)


def check_captured(rank: int, world: int, placement: str) -> None:
    """A captured dispatch and its combine follow the choices of each replay."""
    layer, where = layer_of(world), device(rank)
    expected = Expected(layer, rank, 8, "bf16")
    batch, worst = expected.all[rank], world * MOST
    other = torch.roll(batch.topk_idx, 1, 0)
    asked: dict[str, Any] = {"alignment": 8, "by_expert": True, "zero_spare": True}
    with make(layer, where, placement=placement) as communicator:
        x, idx, weights = batch.x.to(where), batch.topk_idx.to(where), batch.topk_weights.to(where)
        communicator.dispatch(x, idx, weights, worst_rows=worst, device_counts=True, **asked)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = communicator.dispatch(x, idx, weights, worst_rows=worst, device_counts=True, **asked)
            back = communicator.combine(got.x, got.handle, topk_weights=got.topk_weights)
        for choices in (batch.topk_idx, other, batch.topk_idx):
            idx.copy_(choices)
            graph.replay()
            torch.cuda.synchronize()
            plain = communicator.dispatch(x, idx, weights, **asked)
            sums = communicator.combine(plain.x, plain.handle, topk_weights=plain.topk_weights)
            told, exact = got.by_expert, plain.by_expert
            assert told is not None and told.device_counts is not None and exact is not None
            assert numbers(told) == (exact.first, exact.counts)
            assert torch.equal(told.slots[: plain.rows], exact.slots) and (told.slots[plain.rows :] == -1).all()
            assert torch.equal(bits(got.x)[: len(plain.x)], bits(plain.x)) and not bits(got.x)[len(plain.x) :].any()
            assert torch.equal(bits(back.x), bits(sums.x))
        del got, back, plain, sums, told, exact


@needs_two
@pytest.mark.parametrize("placement", ["ring", "direct"])
def test_captured_rows_follow_the_choices(two: Any, placement: str) -> None:
    two.run(check_captured, placement, limit=LIMIT)


@pytest.mark.parametrize("element", ["bf16", "fp8"])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("placement", ["ring", "direct"])
def test_rows_stand_as_the_oracle_says(ranks: Any, element: str, alignment: int, placement: str) -> None:
    ranks.run(check, element, alignment, placement, "cpu")


@needs_two
@pytest.mark.parametrize("element", ["bf16", "fp8"])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("placement", ["ring", "direct", "pulled"])
def test_rows_stand_so_on_gpus(two: Any, element: str, alignment: int, placement: str) -> None:
    two.run(check, element, alignment, placement, "cuda", limit=LIMIT)


def check_refusals(rank: int, world: int) -> None:
    layer = layer_of(world)
    expected = Expected(layer, rank, 8, "bf16")
    batch = expected.all[rank]
    with make(layer, torch.device("cpu")) as communicator:
        call = communicator.dispatch
        with pytest.raises(errors.InvalidArgument, match="worst-case rows of a dispatch by expert is 9, allowed: 0"):
            call(batch.x, batch.topk_idx, by_expert=True, worst_rows=9)
        with pytest.raises(errors.InvalidArgument, match="worst-case rows of a dispatch with device counts is 0"):
            call(batch.x, batch.topk_idx, by_expert=True, device_counts=True)
        with pytest.raises(errors.InvalidArgument, match="expert alignment of a dispatch by expert is"):
            call(batch.x, batch.topk_idx, by_expert=True, alignment=(1 << 30) // layer.local + 1)
        with pytest.raises(errors.InvalidArgument, match="by_expert is "):
            call(batch.x, batch.topk_idx, by_expert="yes")  # type: ignore[arg-type]
        got = call(batch.x, batch.topk_idx, batch.topk_weights, alignment=8, by_expert=True, zero_spare=True)
        if len(got.x):
            with pytest.raises(errors.InvalidArgument, match=f"rows of y is {len(got.x) - 1}, allowed: at least"):
                communicator.combine(got.x[:-1], got.handle)
            weights = torch.zeros(len(got.x), layer.topk)
            with pytest.raises(errors.InvalidArgument, match="topk_weights"):
                communicator.combine(got.x, got.handle, topk_weights=weights)
        # What was refused has cost nothing.
        expected.check_rows(got)
        back = communicator.combine(expected.results(), got.handle)
        assert torch.equal(back.x, oracle_elastic.summed(layer, expected.all, rank, [], True))


def test_what_cannot_be_is_refused_by_name(two: Any) -> None:
    two.run(check_refusals)


def check_npus(rank: int, world: int, near: int, library: str) -> None:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    cpus, npus_ = both(meeting, **SIZES)
    for seed in range(2):
        x, topk_idx, topk_weights = _batch(rank, seed)
        asked: dict[str, Any] = {"alignment": 4, "by_expert": True, "zero_spare": True}
        if seed == 1:  # counts stay where they are
            asked |= {"worst_rows": 16, "device_counts": True}
        here = cpus.dispatch(x, topk_idx, topk_weights, **asked)
        there = npus_.dispatch(put(npu, x), put(npu, topk_idx), put(npu, topk_weights), **asked)
        cached, other = cpus.redispatch(x + 1, here.handle), npus_.redispatch(put(npu, x + 1), there.handle)
        for mine, theirs in ((here, there), (cached, other)):
            told, also = mine.by_expert, theirs.by_expert
            assert told is not None and also is not None
            assert (told.device_counts is None) == (also.device_counts is None) == (seed == 0)
            first, counts = numbers(told)
            assert (first, counts) == numbers(also) and len(first) == EXPERTS // world + 1
            _same(mine.x, theirs.x, "x")
            _same(told.slots, also.slots, "slots")
            _same(told.offsets, also.offsets, "offsets")
        back = cpus.combine(here.x * 2, here.handle, topk_weights=here.topk_weights)
        again = npus_.combine(put(npu, here.x * 2), there.handle, topk_weights=there.topk_weights)
        _same(back.x, again.x, "sums")
        _same(back.topk_weights, again.topk_weights, "weights")
    cpus.close()
    npus_.close()
    meeting.close()
    del here, there, cached, other, back, again, mine, theirs, told, also
    gc.collect()
    clean(npu)


@needs_twin
@pytest.mark.parametrize("near", [2, 1])
def test_npus_bring_what_cpu_ranks_bring(near: int) -> None:
    _group(2, near).run(check_npus, near, npus.library(), limit=240.0)
