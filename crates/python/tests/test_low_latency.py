"""deep_ep.Buffer in low latency: both halves, FP8 forms, hooks, zero copy, statistics, masks."""

from __future__ import annotations

import copy
import itertools
import os
import time
import weakref
from types import SimpleNamespace
from typing import Any

import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep._under_way import Sent, UnderWay
from deep_ep.utils.math import calc_diff, hash_tensor, per_token_cast_back
from moexpress import errors

MOST = 16
TOKENS = [16, 0, 9, 3]
HIDDEN = 512
FORMS = {
    "bf16": {"use_fp8": False},
    "fp8": {"use_fp8": True},
    "fp8, powers of two": {"use_fp8": True, "round_scale": True},
    "fp8, ue8m0": {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}


def make_buffer(**options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True, **options)


def layer_of(world: int) -> oracle.Layer:
    return oracle.Layer(world=world, experts=3 * world, topk=3, hidden=HIDDEN)


def weighted(batch: oracle.Batch, rows: torch.Tensor) -> torch.Tensor:
    """What comes back when experts return what they get: each token times the sum of its weights."""
    weights = batch.topk_weights.masked_fill(batch.topk_idx < 0, 0)
    return rows.float() * weights.sum(1, keepdim=True)


def check_shapes(rank: int, world: int, received: Any, counts: torch.Tensor, handle: Any, form: str) -> None:
    layer = layer_of(world)
    rows = world * MOST
    x, scales = received if isinstance(received, tuple) else (received, None)
    assert x.shape == (layer.local, rows, HIDDEN) and x.is_contiguous()
    assert counts.shape == (layer.local,) and counts.dtype == torch.int32
    src_info, layout_range, most, hidden, experts = handle
    assert (most, hidden, experts) == (MOST, HIDDEN, layer.experts)
    assert src_info.shape == (layer.local, rows) and src_info.dtype == torch.int32
    assert layout_range.shape == (layer.local, world) and layout_range.dtype == torch.int64
    if form == "bf16":
        assert scales is None and x.dtype == torch.bfloat16
        return
    packed = form == "fp8, ue8m0"
    columns = HIDDEN // 512 if packed else HIDDEN // 128
    assert x.dtype == torch.float8_e4m3fn
    assert scales.dtype == (torch.int32 if packed else torch.float32)
    assert scales.shape == (layer.local, rows, columns)
    # Column-major: consecutive rows lie side by side.
    assert scales.stride() == (columns * rows, 1, rows)


def check_batch(rank: int, world: int, form: str, hook: bool, zero_copy: bool) -> int:
    layer = layer_of(world)
    buffer = make_buffer()
    all_batches = oracle.batches(layer, TOKENS[:world], seed=world)
    batch = all_batches[rank]
    stats = torch.full((layer.local,), 7, dtype=torch.int32)
    waited = torch.zeros(world, dtype=torch.int64)
    hashes = 0
    for _ in range(3):
        received, counts, handle, event, receive = buffer.low_latency_dispatch(
            batch.x,
            batch.topk_idx,
            MOST,
            layer.experts,
            cumulative_local_expert_recv_stats=stats,
            dispatch_wait_recv_cost_stats=waited,
            async_finish=not hook,
            return_recv_hook=hook,
            **FORMS[form],
        )
        check_shapes(rank, world, received, counts, handle, form)
        assert (receive is not None) == hook
        if hook:
            receive()
            receive()  # again: nothing
        else:
            event.current_stream_wait()

        # Each expert's rows, by source and token.
        src_info, layout_range = handle[0], handle[1]
        plain = torch.zeros(layer.local, world * MOST, HIDDEN, dtype=torch.bfloat16)
        for expert in range(layer.local):
            number = expert + rank * layer.local
            tokens = [(each.topk_idx == number).any(1).nonzero()[:, 0] for each in all_batches]
            count = int(counts[expert])
            assert count == sum(map(len, tokens))
            assert src_info[expert, :count].tolist() == torch.cat(tokens).tolist()
            first = 0
            for source, those in enumerate(tokens):
                segment = int(layout_range[expert, source])
                assert (segment >> 32, segment & 0xFFFFFFFF) == (first, len(those))
                first += len(those)
            expected = torch.cat([each.x[those] for each, those in zip(all_batches, tokens, strict=True)])
            if form == "bf16":
                rows = received[expert, :count]
                assert torch.equal(rows, expected)
                hashes ^= hash_tensor(rows)
            else:
                codes, scales = received[0][expert, :count], received[1][expert, :count]
                rows = per_token_cast_back(codes, scales)
                if count:
                    assert calc_diff(rows.float(), expected.float()) < 9e-4
                if form == "fp8, powers of two":
                    assert torch.equal(torch.exp2(scales.log2().round()), scales)
                if form == "fp8, ue8m0":
                    # The exponents that the largest element of each group asks for.
                    largest = expected.float().view(count, -1, 128).abs().amax(2).clamp(min=1e-4)
                    wanted = (largest * (1 / 448)).log2().ceil().to(torch.int32) + 127
                    packs = scales.clone(memory_format=torch.contiguous_format)
                    assert torch.equal(packs.view(torch.uint8).int(), wanted)
                hashes ^= hash_tensor(codes) ^ hash_tensor(scales)
            plain[expert, :count] = rows

        # Two combines along one handle.
        for _ in range(2):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = plain
            given = torch.full_like(plain, 99) if zero_copy else plain
            out = torch.empty(len(batch.x), HIDDEN, dtype=torch.bfloat16)
            sums, event, receive = buffer.low_latency_combine(
                given,
                batch.topk_idx,
                batch.topk_weights,
                handle,
                zero_copy=zero_copy,
                async_finish=not hook,
                return_recv_hook=hook,
                out=out,
                combine_wait_recv_cost_stats=waited,
            )
            if hook:
                receive()
            else:
                event.current_stream_wait()
            assert sums.data_ptr() == out.data_ptr() or not len(out)
            if len(batch.x):
                limit = 1e-5 if form == "bf16" else 9e-4
                assert calc_diff(sums.float(), weighted(batch, batch.x)) < limit
            hashes ^= hash_tensor(sums)
    assert torch.equal(stats, 7 + 3 * counts)
    assert bool((waited >= 0).all()) and int(waited[rank]) == 0
    buffer.clean_low_latency_buffer(MOST, HIDDEN, layer.experts)
    buffer.destroy()
    return hashes


@pytest.mark.parametrize("form", FORMS)
def test_both_halves(ranks: Any, form: str) -> None:
    runs = [
        ranks.run(check_batch, form, hook, zero_copy) for hook, zero_copy in itertools.product([False, True], repeat=2)
    ]
    # The same bits, however they are asked for.
    assert all(run == runs[0] for run in runs)


def check_overlap(rank: int, world: int) -> None:
    """Two operations under way, as in two micro-batches; hooks called late and out of order."""
    layer = layer_of(world)
    buffer = make_buffer()
    pair = [oracle.batches(layer, TOKENS[:world], seed=seed)[rank] for seed in (1, 2)]
    sent = [
        buffer.low_latency_dispatch(one.x, one.topk_idx, MOST, layer.experts, use_fp8=False, return_recv_hook=True)
        for one in pair
    ]
    with pytest.raises(errors.TooManyInFlight):
        buffer.low_latency_dispatch(
            pair[0].x, pair[0].topk_idx, MOST, layer.experts, use_fp8=False, return_recv_hook=True
        )
    with pytest.raises(errors.InvalidArgument, match="hook"):
        buffer.low_latency_combine(sent[0][0], pair[0].topk_idx, pair[0].topk_weights, sent[0][2])
    sent[1][4]()
    sent[0][4]()
    back = [
        buffer.low_latency_combine(x, one.topk_idx, one.topk_weights, handle, return_recv_hook=True)
        for one, (x, _, handle, _, _) in zip(pair, sent, strict=True)
    ]
    back[1][2]()
    back[0][2]()
    for one, (sums, _, _) in zip(pair, back, strict=True):
        torch.testing.assert_close(sums.float(), weighted(one, one.x), rtol=1e-2, atol=1e-2)
    buffer.destroy()


def test_two_operations_under_way(ranks: Any) -> None:
    ranks.run(check_overlap)


def check_dropped(rank: int, world: int) -> None:
    """Hooks that nobody calls block nobody: neither this rank's buffer nor the others, of which only one is careless."""
    layer = layer_of(world)
    buffer = make_buffer()
    pair = [oracle.batches(layer, TOKENS[:world], seed=seed)[rank] for seed in (1, 2)]
    send = lambda one, **how: buffer.low_latency_dispatch(  # noqa: E731
        one.x, one.topk_idx, MOST, layer.experts, use_fp8=False, **how
    )
    for _ in range(3):
        hooks = [send(pair[0], return_recv_hook=True)[4] for _ in range(2)]
        if rank != 0:
            for hook in hooks:
                hook()
        del hooks
    x, _, handle, _, _ = send(pair[1])
    hook = buffer.low_latency_combine(x, pair[1].topk_idx, pair[1].topk_weights, handle, return_recv_hook=True)[2]
    if rank != 0:
        hook()
    del hook
    sums, _, _ = buffer.low_latency_combine(x, pair[1].topk_idx, pair[1].topk_weights, handle)
    torch.testing.assert_close(sums.float(), weighted(pair[1], pair[1].x), rtol=1e-2, atol=1e-2)
    buffer.destroy()


def test_dropped_hooks_are_skipped(ranks: Any) -> None:
    ranks.run(check_dropped)


def check_errors(rank: int, world: int) -> None:
    layer = layer_of(world)
    buffer = make_buffer()
    batch = oracle.batches(layer, [4] * world)[rank]
    dispatch = lambda **other: buffer.low_latency_dispatch(  # noqa: E731
        **(
            {
                "x": batch.x,
                "topk_idx": batch.topk_idx,
                "num_max_dispatch_tokens_per_rank": MOST,
                "num_experts": layer.experts,
            }
            | other
        )
    )
    for other, told in [
        ({"use_ue8m0": True}, "round_scale is False"),
        ({"use_fp8": False, "use_ue8m0": True}, "round_scale is False"),
        ({"async_finish": True, "return_recv_hook": True}, "both True"),
        ({"x": batch.x.float()}, "dtype of x is torch.float32, allowed: torch.bfloat16"),
        ({"topk_idx": batch.topk_idx.short()}, "dtype of topk_idx is torch.int16, allowed: torch.int64"),
        ({"topk_idx": batch.topk_idx[:3]}, r"shape of topk_idx is \[3, 3\], allowed: \[4, 3\]"),
        ({"num_max_dispatch_tokens_per_rank": 3}, "tokens of a low-latency dispatch is 4, allowed: at most 3"),
        ({"num_experts": world * 3 + 1}, f"experts is {world * 3 + 1}, allowed: a multiple of the {world} ranks"),
        ({"x": batch.x.T}, "strides of x"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(3)}, "dtype of cumulative_local_expert_recv_stats"),
        (
            {"dispatch_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64)},
            "shape of dispatch_wait_recv_cost_stats",
        ),
    ]:
        with pytest.raises(errors.InvalidArgument, match=told):
            dispatch(**other)
    for unused in ({"round_scale": True}, {"round_scale": True, "use_ue8m0": True}):
        assert dispatch(use_fp8=False, **unused)[0].dtype == torch.bfloat16
    x, _, handle, _, _ = dispatch(use_fp8=False)
    combine = lambda *given, **other: buffer.low_latency_combine(*given, **other)  # noqa: E731
    for given, told in [
        ((x.float(), batch.topk_idx, batch.topk_weights, handle), "dtype of y"),
        ((x[:, :1], batch.topk_idx, batch.topk_weights, handle), "shape of y"),
        ((x, batch.topk_idx.flip(1), batch.topk_weights, handle), "topk_idx differs"),
        ((x, batch.topk_idx, batch.topk_weights.double(), handle), "dtype of topk_weights"),
        ((x, batch.topk_idx, batch.topk_weights, (1, 2)), "handle is a tuple"),
        ((x, batch.topk_idx, batch.topk_weights, copy.deepcopy(handle)), "or its entries, not copied"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=told):
            combine(*given)
    sums = combine(x, batch.topk_idx, batch.topk_weights, handle)[0]
    torch.testing.assert_close(sums.float(), weighted(batch, batch.x), rtol=1e-2, atol=1e-2)
    with pytest.raises(errors.InvalidArgument, match="enable_shrink is False"):
        buffer.low_latency_update_mask_buffer(0, True)
    buffer.destroy()
    with pytest.raises(errors.Closed):
        dispatch()
    plain = deep_ep.Buffer(dist.group.WORLD)
    with pytest.raises(errors.InvalidArgument, match="low_latency_mode is False"):
        plain.low_latency_dispatch(batch.x, batch.topk_idx, MOST, layer.experts)


def test_what_is_wrong_is_told_on_every_rank(ranks: Any) -> None:
    ranks.run(check_errors)


def check_masks(rank: int, world: int, one_by_one: bool) -> None:
    """Rank 3 is masked by the others, then all come together again."""
    layer = layer_of(world)
    buffer = make_buffer(enable_shrink=True)
    batch = oracle.batches(layer, [5] * world, drop=0)[rank]
    status = torch.full((world,), 9, dtype=torch.int32)

    def there_and_back() -> torch.Tensor:
        x, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, MOST, layer.experts, use_fp8=False)
        return buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle)[0]

    there_and_back()
    gone = world - 1
    dist.barrier()
    if rank != gone:
        buffer.low_latency_update_mask_buffer(gone, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * gone + [1]
        sums = there_and_back()
        left = batch.topk_weights.masked_fill(batch.topk_idx // layer.local == gone, 0).sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), batch.x.float() * left, rtol=1e-2, atol=1e-2)
    dist.barrier()
    if one_by_one:
        buffer.low_latency_update_mask_buffer(gone, False)
    else:
        buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    torch.testing.assert_close(there_and_back().float(), weighted(batch, batch.x), rtol=1e-2, atol=1e-2)
    buffer.destroy()


@pytest.mark.parametrize("one_by_one", [False, True], ids=["all", "one"])
def test_masked_ranks_are_left_out_and_return(ranks: Any, one_by_one: bool) -> None:
    ranks.run(check_masks, one_by_one)


def check_one_of_two(rank: int, world: int) -> None:
    """Of two masked ranks one comes back."""
    layer = layer_of(world)
    buffer = make_buffer(enable_shrink=True)
    batch = oracle.batches(layer, [5] * world, drop=0)[rank]
    status = torch.zeros(world, dtype=torch.int32)

    def there_and_back() -> torch.Tensor:
        x, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, MOST, layer.experts, use_fp8=False)
        return buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle)[0]

    there_and_back()
    dist.barrier()
    if rank < 2:
        for gone in (2, 3):
            buffer.low_latency_update_mask_buffer(gone, True)
    elif rank == 3:
        for other in range(3):
            buffer.low_latency_update_mask_buffer(other, True)
    else:
        buffer.low_latency_update_mask_buffer(3, True)
    dist.barrier()
    buffer.low_latency_update_mask_buffer(2, False)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == ([1, 1, 0, 0] if rank == 3 else [0, 0, 0, 1])
    if rank != 3:
        left = batch.topk_weights.masked_fill(batch.topk_idx // layer.local == 3, 0).sum(1, keepdim=True)
        torch.testing.assert_close(there_and_back().float(), batch.x.float() * left, rtol=1e-2, atol=1e-2)
    dist.barrier()


def test_one_rank_is_unmasked_and_others_stay_masked(four: Any) -> None:
    four.run(check_one_of_two)


def check_shrink(rank: int, world: int) -> list[int]:
    """One rank does not come: the others go on without it."""
    layer = layer_of(world)
    os.environ["MOEXPRESS_TIMEOUT"] = "10"
    try:
        buffer = make_buffer(enable_shrink=True)
    finally:
        os.environ["MOEXPRESS_TIMEOUT"] = "20"
    batch = oracle.batches(layer, [5] * world)[rank]
    buffer.low_latency_dispatch(batch.x, batch.topk_idx, MOST, layer.experts, use_fp8=False)
    status = torch.zeros(world, dtype=torch.int32)
    if rank != 1:
        began = time.monotonic()
        counts = buffer.low_latency_dispatch(batch.x, batch.topk_idx, MOST, layer.experts, use_fp8=False)[1]
        assert time.monotonic() - began < 18
        all_batches = oracle.batches(layer, [5] * world)
        mine = [rank * layer.local + expert for expert in range(layer.local)]
        chosen = [sum(int((each.topk_idx == e).sum()) for r, each in enumerate(all_batches) if r != 1) for e in mine]
        assert counts.tolist() == chosen
    dist.barrier()
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def test_a_rank_that_does_not_come_is_masked(four: Any) -> None:
    statuses = four.run(check_shrink)
    assert statuses == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]


