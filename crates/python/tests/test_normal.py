"""deep_ep.Buffer in throughput mode: layouts, dispatch, cached dispatch, worst-case sizing, combine."""

from __future__ import annotations

import itertools
from typing import Any

import deep_ep
import moexpress
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep.utils.math import calc_diff, per_token_cast_back, per_token_cast_to_fp8
from torch.overrides import TorchFunctionMode

TOKENS = [37, 0, 64, 5]


def make_buffer(**options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, int(2e9), 0, explicitly_destroy=True, **options)


def layer_of(world: int) -> oracle.Layer:
    return oracle.Layer(world=world, experts=8, topk=4, hidden=256)


def check_layout(rank: int, world: int) -> None:
    layer = layer_of(world)
    buffer = make_buffer()
    batch = oracle.batches(layer, TOKENS[:world])[rank]
    result = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    per_rank, per_node, per_expert, in_rank, event = result
    expected = oracle.members(layer, batch.topk_idx)
    assert torch.equal(in_rank, expected) and in_rank.dtype == torch.bool and in_rank.is_contiguous()
    assert torch.equal(per_rank, expected.sum(0, dtype=torch.int32)) and per_rank.dtype == torch.int32
    counts = torch.stack([(batch.topk_idx == expert).sum() for expert in range(layer.experts)]).int()
    assert torch.equal(per_expert, counts) and per_expert.dtype == torch.int32
    assert per_node is None and event.event is None
    asynchronous = buffer.get_dispatch_layout(batch.topk_idx, layer.experts, buffer.capture(), True, True)[4]
    asynchronous.current_stream_wait()
    buffer.destroy()


def test_layouts_count_a_token_once_a_rank(ranks: Any) -> None:
    ranks.run(check_layout)


def cast(x: torch.Tensor, kind: str) -> Any:
    if kind == "bf16":
        return x
    codes, scales = per_token_cast_to_fp8(x)
    return (codes, scales.T.contiguous().T) if kind == "fp8, columns first" else (codes, scales)


def back(x: Any) -> torch.Tensor:
    return per_token_cast_back(*x) if isinstance(x, tuple) else x


