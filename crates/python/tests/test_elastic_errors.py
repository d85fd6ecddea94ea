"""What is wrong is refused by ElasticBuffer with the value and what is allowed, and harms nothing."""

from __future__ import annotations

import copy
import os
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


def check_one_mistake(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer(num_gpu_timeout_secs=20)
    batch = oracle.batches(layer, [6] * world)[rank]
    arguments: dict[str, Any] = {"x": batch.x, "topk_idx": batch.topk_idx, "num_experts": layer.experts}
    wrong = {name: given.to("meta") for name, given in arguments.items() if isinstance(given, torch.Tensor)}
    if rank == 0:
        with pytest.raises(ValueError, match="meta"):
            buffer.dispatch(**{**arguments, **wrong})
    # The ranks' rows are of different sizes, once.
    wide = batch.x if rank else torch.cat([batch.x, batch.x], 1)
    with pytest.raises(ValueError, match="hidden is"):
        buffer.dispatch(**{**arguments, "x": wide})
    with pytest.raises(ValueError, match=r"num_max_tokens_per_rank is 1[67] on rank 1, allowed: 1[67], as on rank 0"):
        buffer.dispatch(**arguments, num_max_tokens_per_rank=16 + rank, do_cpu_sync=False)
    with pytest.raises(
        ValueError, match=r"expert_alignment of expanded rows is \d on rank 1, allowed: \d, as on rank 0"
    ):
        buffer.dispatch(**arguments, num_max_tokens_per_rank=16, expert_alignment=8 + rank, do_expand=True)
    received, _, _, handle, _ = buffer.dispatch(**arguments)
    assert buffer.stats()["rows_by_low_latency"] >= len(received) > 0
    # What one rank is refused, nobody waits for.
    weights = torch.ones(handle.num_recv_tokens, batch.topk_idx.shape[1])
    if rank == 0:
        for given, told in [
            ((received.float(), handle, weights), "dtype of x"),
            ((received, handle, weights[:, :3]), "shape of topk_weights"),
            ((received, handle, weights, batch.x.float()), "dtype of bias 0"),
            ((received[:-1], handle, weights), "rows of x"),
        ]:
            with pytest.raises(ValueError, match=told):
                buffer.combine(*given)
    buffer.combine(received, handle, weights)
    buffer.destroy()


def test_a_mistake_of_one_rank_is_an_error_of_one_call(two: Any) -> None:
    two.run(check_one_mistake)


def check_after_recovery(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer(num_gpu_timeout_secs=2)
    batch = oracle.batches(layer, [6] * world)[rank]
    arguments: dict[str, Any] = {"x": batch.x, "topk_idx": batch.topk_idx, "num_experts": layer.experts}
    received, _, weights, handle, _ = buffer.dispatch(**arguments, topk_weights=batch.topk_weights)
    if rank:
        with pytest.raises(errors.OperationFailed):
            buffer.dispatch(**arguments)
        # All of the buffer's communicators, until it is recovered.
        for call in (
            lambda: buffer.dispatch(**arguments),
            lambda: buffer.dispatch(**arguments, num_max_tokens_per_rank=1000),
            lambda: buffer.combine(received, handle),
        ):
            with pytest.raises(
                errors.Poisoned, match="an operation failed, and recover was not called since: oper"
            ) as told:
                call()
            assert told.value.culprit == 0
    dist.barrier()
    buffer.recover()
    for call in (
        lambda: buffer.combine(received, handle),
        lambda: buffer.combine(received, handle, weights),
        lambda: buffer.dispatch(batch.x, handle=handle),
        lambda: buffer.dispatch(batch.x, handle=handle, do_expand=True),
    ):
        with pytest.raises(ValueError, match="handle is of before a recovery, allowed: one of after it"):
            call()
    received, _, weights, handle, _ = buffer.dispatch(**arguments, topk_weights=batch.topk_weights)
    buffer.combine(received, handle, weights)
    buffer.destroy()


def test_a_failure_is_the_whole_buffer_s_and_handles_of_before_a_recovery_are_refused(two: Any) -> None:
    two.run(check_after_recovery)


def check_gone(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer(num_gpu_timeout_secs=5)
    batch = oracle.batches(layer, [6] * world)[rank]
    arguments: dict[str, Any] = {"x": batch.x, "topk_idx": batch.topk_idx, "num_experts": layer.experts}
    buffer.dispatch(**arguments)
    dist.barrier()
    if rank != world - 1:
        buffer.recover([world - 1])
        received, _, weights, handle, _ = buffer.dispatch(**arguments, topk_weights=batch.topk_weights)
        # By the other mode, of which nothing was made for a call.
        buffer.combine(received, handle, weights, batch.x)
    dist.barrier()


def test_small_batches_bring_weights_home_without_a_rank(four: Any) -> None:
    four.run(check_gone)


def check_kept(rank: int, world: int) -> None:
    buffer = make_buffer(num_max_tokens_per_rank=128)
    hidden, count = 7168, 40
    x, choices = torch.ones(1, hidden, dtype=torch.bfloat16), torch.tensor([[0]])
    handles = [buffer.dispatch(x, choices, num_experts=2 * world)[3]]

    def used() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = used()
    handles += [buffer.dispatch(x, choices, num_experts=2 * world)[3] for _ in range(count)]
    rows = 128 * world * hidden * 2
    assert used() - before < count * rows // 4, (used() - before, rows)
    buffer.destroy()


def test_handles_do_not_keep_rows(two: Any) -> None:
    two.run(check_kept)
