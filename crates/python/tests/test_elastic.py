"""deep_ep.ElasticBuffer: dispatch, expanded and not, cached, and combine of both, against an oracle."""

from __future__ import annotations

from typing import Any

import deep_ep
import oracle
import oracle_elastic
import pytest
import torch
import torch.distributed as dist
from deep_ep._small import most_small
from deep_ep.utils.math import align, per_token_cast_to_fp8
from moexpress import adapter, errors

TOKENS = [37, 0, 64, 5]
MOST = 64
STATS = 5
"""What the statistics of experts begin with."""


def layer_of(world: int) -> oracle.Layer:
    return oracle.Layer(world=world, experts=8, topk=4, hidden=384)


def make_buffer(large: bool = False, **options: Any) -> deep_ep.ElasticBuffer:
    """``large``: all batches go by throughput mode."""
    options = {"num_max_tokens_per_rank": MOST, "hidden": 384, "explicitly_destroy": True, **options}
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, **options)
    if large:
        buffer._calls.small.most_tokens = 0
    return buffer


def cast(x: torch.Tensor, kind: str) -> Any:
    """Rows as a caller has them: packed scales are four UE8M0 bytes, of 32 elements each."""
    if kind == "bf16":
        return x
    codes, scales = per_token_cast_to_fp8(x)
    return (codes, scales.view(torch.int32) if kind == "fp8, packed" else scales)


def parts(x: Any) -> list[torch.Tensor]:
    """Codes as bytes, which can be compared, and scales."""
    tensors = x if isinstance(x, tuple) else (x,)
    return [one.view(torch.uint8) if one.dtype is torch.float8_e4m3fn else one for one in tensors]


def equal(got: Any, expected: list[torch.Tensor], rows: torch.Tensor | None = None) -> None:
    """All parts begin with what is expected, and are 0 beyond. ``rows``: bool, which of what is expected are rows: nothing else is compared."""
    for mine, theirs in zip(parts(got), expected, strict=True):
        assert mine.dtype == theirs.dtype
        if rows is not None:
            assert torch.equal(mine[: len(theirs)][rows], theirs[rows])
            continue
        assert torch.equal(mine[: len(theirs)], theirs)
        assert not mine[len(theirs) :].any()


class Expectation:
    """What a rank is to receive of a batch."""

    def __init__(self, layer: oracle.Layer, rank: int, kind: str, alignment: int) -> None:
        self.all = oracle.batches(layer, TOKENS[: layer.world])
        self.mine = self.all[rank]
        self.x = cast(self.mine.x, kind)
        self.rows = oracle.arrived(layer, self.all, rank)
        sent = zip(*(parts(cast(each.x, kind)) for each in self.all), strict=True)
        self.received = [oracle.gathered(list(part), self.rows) for part in sent]
        self.expanded = oracle_elastic.expanded(layer, self.rows, alignment)
        self.slots = self.expanded.slots(self.rows)
        self.psum_ranks = oracle_elastic.from_each(layer, self.all, rank)