def check_batch(rank: int, world: int, kind: str, with_topk: bool, previous: bool, asynchronous: bool) -> None:
    layer = layer_of(world)
    buffer = make_buffer()
    config = deep_ep.Config(24, 8, 256)
    all_batches = oracle.batches(layer, TOKENS[:world])
    batch, expected = all_batches[rank], oracle.arrived(layer, all_batches, rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    asked: dict[str, Any] = {"config": config, "async_finish": asynchronous}
    if previous:
        asked["previous_event"] = buffer.capture()

    def waited(event: deep_ep.EventOverlap) -> None:
        assert (event.event is not None) == asynchronous
        if asynchronous:
            event.current_stream_wait()

    arguments = {
        "x": cast(batch.x, kind),
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        **asked,
    }
    if with_topk:
        arguments |= {"topk_idx": batch.topk_idx, "topk_weights": batch.topk_weights}
    x, idx, weights, counts, handle, event = buffer.dispatch(**arguments)
    waited(event)

    sent = [cast(each.x, kind) for each in all_batches]
    if kind == "bf16":
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        assert torch.equal(x, oracle.gathered(sent, expected))
    else:
        assert x[0].dtype == torch.float8_e4m3fn and x[0].is_contiguous() and x[1].is_contiguous()
        codes = oracle.gathered([each[0].view(torch.uint8) for each in sent], expected)
        assert torch.equal(x[0].view(torch.uint8), codes)
        assert torch.equal(x[1], oracle.gathered([each[1] for each in sent], expected))
    received = back(x)
    assert counts == expected.counts
    if with_topk:
        assert torch.equal(idx, expected.topk_idx) and idx.dtype == torch.int64
        assert torch.equal(weights, expected.topk_weights) and weights.dtype == torch.float32
    else:
        assert idx is None and weights is None

    # The matrices of the handle, by what they mean.
    rank_prefix, channel_prefix, source_prefix, source_token, kept, send_head = handle
    channels = config.num_sms // 2
    rows = torch.stack([oracle.members(layer, each.topk_idx).sum(0) for each in all_batches])
    assert torch.equal(rank_prefix, rows.cumsum(0).int()) and rank_prefix.dtype == torch.int32
    assert torch.equal(source_token, expected.source_token) and source_token.dtype == torch.int32
    assert torch.equal(kept, in_rank)
    assert channel_prefix.shape == source_prefix.shape == (world, channels)
    assert torch.equal(channel_prefix[:, -1], per_rank)
    theirs: list[Any] = [None] * world
    dist.all_gather_object(theirs, channel_prefix)
    for source in range(world):
        before = torch.cat([torch.zeros(1, dtype=torch.int32), theirs[source][rank, :-1]])
        assert torch.equal(source_prefix[source], before)
    assert torch.equal(send_head >= 0, in_rank) and send_head.dtype == torch.int32
    share = -(-len(batch.x) // channels)
    for to, channel in itertools.product(range(world), range(channels)):
        of_channel = send_head[channel * share : (channel + 1) * share, to] if share else send_head[:0, to]
        assert of_channel[of_channel >= 0].tolist() == list(range(int((of_channel >= 0).sum())))

    # Worst-case sizing gives the same rows, and says nothing of the rest but that it names no expert.
    if with_topk:
        room = 4 * sum(TOKENS)
        worst = buffer.dispatch(**arguments, num_worst_tokens=room)
        waited(worst[5])
        assert worst[3] == [] and worst[1].shape == (room, layer.topk)
        count = len(received)
        whole = worst[0] if kind == "bf16" else worst[0][0].view(torch.uint8)
        first = x if kind == "bf16" else x[0].view(torch.uint8)
        assert len(whole) == room and torch.equal(whole[:count], first)
        assert torch.equal(worst[1][:count], idx) and torch.equal(worst[2][:count], weights)
        assert bool((worst[1][count:] == -1).all())

    # The same rows again along the handle.
    again = buffer.dispatch(x=cast(batch.x, kind), handle=handle, **asked)
    waited(again[5])
    assert again[1:5] == (None, None, None, None)
    assert torch.equal(back(again[0]), received)

    # Back: each token times the ranks it went to.
    result, result_weights, event = buffer.combine(received, handle, weights if with_topk else None, **asked)
    waited(event)
    results = [
        oracle.gathered([back(each) for each in sent], oracle.arrived(layer, all_batches, r)) for r in range(world)
    ]
    assert torch.equal(result, oracle.combined(layer, all_batches, rank, results))
    if with_topk:
        assert torch.equal(result_weights, batch.topk_weights * (batch.topk_idx >= 0))
    else:
        assert result_weights is None
    times = in_rank.sum(1, keepdim=True)
    if len(batch.x):
        reference = batch.x.float() * times
        assert calc_diff(result.float(), reference) < (5e-6 if kind == "bf16" else 1e-3)
    buffer.destroy()


@pytest.mark.parametrize("with_topk", [True, False], ids=["topk", "members"])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8, columns first"])
def test_rows_go_there_and_back(ranks: Any, kind: str, with_topk: bool) -> None:
    for previous, asynchronous in itertools.product([False, True], [False, True]):
        ranks.run(check_batch, kind, with_topk, previous, asynchronous)


def check_options(rank: int, world: int) -> None:
    layer = layer_of(world)
    buffer = make_buffer()
    all_batches = oracle.batches(layer, TOKENS[:world], seed=3)
    batch, expected = all_batches[rank], oracle.arrived(layer, all_batches, rank)
    layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    arguments = dict(
        num_tokens_per_rank=layout[0],
        num_tokens_per_expert=layout[2],
        is_token_in_rank=layout[3],
        topk_idx=batch.topk_idx,
        topk_weights=batch.topk_weights,
    )
    x, idx, _, counts, handle, _ = buffer.dispatch(batch.x, expert_alignment=16, **arguments)
    assert counts == [-(-count // 16) * 16 for count in expected.counts]
    assert torch.equal(idx, expected.topk_idx)

    results = [
        oracle.gathered([each.x for each in all_batches], oracle.arrived(layer, all_batches, r)) for r in range(world)
    ]
    bias = [torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(5 + n)).bfloat16() for n in range(2)]
    some = [((bias[0], None), bias[:1]), ((None, bias[1]), bias[1:]), ((None, None), [])]
    for given, told in [(None, []), (bias[0], bias[:1]), ((bias[0], bias[1]), bias), *some]:
        sums = buffer.combine(x, handle, bias=given)[0]
        assert torch.equal(sums, oracle.combined(layer, all_batches, rank, results, told))

    # Packed UE8M0 scales, and scales of fewer groups than moexpress has places for, keep their bits.
    codes = batch.x.float().to(torch.float8_e4m3fn)
    for columns, dtype in [(2, torch.float32), (1, torch.float32), (1, torch.int32), (2, torch.int32)]:
        scales = torch.arange(len(codes) * columns).view(len(codes), columns).to(dtype) + 1 + rank * 1000
        received = buffer.dispatch((codes, scales), **arguments)[0]
        assert received[1].dtype == dtype and received[1].shape == (len(x), columns)
        mine = expected.source_rank == rank
        assert torch.equal(received[1][mine], scales[expected.source_token[mine].long()])

    # A cached dispatch of another element type than the handle's.
    for _ in range(2):
        assert torch.equal(buffer.dispatch((codes, scales), handle=handle)[0][1], received[1])
    fp8_handle = buffer.dispatch((codes, scales), **arguments)[4]
    for _ in range(2):
        assert torch.equal(buffer.dispatch(batch.x, handle=fp8_handle)[0], x)
    buffer.destroy()


def test_options_of_dispatch_and_combine(ranks: Any) -> None:
    ranks.run(check_options)


def check_wide(rank: int, world: int) -> None:
    layer = oracle.Layer(world=world, experts=4 * world, topk=1, hidden=512)
    buffer = make_buffer()
    counts = [20 + 3 * other for other in range(world)]
    all_batches = oracle.batches(layer, counts, drop=0)
    batch, expected = all_batches[rank], oracle.arrived(layer, all_batches, rank)
    layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    codes = batch.x.float().to(torch.float8_e4m3fn)
    scales = torch.arange(len(codes), dtype=torch.int32)[:, None] * 0x01010101 + rank
    received = buffer.dispatch(
        (codes, scales), None, layout[0], layout[1], layout[3], layout[2], batch.topk_idx, batch.topk_weights
    )[0]
    everybody = [
        torch.arange(count, dtype=torch.int32)[:, None] * 0x01010101 + source for source, count in enumerate(counts)
    ]
    assert torch.equal(received[1], oracle.gathered(everybody, expected)) and received[1].dtype == torch.int32
    buffer.destroy()


def test_four_ue8m0_scales_travel_in_an_int32(ranks: Any) -> None:
    ranks.run(check_wide)


def check_statics(rank: int, world: int) -> None:
    Buffer = deep_ep.Buffer
    assert Buffer.num_sms == 20 and Buffer.is_sm90_compiled()
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(world).num_sms == 24
    Buffer.set_num_sms(20)
    buffer = Buffer(
        dist.group.WORLD,
        num_nvl_bytes=0,
        num_rdma_bytes=1 << 40,
        low_latency_mode=True,
        num_qps_per_rank=3,
        allow_nvlink_for_low_latency_mode=False,
        allow_mnnvl=True,
        use_fabric=True,
    )
    assert (buffer.rank, buffer.group_size, buffer.num_rdma_bytes) == (rank, world, 1 << 40)
    assert buffer.runtime.is_available() and buffer.runtime.get_num_rdma_ranks() == 1
    for call, told in [
        (lambda: buffer.internode_dispatch(None), "use dispatch"),
        (lambda: buffer.internode_combine(None, None), "use combine"),
    ]:
        with pytest.raises(NotImplementedError, match=told):
            call()
    if moexpress.cuda_available():
        assert buffer.get_comm_stream() is buffer.get_comm_stream()
    else:
        with pytest.raises(NotImplementedError, match="CPUs"):
            buffer.get_comm_stream()
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        buffer.destroy()


def test_the_constructor_takes_every_known_argument(two: Any) -> None:
    two.run(check_statics)


class Mpi:
    """An MPI communicator, as far as the buffer needs one. ``reverse``: its ranks are the group's from the last on."""

    def __init__(self, reverse: bool = False) -> None:
        self.step = -1 if reverse else 1

    def Get_rank(self) -> int:
        return range(self.Get_size())[:: self.step][dist.get_rank()]

    def Get_size(self) -> int:
        return dist.get_world_size()

    def allgather(self, told: object) -> list[Any]:
        everybody: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(everybody, told)
        return everybody[:: self.step]


def check_comm(rank: int, world: int) -> None:
    for comm, own in ((Mpi(), rank), (Mpi(reverse=True), world - 1 - rank)):
        buffer = deep_ep.Buffer(None, comm=comm, explicitly_destroy=True)
        assert (buffer.rank, buffer.group_size) == (own, world) and buffer.group is comm
        buffer.destroy()
        # Where there is a group, it counts.
        buffer = deep_ep.Buffer(dist.group.WORLD, comm=comm, explicitly_destroy=True)
        assert (buffer.rank, buffer.group_size) == (rank, world) and buffer.group is dist.group.WORLD
        buffer.destroy()


def test_a_buffer_of_an_mpi_communicator(two: Any) -> None:
    two.run(check_comm)


def check_subgroup(rank: int, world: int) -> list[int]:
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    buffer = deep_ep.Buffer(group, explicitly_destroy=True)
    layer = oracle.Layer(world=2, experts=4, topk=2, hidden=128)
    all_batches = oracle.batches(layer, [10, 20], seed=rank % 2)
    batch = all_batches[buffer.rank]
    layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    x = buffer.dispatch(batch.x, None, layout[0], None, layout[3], layout[2], batch.topk_idx, batch.topk_weights)[0]
    assert torch.equal(
        x, oracle.gathered([each.x for each in all_batches], oracle.arrived(layer, all_batches, buffer.rank))
    )
    buffer.destroy()
    return [buffer.rank, buffer.group_size]


def test_groups_that_are_parts_of_the_world(four: Any) -> None:
    assert four.run(check_subgroup) == [[0, 2], [0, 2], [1, 2], [1, 2]]


class Counting(TorchFunctionMode):
    """Counts what goes through Python instead of straight to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.calls += 1
        return function(*arguments, **(named or {}))


def check_function_modes(rank: int, world: int) -> None:
    layer = layer_of(world)
    buffer = make_buffer()
    batch = oracle.batches(layer, TOKENS[:world])[rank]
    with Counting() as counting:
        layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
        routing = (batch.topk_idx, batch.topk_weights)
        received = buffer.dispatch(batch.x, None, layout[0], None, layout[3], layout[2], *routing)
        again = buffer.dispatch(batch.x, handle=received[4])
        buffer.combine(again[0], received[4], received[2])
        assert counting.calls == 0
    buffer.destroy()


def test_function_modes_do_not_slow_calls(ranks: Any) -> None:
    ranks.run(check_function_modes)