def check_rows_of_handles(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer()
    batch = oracle.batches(layer, TOKENS[:world])[rank]
    expected = weighted(batch, batch.x)
    for form, hooks in itertools.product(("bf16", "fp8"), (False, True)):
        received, counts, handle, _, hook = buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, MOST, layer.experts, return_recv_hook=hooks, **FORMS[form]
        )
        early = list(handle) if hook is not None else None
        if hook is not None:
            hook()
        if isinstance(received, tuple):
            codes, scales = received[0].flatten(0, 1), received[1].reshape(-1, received[1].shape[-1])
            y = per_token_cast_back(codes, scales).view(received[0].shape)
        else:
            y = received.clone()
        parts = [*received] if isinstance(received, tuple) else [received]
        gone = [weakref.ref(part) for part in (*parts, counts)]
        codes = scales = None
        del received, counts, parts
        assert all(one() is None for one in gone), (form, hooks)
        # What it has is there still, and the same that it was.
        src_info, layout_range, *_ = handle
        assert early is None or (early[0] is src_info and early[1] is layout_range)
        assert int((layout_range & 0xFFFFFFFF).sum()) <= int(src_info.numel())
        sums = buffer.low_latency_combine(y, batch.topk_idx, batch.topk_weights, handle)[0]
        torch.testing.assert_close(sums.float(), expected, rtol=0.1, atol=0.1)
    buffer.destroy()


def test_a_handle_does_not_keep_the_rows(two: Any) -> None:
    two.run(check_rows_of_handles)


def test_other_threads_may_send_and_receive_while_one_looks_at_what_is_under_way() -> None:
    communicator: Any = SimpleNamespace(in_low_latency=None, timeout=1.0)
    under_way = UnderWay(communicator, None)
    half: Any = object()

    class Meanwhile:
        """Stands for an operation whose hook was dropped: when it is looked at, another thread sends and a third receives."""

        def __call__(self) -> None:
            under_way._sent.append(weakref.ref(kept))
            under_way._sent.popleft()

    for look in (under_way.goes_at_once, lambda: under_way.sent(half, None)):
        kept = Sent(under_way, half, None, lambda: None)
        under_way._sent.extend([Meanwhile(), Meanwhile()])  # type: ignore[list-item]
        look()
        under_way._sent.clear()
