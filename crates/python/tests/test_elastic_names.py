"""Every name that DeepEP's tests of V2, and torchtitan, vLLM and SGLang, import or call is there with its arguments."""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from typing import Any

import deep_ep
import pytest
import torch
import torch.distributed as dist

BUFFER = {
    "__init__": "group num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 num_topk=0 use_fp8_dispatch=False "
    "deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True prefer_overlap_with_compute=True sl_idx=3 "
    "num_allocated_qps=0 num_cpu_timeout_secs=300 num_gpu_timeout_secs=100 explicitly_destroy=False",
    "destroy": "",
    "get_buffer_size_hint": "group num_max_tokens_per_rank hidden num_topk=0 use_fp8_dispatch=False allow_hybrid_mode=True "
    "allow_multiple_reduction=True",
    "get_engram_storage_size_hint": "num_entries hidden num_max_tokens_per_rank dtype=torch.bfloat16",
    "get_pp_buffer_size_hint": "num_max_tensor_bytes num_max_inflight_tensors",
    "get_agrs_num_max_session_bytes": "group shapes dtype",
    "get_agrs_buffer_size_hint": "group num_max_session_bytes",
    "barrier": "use_comm_stream=True with_cpu_sync=False sequential=True",
    "capture": "",
    "get_comm_stream": "",
    "get_physical_domain_size": "",
    "get_logical_domain_size": "",
    "engram_write": "storage sf=None",
    "engram_fetch": "indices num_qps=0 use_tma_aligned_col_major_sf=False",
    "pp_set_config": "num_max_tensor_bytes num_max_inflight_tensors",
    "pp_send": "t dst_rank_idx num_sms=0",
    "pp_recv": "t src_rank_idx num_sms=0",
    "create_agrs_session": "",
    "destroy_agrs_session": "",
    "agrs_new_session": "enabled=True",
    "agrs_set_config": "num_max_session_bytes num_max_all_gathers_per_session",
    "agrs_get_inplace_tensor": "shapes dtype",
    "all_gather": "t",
    "get_theoretical_num_sms": "num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 sm_read_gbs=200 sm_write_gbs=50",
    "get_theoretical_num_qps": "num_sms",
    "dispatch": "x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None num_experts=None "
    "num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 previous_event=None "
    "previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False handle=None "
    "do_handle_copy=True do_cpu_sync=None do_expand=False do_zero_padding=False use_tma_aligned_col_major_sf=False",
    "combine": "x handle topk_weights=None bias=None num_sms=0 num_qps=0 previous_event=None "
    "previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False",
}

HANDLE = (
    "do_expand num_experts expert_alignment num_max_tokens_per_rank num_sms topk_idx num_recv_tokens num_expanded_tokens "
    "num_recv_tokens_per_expert_list psum_num_recv_tokens_per_scaleup_rank psum_num_recv_tokens_per_expert "
    "num_unaligned_recv_tokens_per_expert recv_src_metadata dst_buffer_slot_idx token_metadata_at_forward channel_linked_list"
)

FUNCTIONS = {
    "get_physical_domain_size": "group",
    "get_logical_domain_size": "group allow_hybrid_mode=True",
    "buffers.legacy.Buffer.dispatch": inspect.Signature.empty,
    "utils.math.align": "x y",
    "utils.math.ceil_div": "x y",
    "utils.math.safe_div": "a b",
    "utils.math.calc_diff": "x y",
    "utils.math.count_bytes": "*tensors",
    "utils.math.hash_tensor": "t",
    "utils.math.hash_tensors": "*tensors",
    "utils.math.inplace_unique": "x num_slots",
    "utils.math.create_grouped_scores": "scores group_idx num_groups",
    "utils.math.per_token_cast_back": "x_fp8 x_scales",
    "utils.math.per_token_cast_to_fp8": "x",
    "utils.gate.get_unbalanced_scores": "num_tokens num_experts num_ranks num_topk ratio precise",
    "utils.envs.init_dist": "local_rank num_local_ranks seed=0",
    "utils.envs.init_seed": "global_seed",
    "utils.envs.get_local_seed": "",
    "utils.envs.get_global_seed": "",
    "utils.envs.dist_print": "s='' once_in_node=False",
    "utils.envs.check_nvlink_connections": "group",
    "utils.envs.check_torch_deterministic": "",
    "utils.envs.get_nvlink_gbs": "factor=0.9",
    "utils.refs.dispatch": "x topk_idx topk_weights num_max_tokens_per_rank num_experts",
    "utils.refs.combine": "y topk_idx num_scaleout_ranks num_scaleup_ranks num_experts bias reduce_in_local reduce_in_scaleup",
    "utils.refs.generate_pre_combine_data": "src_token_global_idx num_max_tokens_per_rank num_topk hidden",
    "utils.refs.ordered_accumulate": "data initial_value=None",
    "utils.semantic.value_or": "value default",
    "utils.testing.bench": "fn num_warmups=50 num_tests=50 post_fn=None flush_l2=True",
    "utils.testing.bench_kineto": "fn kernel_names num_tests=30 suppress_kineto_output=False trace_path=None flush_l2=True "
    "barrier_comm_profiling=False num_kernels_per_period=1 barrier=None",
    "utils.event.EventOverlap": "event=None extra_tensors=None",
    "utils.event.EventOverlap.current_stream_wait": "release_handle=False",
    "utils.event.EventOverlap.register_hook_after_wait": "hook_after_wait",
    "utils.event.EventOverlap.__call__": "release_handle=False",
}


