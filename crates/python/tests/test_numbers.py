"""Numbers and switches as callers have them: Python's own, NumPy's, tensors of one element. One rule holds for all calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deep_ep
import moexpress
import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from moexpress import errors

MOST = 8
LAYER = oracle.Layer(1, 4, 2, 256)

SWITCHES = {"0 and 1": (0, 1), "NumPy's": (np.False_, np.True_), "whole numbers of NumPy": (np.int64(0), np.uint8(1))}


def check_switches(rank: int, world: int, off: Any, on: Any) -> None:
    batch = oracle.batches(LAYER, [MOST])[0]
    x, choices, weights = batch.x, batch.topk_idx, batch.topk_weights
    sizes = {"experts": LAYER.experts, "topk": LAYER.topk, "hidden": LAYER.hidden, "max_tokens": MOST}
    with moexpress.Communicator(low_latency=on, wait_for_kernels=off, device="cpu", **sizes) as one:
        got = one.dispatch(x, choices, by_expert=on, zero_spare=on, device_counts=off, alignment=16)
        assert got.by_expert is not None and not got.x[got.by_expert.counts[0] : 16].any()
        assert len(one.combine(got.x, got.handle, remainder=off).x) == MOST
        low = one.low_latency_dispatch(x, choices, by_source=on, zero_spare=off, host_counts=on)
        assert low.handle is not None and low.handle.rows == int((choices >= 0).any(1).sum())
        one.send_dispatch(x, choices).receive(beside=off)

    options = {"low_latency_mode": on, "enable_shrink": off, "allow_nvlink_for_low_latency_mode": on}
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=on, **options)
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(choices, LAYER.experts, async_finish=on)
    assert event.event is not None
    given = (x, None, per_rank, None, in_rank, per_expert, choices, weights)
    received, *_, handle, event = buffer.dispatch(*given, async_finish=on, allocate_on_comm_stream=off)
    assert event.event is not None and buffer.dispatch(x, handle, async_finish=off)[5].event is None
    assert buffer.combine(received, handle, async_finish=on)[2].event is not None
    (codes, _), _, kept, _, hook = buffer.low_latency_dispatch(
        x, choices, MOST, LAYER.experts, use_fp8=on, round_scale=on, use_ue8m0=off, return_recv_hook=on
    )
    assert hook is not None and codes.dtype is torch.float8_e4m3fn
    hook()
    y, options = torch.zeros(codes.shape).bfloat16(), {"zero_copy": off, "return_recv_hook": off, "async_finish": on}
    assert buffer.low_latency_combine(y, choices, weights, kept, **options)[1].event is not None
    buffer.destroy()

    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, 0, num_max_tokens_per_rank=MOST, explicitly_destroy=on)
    options = {"do_expand": on, "do_cpu_sync": off, "do_zero_padding": on, "async_with_compute_stream": on}
    assert elastic.dispatch(x, choices, num_experts=LAYER.experts, **options)[4].event is not None
    elastic.destroy()


@pytest.mark.parametrize(("off", "on"), SWITCHES.values(), ids=SWITCHES)
def test_a_switch_may_be_a_number_or_numpy_s(one: Any, off: Any, on: Any) -> None:
    one.run(check_switches, off, on)


def check_no_switches(rank: int, world: int) -> None:
    batch = oracle.batches(LAYER, [MOST])[0]
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    layout = buffer.get_dispatch_layout(batch.topk_idx, LAYER.experts)
    given = (batch.x, None, layout[0], None, layout[3], layout[2], batch.topk_idx, batch.topk_weights)
    x, *_, handle, _ = buffer.dispatch(*given)
    low = lambda **options: buffer.low_latency_dispatch(batch.x, batch.topk_idx, MOST, LAYER.experts, **options)  # noqa: E731
    kept = low(use_fp8=False)
    for call, told in [
        (lambda: low(use_fp8="no"), "use_fp8 is no, allowed: True or False"),
        (lambda: low(round_scale=None), "round_scale is None, allowed: True or False"),
        (lambda: low(use_ue8m0=2), "use_ue8m0 is 2, allowed: True or False"),
        (lambda: low(return_recv_hook=0.0), "return_recv_hook is 0.0, allowed: True or False"),
        (lambda: buffer.dispatch(*given, async_finish="no"), "async_finish is no, allowed: True or False"),
        (lambda: buffer.combine(x, handle, async_finish=2), "async_finish is 2, allowed: True or False"),
        (
            lambda: buffer.low_latency_combine(kept[0], batch.topk_idx, batch.topk_weights, kept[2], zero_copy=[]),
            "zero_copy is a list, allowed: True or False",
        ),
        (lambda: buffer.low_latency_update_mask_buffer(0, "no"), "mask is no, allowed: True or False"),
        (lambda: deep_ep.Buffer(dist.group.WORLD, low_latency_mode="no"), "low_latency_mode is no, allowed: True"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=told):
            call()
    buffer.destroy()


def test_what_is_no_switch_is_refused(one: Any) -> None:
    one.run(check_no_switches)


def check_numbers(rank: int, world: int, number: Callable[[int], Any]) -> None:
    before = deep_ep.Buffer.num_sms
    deep_ep.Buffer.set_num_sms(number(before + 2))
    assert deep_ep.Buffer.num_sms == before + 2
    deep_ep.Buffer.set_num_sms(before)
    config = deep_ep.Config(*map(number, (24, 6, 256, 6, 128)))
    assert repr(config) == "Config(24, 6, 256, 6, 128)"
    assert config.get_nvl_buffer_size_hint(number(512), number(2)) == config.get_nvl_buffer_size_hint(512, 2)
    assert repr(deep_ep.Buffer.get_combine_config(number(2))) == repr(deep_ep.Buffer.get_combine_config(2))
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    assert hint(*map(number, (MOST, 256, 2, 4))) == hint(MOST, 256, 2, 4)

    batch = oracle.batches(LAYER, [MOST])[0]
    buffer = deep_ep.Buffer(
        dist.group.WORLD, number(1 << 20), low_latency_mode=True, enable_shrink=True, explicitly_destroy=True
    )
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, number(LAYER.experts))
    given = (batch.x, None, per_rank, None, in_rank, per_expert, batch.topk_idx, batch.topk_weights)
    assert len(buffer.dispatch(*given, number(2), number(MOST))[0]) == MOST
    assert buffer.get_local_buffer_tensor(torch.int16, (number(3), number(5)), number(4)).shape == (3, 5)
    with pytest.raises(errors.InvalidArgument, match="rank_to_mask is 0, allowed: another rank, 0 to 0"):
        buffer.low_latency_update_mask_buffer(number(0), True)
    with pytest.raises(errors.InvalidArgument, match="mask is 1, allowed: 0 to 0"):
        buffer.recover([number(1)])
    buffer.low_latency_update_mask_buffer(number(0), False)
    buffer.destroy()


@pytest.mark.parametrize("number", [np.int64, np.int32, torch.tensor], ids=["int64", "int32", "a tensor"])
def test_a_number_may_be_any_whole_one(one: Any, number: Callable[[int], Any]) -> None:
    one.run(check_numbers, number)