def check_handle(
    handle: deep_ep.EPHandle, layer: oracle.Layer, expected: Expectation, alignment: int, sync: bool
) -> None:
    counts = [align(count, alignment) for count in expected.rows.counts]
    rows, worst = len(expected.rows.source_rank), layer.world * MOST
    assert handle.num_recv_tokens == (rows if sync else worst)
    room = worst * min(layer.topk, layer.local) + (alignment - 1) * layer.local
    assert handle.num_expanded_tokens == (sum(counts) if sync else align(room, alignment))
    assert handle.num_recv_tokens_per_expert_list == (counts if sync else [])
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == expected.psum_ranks
    psum = torch.tensor(counts).cumsum(0).tolist()
    assert handle.psum_num_recv_tokens_per_expert.tolist() == (expected.expanded.psum if handle.do_expand else psum)
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == expected.rows.counts
    slots = expected.slots if handle.do_expand else None
    told = oracle_elastic.metadata(layer, expected.rows, MOST, slots)
    assert handle.recv_src_metadata.shape == (handle.num_recv_tokens, layer.topk + 2)
    assert torch.equal(handle.recv_src_metadata[:rows], told) and (handle.recv_src_metadata[rows:] == -1).all()
    tensors = [handle.psum_num_recv_tokens_per_scaleup_rank, handle.psum_num_recv_tokens_per_expert]
    tensors += [handle.num_unaligned_recv_tokens_per_expert, handle.recv_src_metadata, handle.dst_buffer_slot_idx]
    assert {one.dtype for one in tensors} == {torch.int32}
    sent = handle.dst_buffer_slot_idx
    to = torch.where(handle.topk_idx < 0, -1, handle.topk_idx // layer.local)
    for other in range(layer.world):
        # One choice of each token that goes there has its number.
        assert sent[to == other].sort().values[-int((to == other).any(1).sum()) or MOST :].tolist() == list(
            range(int((to == other).any(1).sum()))
        )
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
    # Rows come by expert from the dispatch itself, whether the host knows how many there are or not.
    routing = handle.routing
    assert (routing.by_expert is not None) == handle.do_expand
    if handle.do_expand:
        small = isinstance(routing.native, adapter.LowHandle)
        assert routing.by_expert is not None and (routing.by_expert.device_counts is None) == (sync and not small)
        # The processor knows how many came in any case.
        known = sum(-(-count // alignment) * alignment for count in expected.rows.counts)
        assert routing.native.result_rows == (known if small else handle.num_expanded_tokens)


def check_dispatch(rank: int, world: int, kind: str, alignment: int, large: bool) -> None:
    layer, buffer = layer_of(world), make_buffer(large)
    expected = Expectation(layer, rank, kind, alignment)
    batch, rows = expected.mine, len(expected.rows.source_rank)
    for sync in (True, False):
        stats = torch.full((layer.local,), STATS, dtype=torch.int32)
        asked: dict[str, Any] = {
            "topk_idx": batch.topk_idx,
            "num_experts": layer.experts,
            "expert_alignment": alignment,
            "do_cpu_sync": sync,
            "cumulative_local_expert_recv_stats": stats,
        }
        x, idx, weights, handle, event = buffer.dispatch(expected.x, topk_weights=batch.topk_weights, **asked)
        assert event.event is None and isinstance(x, tuple) == (kind != "bf16")
        equal(x, expected.received)
        assert all(part.is_contiguous() for part in parts(x))
        assert torch.equal(idx[:rows], expected.rows.topk_idx) and (idx[rows:] == -1).all()
        equal(weights, [expected.rows.topk_weights])
        assert stats.tolist() == [STATS + count for count in expected.rows.counts]
        idx.fill_(7)  # callers write to it; the handle has its own
        check_handle(handle, layer, expected, alignment, sync)
        assert (handle.routing.arena is None) == (not large), "small batches go by low latency"

        asked |= {"do_expand": True, "use_tma_aligned_col_major_sf": True, "num_max_tokens_per_rank": MOST}
        # Without zeros first: they are asked for in memory that rows have left.
        x, *_ = buffer.dispatch(expected.x, topk_weights=batch.topk_weights, **asked)
        equal(x, [expected.expanded.of(part) for part in expected.received], expected.expanded.is_row)
        del x
        asked["do_zero_padding"] = True
        x, none, weights, handle, event = buffer.dispatch(
            expected.x, topk_weights=batch.topk_weights, async_with_compute_stream=True, **asked
        )
        event.current_stream_wait()
        assert none is None and len(parts(x)[0]) == handle.num_expanded_tokens
        equal(x, [expected.expanded.of(part) for part in expected.received])
        equal(weights, [expected.expanded.weights(expected.rows)])
        if kind != "bf16":
            assert x[1].stride() == (1, align(len(x[1]), 4)), "columns begin at multiples of 16 bytes"
        check_handle(handle, layer, expected, alignment, sync)
        assert (handle.routing.arena is None) == (not large), "expanded ones, too"
        assert buffer.dispatch(expected.x, **asked)[2] is None, "weights that were not sent"
    buffer.destroy()


@pytest.mark.parametrize(
    ("kind", "large"), [("bf16", False), ("bf16", True), ("fp8", False), ("fp8", True), ("fp8, packed", False)]
)
@pytest.mark.parametrize("alignment", [1, 16])
def test_dispatched_rows_are_those_of_the_oracle(ranks: Any, kind: str, alignment: int, large: bool) -> None:
    ranks.run(check_dispatch, kind, alignment, large)


def check_combine(rank: int, world: int, reduces_twice: bool, large: bool) -> None:
    layer, buffer = layer_of(world), make_buffer(large, allow_multiple_reduction=reduces_twice)
    expected = Expectation(layer, rank, "bf16", 8)
    batch, rows = expected.mine, expected.rows
    biases = [torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(2)]
    sent_weights = batch.topk_weights.masked_fill(batch.topk_idx < 0, 0)
    at = list(zip(rows.source_rank.tolist(), rows.source_token.tolist(), strict=True))
    for sync in (True, False):
        asked: dict[str, Any] = {"num_experts": layer.experts, "expert_alignment": 8, "do_cpu_sync": sync}
        x, _, weights, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, **asked)
        expanded = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, do_expand=True, **asked)
        # Gaps hold what must not count.
        y, every = torch.full_like(x, torch.nan), torch.full_like(expanded[0], torch.nan)
        y[: len(at)] = 0
        for row, (source, token) in enumerate(at):
            got = torch.zeros(layer.hidden)
            for choice in (rows.topk_idx[row] >= 0).nonzero()[:, 0].tolist():
                result = oracle_elastic.results(layer, source, token, choice)
                every[expected.slots[row, choice]] = result
                got += result.float()
            y[row] = got.bfloat16()
        for bias in (None, biases[0], tuple(biases), (biases[0], None), (None, biases[1]), (None, None)):
            given = bias if isinstance(bias, tuple) else [bias]
            listed = [one for one in given if one is not None]
            asynchronous = len(listed) == 1
            told = {"bias": bias, "async_with_compute_stream": asynchronous}
            compact = buffer.combine(y, handle, weights, **told)
            assert torch.equal(compact[0], oracle_elastic.summed(layer, expected.all, rank, listed, True))
            full = buffer.combine(every, expanded[3], expanded[2], **told)
            assert torch.equal(full[0], oracle_elastic.summed(layer, expected.all, rank, listed, reduces_twice))
            for _, back, event in (compact, full):
                assert torch.equal(back, sent_weights) and (event.event is not None) == asynchronous
        alone = buffer.combine(y, handle)
        assert torch.equal(alone[0], oracle_elastic.summed(layer, expected.all, rank, [], True)) and alone[1] is None
        full = buffer.combine(every, expanded[3])
        assert (
            torch.equal(full[0], oracle_elastic.summed(layer, expected.all, rank, [], reduces_twice))
            and full[1] is None
        )
        if large and not reduces_twice:
            # What GPUs do in its place: as good as rounded once.
            for listed in ([], biases[:1]):
                wanted = oracle_elastic.summed(layer, expected.all, rank, listed, False)
                once = buffer._calls._once(every, expanded[3], expanded[3].routing, None, listed, False)[0]
                twice = oracle_elastic.summed(layer, expected.all, rank, listed, True)
                if len(wanted):
                    others = [float((sums != wanted).float().mean()) for sums in (once, twice)]
                    assert others[0] < 0.01 < others[1]
                    torch.testing.assert_close(once, wanted, rtol=2**-7, atol=2**-12)
    buffer.destroy()


@pytest.mark.parametrize(("reduces_twice", "large"), [(True, True), (True, False), (False, True), (False, False)])
def test_combined_sums_are_those_of_the_oracle(ranks: Any, reduces_twice: bool, large: bool) -> None:
    ranks.run(check_combine, reduces_twice, large)


def check_default_type(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer(allow_multiple_reduction=False)
    batch = oracle.batches(layer, TOKENS[:world])[rank]
    expected = (batch.x.float() * (batch.topk_idx >= 0).sum(1, keepdim=True)).bfloat16()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        x, *_, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, num_experts=layer.experts, do_expand=True)
        assert torch.equal(buffer.combine(x, handle)[0], expected)
    finally:
        torch.set_default_dtype(before)
    buffer.destroy()


def test_small_results_by_choice_come_back_whatever_torch_s_default_type_is(two: Any) -> None:
    two.run(check_default_type)


def check_bound(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer(num_max_tokens_per_rank=600)
    batch, rows = oracle.batches(layer, TOKENS[:world])[rank], []
    for most in (512, 513):
        before = buffer.stats()["rows_by_low_latency"]
        x, *_, handle, _ = buffer.dispatch(
            batch.x, batch.topk_idx, num_experts=layer.experts, num_max_tokens_per_rank=most
        )
        rows.append(x)
        assert (buffer.stats()["rows_by_low_latency"] > before) == (most == 512) and len(x) > 0
        buffer.combine(x, handle)
    assert torch.equal(*rows)
    buffer.destroy()


def test_between_two_ranks_batches_of_512_tokens_are_small(two: Any) -> None:
    assert [most_small(world) for world in (1, 2, 3, 4, 5, 8)] == [512, 512, 256, 170, 128, 128]
    two.run(check_bound)


def check_cached(rank: int, world: int, large: bool) -> None:
    layer, buffer = layer_of(world), make_buffer(large)
    first = Expectation(layer, rank, "bf16", 4)
    batch, rows = first.mine, first.rows
    again = [(2 * each.x.float() - 1).bfloat16() for each in first.all]
    weights = [torch.rand(each.topk_weights.shape, generator=torch.Generator().manual_seed(7)) for each in first.all]
    carried = oracle.arrived(
        layer, [oracle.Batch(*one) for one in zip(again, [b.topk_idx for b in first.all], weights, strict=True)], rank
    )
    for sync in (True, False):
        asked: dict[str, Any] = {"num_experts": layer.experts, "expert_alignment": 4, "do_cpu_sync": sync}
        for expand in (False, True):
            # A cached dispatch asks for zeros by itself, whatever that of the handle did.
            zeros = expand and sync
            made = buffer.dispatch(
                batch.x, batch.topk_idx, batch.topk_weights, do_expand=expand, do_zero_padding=zeros, **asked
            )
            handle = made[3]
            assert not len(batch.x) or handle.topk_idx.data_ptr() != batch.topk_idx.data_ptr()
            for kind in ("bf16", "fp8"):
                sent = [parts(cast(x, kind)) for x in again]
                received = [oracle.gathered(list(part), rows) for part in zip(*sent, strict=True)]
                expanded = [first.expanded.of(part) for part in received]
                wanted, others = (expanded, received) if expand else (received, expanded)
                # Rows of a handle may be asked for in the other layout.
                other = buffer.dispatch(
                    cast(again[rank], kind), handle=handle, do_expand=not expand, do_zero_padding=not expand
                )
                equal(other[0], others)
                for own in (None, weights[rank]):
                    x, idx, back, same, _ = buffer.dispatch(
                        cast(again[rank], kind),
                        topk_weights=own,
                        handle=handle,
                        do_expand=expand,
                        do_zero_padding=expand,
                    )
                    equal(x, wanted)
                    assert same is handle and (back is None) == (own is None)
                    if own is not None:
                        equal(back, [first.expanded.weights(carried) if expand else carried.topk_weights])
                    if expand:
                        assert idx is None
                    else:
                        assert torch.equal(idx[: len(rows.topk_idx)], rows.topk_idx)
        kept = buffer.dispatch(batch.x, batch.topk_idx, do_handle_copy=False, **asked)[3]
        assert kept.topk_idx is batch.topk_idx
    buffer.destroy()


@pytest.mark.parametrize("large", [True, False])
def test_cached_dispatches_take_the_same_places(ranks: Any, large: bool) -> None:
    ranks.run(check_cached, large)


def check_widths(rank: int, world: int, large: bool, reduces_twice: bool) -> None:
    """Rows and results of 256 elements along handles of rows of 384: the same, cut."""
    layer, buffer = layer_of(world), make_buffer(large, allow_multiple_reduction=reduces_twice)
    batch = oracle.batches(layer, TOKENS[:world])[rank]
    bias, narrow = torch.randn(batch.x.shape).bfloat16(), batch.x[:, :256].contiguous()
    for expand, sync in ((False, True), (True, True), (False, False), (True, False)):
        asked: dict[str, Any] = {"num_experts": layer.experts, "do_expand": expand, "do_cpu_sync": sync}
        x, _, weights, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, **asked)
        # Gaps of expanded rows may hold anything.
        asked = {"handle": handle, "do_expand": expand, "do_zero_padding": expand}
        wanted = parts(buffer.dispatch(batch.x, **asked)[0])[0]
        y = (wanted * 3).contiguous()
        for _ in range(2):
            equal(buffer.dispatch(narrow, **asked)[0], [wanted[:, :256]])
            codes = buffer.dispatch(cast(narrow, "fp8"), **asked)[0]
            whole = buffer.dispatch(cast(batch.x, "fp8"), **asked)[0]
            equal(codes, [part[:, :columns] for part, columns in zip(parts(whole), (256, 2), strict=True)])
            for given in ({}, {"topk_weights": weights}, {"bias": bias}):
                cut = {name: one[:, :256].contiguous() if name == "bias" else one for name, one in given.items()}
                sums, back, _ = buffer.combine(y[:, :256].contiguous(), handle, **cut)
                of_all, back_too, _ = buffer.combine(y, handle, **given)
                assert torch.equal(sums, of_all[:, :256].contiguous())
                assert (back is None) == (back_too is None) and (back is None or torch.equal(back, back_too))
        for wrong, told in ((y[:, :256].float(), "dtype of x is torch.float32"), (y[:0, :256], "rows of x are 0")):
            if len(y):
                with pytest.raises(errors.InvalidArgument, match=told):
                    buffer.combine(wrong.contiguous(), handle)
        assert len(x) == len(y)
    buffer.destroy()


@pytest.mark.parametrize("reduces_twice", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_rows_of_another_width_go_along_a_handle(ranks: Any, large: bool, reduces_twice: bool) -> None:
    ranks.run(check_widths, large, reduces_twice)


class Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weights: Any, topk_idx: Any, buffer: Any, experts: int, into: list[Any]) -> Any:
        x, idx, weights, handle, _ = buffer.dispatch(x, topk_idx, weights, num_experts=experts)
        into += [idx, handle]
        ctx.buffer, ctx.handle = buffer, handle
        return x, weights

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weights, _ = ctx.buffer.combine(gradients[0].contiguous(), ctx.handle, gradients[1].contiguous())
        return x, weights, None, None, None, None


class Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Any, handle: Any, buffer: Any) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows = ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle, num_sms=ctx.handle.num_sms)[0]
        return rows, None, None


