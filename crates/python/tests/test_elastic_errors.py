"""What is wrong is refused by ElasticBuffer with the value and what is allowed, and harms nothing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from moexpress import errors
from test_elastic import MOST, Expectation, equal, layer_of, make_buffer


def check_calls(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer()
    expected = Expectation(layer, rank, "bf16", 1)
    batch = oracle.batches(layer, [6] * world)[rank]
    arguments: dict[str, Any] = {"x": batch.x, "topk_idx": batch.topk_idx, "num_experts": layer.experts}
    x, _, weights, handle, event = buffer.dispatch(topk_weights=batch.topk_weights, **arguments)
    full, *_, expanded, _ = buffer.dispatch(do_expand=True, **arguments)
    none = {"topk_idx": None, "num_experts": None}
    codes = batch.x.to(torch.float8_e4m3fn)
    for other, kind, told in [
        ({"x": batch.x.half()}, ValueError, "dtype of x is torch.float16, allowed: torch.bfloat16"),
        ({"x": (codes, torch.ones(6, 4))}, NotImplementedError, "4 scales a row are not supported: use 1 to 3"),
        ({"x": batch.x[:, :-1]}, ValueError, "strides of x"),
        ({"topk_idx": None}, ValueError, r"topk_idx is None, allowed: int64 \[tokens, topk\], or a handle"),
        ({"topk_idx": batch.topk_idx.int()}, ValueError, "dtype of topk_idx is torch.int32, allowed: torch.int64"),
        ({"topk_idx": batch.topk_idx[:5]}, ValueError, r"shape of topk_idx is \[5, 4\], allowed: \[6, 4\]"),
        ({"topk_idx": batch.topk_idx.flatten()}, ValueError, "topk_idx"),
        ({"topk_weights": batch.topk_weights.double()}, ValueError, "dtype of topk_weights is torch.float64"),
        ({"num_experts": None}, ValueError, f"num_experts is None, allowed: a multiple of the {world} ranks"),
        ({"num_experts": world + 1}, ValueError, f"num_experts is {world + 1}, allowed: a multiple of the {world}"),
        ({"num_max_tokens_per_rank": 5}, ValueError, "tokens of x are 6, allowed: at most 5, num_max_tokens_per_rank"),
        ({"num_max_tokens_per_rank": 1 << 21}, ValueError, "num_max_tokens_per_rank is 2097152, allowed: 1 to 1048576"),
        ({"expert_alignment": 0}, ValueError, "expert_alignment is 0, allowed: 1 to 1048576"),
        ({"num_sms": -2}, ValueError, "num_sms is -2, allowed: 0 to"),
        ({"num_qps": 130}, ValueError, "num_qps is 130, allowed: 0 to 129"),
        ({"previous_event": 3}, ValueError, "previous_event is a int, allowed: an EventHandle"),
        ({"do_expand": "yes"}, ValueError, "do_expand is yes, allowed: True or False"),
        ({"do_zero_padding": True}, ValueError, "do_zero_padding is True, allowed: with do_expand only"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(3)}, ValueError, "dtype of cumulative_local_expert_recv_"),
        ({"handle": handle}, ValueError, "topk_idx is given with a handle, allowed: None in a cached dispatch"),
        ({"handle": (1, 2), **none}, ValueError, "handle is a tuple, allowed: the EPHandle of a dispatch"),
        ({"handle": handle, **none, "do_cpu_sync": True}, ValueError, "do_cpu_sync is True, allowed: False or None"),
        ({"handle": handle, **none, "num_experts": 4}, ValueError, "num_experts is 4, allowed: 8, as in the handle"),
        ({"handle": handle, **none, "expert_alignment": 2}, ValueError, "expert_alignment is 2, allowed: 1, as in"),
        ({"handle": handle, **none, "x": batch.x[:5]}, ValueError, "tokens of x is 5, allowed: 6"),
    ]:
        with pytest.raises(kind, match=told):
            buffer.dispatch(**{**arguments, **other})
    rows = x.shape[0]
    for given, told in [
        ((x.float(), handle), "dtype of"),
        ((x[:-1], handle), f"rows of x are {rows - 1}, allowed: at least {rows}"),
        ((x, None), "handle is a NoneType, allowed: the EPHandle of a dispatch"),
        ((x, handle, weights[:, :3]), "shape of topk_weights"),
        ((x, handle, None, (batch.x,) * 3), "number of biases is 3, allowed: at most 2"),
        ((full[:-1], expanded), f"rows of x are {len(full) - 1}, allowed: at least {len(full)}, expanded rows of the"),
        ((full, expanded, torch.ones(len(full), 4)), "shape of topk_weights"),
        ((full.half(), expanded), "dtype of x"),
    ]:
        with pytest.raises(ValueError, match=told):
            buffer.combine(*given)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotImplementedError, match="a copy of an EPHandle is not supported: use the one that"):
            copied(handle)
    with pytest.raises(AssertionError, match="no event"):
        event.current_stream_wait()
    other = make_buffer()
    with pytest.raises(ValueError, match="handle is of another buffer, allowed: one of this buffer"):
        other.combine(x, handle)
    with pytest.raises(ValueError, match="num_max_tokens_per_rank is 0, allowed: 1 to 1048576, here or for the buffer"):
        make_buffer(num_bytes=0, num_max_tokens_per_rank=0).dispatch(**arguments)
    # Nothing moved, so that the ranks are still together.
    mine = expected.mine
    equal(buffer.dispatch(mine.x, mine.topk_idx, num_experts=layer.experts)[0], expected.received)
    buffer.destroy()
    for call in (lambda: buffer.dispatch(**arguments), lambda: buffer.combine(x, handle), buffer.barrier):
        with pytest.raises(errors.Closed):
            call()


def test_wrong_arguments_are_named(ranks: Any) -> None:
    ranks.run(check_calls)


def check_written(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer(large=True)
    batch = oracle.batches(layer, [6] * world)[rank]
    handle = buffer.dispatch(batch.x, batch.topk_idx, num_experts=layer.experts, do_handle_copy=False)[3]
    batch.topk_idx.fill_(-1)
    with pytest.raises(
        ValueError, match=f"rows received are 0, allowed: {handle.num_recv_tokens}, those of the handle"
    ):
        buffer.dispatch(batch.x, topk_weights=batch.topk_weights, handle=handle)
    batch.topk_idx.resize_(24)
    with pytest.raises(ValueError, match=r"shape of topk_idx of the handle is \[24\], allowed: \[6, 4\]"):
        _ = handle.dst_buffer_slot_idx
    batch.topk_idx.resize_(6, 4).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage of topk_idx of the handle is 0 bytes"):
        _ = handle.dst_buffer_slot_idx
    buffer.destroy()


def test_choices_that_were_written_to_since_are_noticed(two: Any) -> None:
    two.run(check_written)


def check_absent(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer(num_gpu_timeout_secs=2)
    batch = oracle.batches(layer, [6] * world)[rank]
    buffer.dispatch(batch.x, batch.topk_idx, num_experts=layer.experts)
    if rank:
        with pytest.raises(errors.OperationFailed) as failed:
            buffer.dispatch(batch.x, batch.topk_idx, num_experts=layer.experts)
        assert failed.value.culprit == 0
    dist.barrier()
    buffer.recover()
    received = buffer.dispatch(batch.x, batch.topk_idx, num_experts=layer.experts)[0]
    assert buffer.stats()["rows_by_low_latency"] >= len(received) > 0
    buffer.destroy()


def test_a_rank_that_does_not_come_is_named_in_time_and_all_go_on(two: Any) -> None:
    two.run(check_absent)


def test_constructors_name_what_is_wrong() -> None:
    for given, told in [
        ({"group": None}, "group is None, allowed: a process group"),
        ({"num_bytes": -1}, "num_bytes is -1, allowed: 0 to"),
        ({"num_max_tokens_per_rank": 1 << 21}, "num_max_tokens_per_rank is 2097152, allowed: 0 to 1048576"),
        ({"num_gpu_timeout_secs": 0}, "num_gpu_timeout_secs is 0, allowed: seconds, more than 0"),
        ({"num_cpu_timeout_secs": "soon"}, "num_cpu_timeout_secs is soon, allowed: seconds"),
        ({"deterministic": 2}, "deterministic is 2, allowed: True or False"),
        ({"num_allocated_qps": -1}, "num_allocated_qps is -1, allowed: 0 to"),
        ({"sl_idx": -1}, "sl_idx is -1, allowed: 0 to"),
    ]:
        with pytest.raises(ValueError, match=told):
            deep_ep.ElasticBuffer(**{"group": object(), "num_bytes": 0, **given})
    assert MOST < 1 << 20


def check_hints(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="hidden is 0, allowed: 1 or more where num_bytes is not given"):
        deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4)
    buffer = make_buffer()
    for given, told in [
        ((world + 1, 1), f"num_experts is {world + 1}, allowed: a multiple of the {world} ranks"),
        ((8, 9), "num_topk is 9, allowed: 1 to 8, the experts"),
        ((8, 2, 1), "num_scaleout_topk is 1, allowed: 0"),
        ((8, 2, 0, 0, 0, 0), "sm_read_gbs is 0, allowed: more than 0"),
    ]:
        with pytest.raises(ValueError, match=told):
            buffer.get_theoretical_num_sms(*given)
    buffer.destroy()


def test_hints_name_what_is_wrong(two: Any) -> None:
    two.run(check_hints)