def told(function: Any) -> str:
    """Arguments with their defaults."""
    arguments = [one.replace(annotation=one.empty) for one in inspect.signature(function).parameters.values()]
    return " ".join(str(one).replace(" ", "") for one in arguments if one.name != "self")


@pytest.mark.parametrize("name", BUFFER)
def test_the_buffer_has_v2s_calls(name: str) -> None:
    assert told(getattr(deep_ep.ElasticBuffer, name)) == BUFFER[name]


def test_the_handle_has_v2s_fields() -> None:
    assert told(deep_ep.EPHandle.__init__) == HANDLE
    given = dict(zip(HANDLE.split(), range(16), strict=True))
    handle = deep_ep.EPHandle(**given)  # type: ignore[arg-type]
    assert {name: getattr(handle, name) for name in given} == given
    with pytest.raises(ValueError, match="handle is put together by hand, allowed: one that dispatch returned"):
        _ = handle.routing


@pytest.mark.parametrize("path", FUNCTIONS)
def test_modules_have_v2s_functions(path: str) -> None:
    found: Any = deep_ep
    for part in path.split("."):
        with suppress(ImportError):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    expected = FUNCTIONS[path]
    assert callable(found) if expected is inspect.Signature.empty else told(found) == expected


def test_names_are_where_v2_has_them() -> None:
    from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
    from deep_ep.buffers.legacy import Buffer
    from deep_ep.utils import EventHandle

    assert (deep_ep.ElasticBuffer, deep_ep.EPHandle, deep_ep.Buffer) == (ElasticBuffer, EPHandle, Buffer)
    assert deep_ep.EventHandle is EventHandle and deep_ep.topk_idx_t is torch.int64


def check_attributes(rank: int, world: int) -> None:
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, 1 << 26, num_max_tokens_per_rank=32, explicitly_destroy=True)
    names = (
        "rank_idx",
        "num_ranks",
        "num_scaleout_ranks",
        "num_scaleup_ranks",
        "scaleout_rank_idx",
        "scaleup_rank_idx",
    )
    assert [getattr(buffer, name) for name in names] == [rank, world, 1, world, 0, rank]
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, world)
    assert buffer.group is dist.group.WORLD and buffer.num_bytes == 1 << 26 and buffer.num_max_tokens_per_rank == 32
    assert not buffer.deterministic and buffer.explicitly_destroy
    assert buffer.allow_hybrid_mode and buffer.allow_multiple_reduction and buffer.prefer_overlap_with_compute
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True, sequential=False)

    hint = deep_ep.ElasticBuffer.get_buffer_size_hint
    sizes = [hint(buffer.group, tokens, 7168, 8) for tokens in (1, 4096, 8192)]
    assert sizes == sorted(sizes) and all(size % (2 << 20) == 0 and size for size in sizes)
    assert sizes[1] > world * 4096 * 2 * 7168
    assert hint(buffer.group, 4096, 7168, 8, use_fp8_dispatch=True) <= sizes[1]
    assert hint(buffer.group, 4096, 7168, 8, allow_multiple_reduction=False) >= sizes[1]

    alone = deep_ep.ElasticBuffer(dist.group.WORLD, 0, prefer_overlap_with_compute=False, allow_hybrid_mode=False)
    few, many = (one.get_theoretical_num_sms(256, 8) for one in (buffer, alone))
    assert few % 2 == 0 and 4 <= few <= many and many >= 64
    assert buffer.get_theoretical_num_sms(256, 8, nvlink_gbs=10_000) > few
    assert (buffer.num_allocated_qps, buffer.get_theoretical_num_qps(4)) == (129, 65)
    assert (alone.num_allocated_qps, alone.get_theoretical_num_qps(20)) == (17, 9)

    for call in (
        lambda: deep_ep.ElasticBuffer(dist.group.WORLD, 1 << 21, num_cpu_bytes=1 << 21),
        lambda: deep_ep.ElasticBuffer.get_engram_storage_size_hint(1, 1, 1),
        lambda: buffer.engram_write(torch.zeros(1)),
        lambda: buffer.engram_fetch(torch.zeros(1)),
        lambda: deep_ep.ElasticBuffer.get_pp_buffer_size_hint(1, 1),
        lambda: buffer.pp_set_config(1, 1),
        lambda: buffer.pp_send(torch.zeros(1), 0),
        lambda: buffer.pp_recv(torch.zeros(1), 0),
        lambda: deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes(None, (1,), torch.int32),
        lambda: deep_ep.ElasticBuffer.get_agrs_buffer_size_hint(None, 1),
        lambda: buffer.create_agrs_session(),
        lambda: buffer.destroy_agrs_session(),
        lambda: buffer.agrs_new_session().__enter__(),
        lambda: buffer.agrs_set_config(1, 1),
        lambda: buffer.agrs_get_inplace_tensor((1,), torch.int32),
        lambda: buffer.all_gather(torch.zeros(1)),
    ):
        with pytest.raises(NotImplementedError, match=r"^[^.]+ is not supported: .*not offered here; use [^;]+$"):
            call()
    with buffer.agrs_new_session(enabled=False):
        pass
    buffer.destroy()


def test_hints_and_what_is_not_offered(two: Any) -> None:
    two.run(check_attributes)