def check_gradients(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer()
    batch = oracle.batches(layer, TOKENS[:world])[rank]
    scale = torch.linspace(0.5, 1.5, layer.experts)
    grad = torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(3)).bfloat16()

    x, weights = batch.x.clone().requires_grad_(), batch.topk_weights.clone().requires_grad_()
    into: list[Any] = []
    rows, carried = Send.apply(x, weights, batch.topk_idx, buffer, layer.experts, into)
    expert = (into[0] + rank * layer.local).clamp(min=0)
    gain = (carried * scale[expert]).masked_fill(into[0] < 0, 0).sum(1, keepdim=True)
    Return.apply((rows.float() * gain).bfloat16(), into[1], buffer).backward(grad)

    alone, own = batch.x.clone().requires_grad_(), batch.topk_weights.clone().requires_grad_()
    gain = (own * scale[batch.topk_idx.clamp(min=0)]).masked_fill(batch.topk_idx < 0, 0).sum(1, keepdim=True)
    (alone.float() * gain).backward(grad.float())
    for got, expected in ((x.grad, alone.grad), (weights.grad, own.grad)):
        torch.testing.assert_close(got.float(), expected.float(), rtol=0.02, atol=0.05)
    buffer.destroy()


def test_gradients_go_back_along_the_handle(ranks: Any) -> None:
    ranks.run(check_gradients)
