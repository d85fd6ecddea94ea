"""deep_ep.Buffer over several nodes, of CPU ranks over the loop: what DeepEP's own internode test looks at, which takes 8 GPUs a node; then
what it does not. ``MOEXPRESS_INTERNODE=2x8`` runs the first part with so many nodes and ranks, beside the two nodes of two."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import conftest
import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep.utils.math import calc_diff, per_token_cast_back, per_token_cast_to_fp8
from moexpress import errors

NODES = [(2, 2)]
if "MOEXPRESS_INTERNODE" in os.environ:
    NODES.append(tuple(int(number) for number in os.environ["MOEXPRESS_INTERNODE"].split("x")))  # type: ignore[arg-type]

LIMIT = 600.0
"""Seconds: sixteen ranks share the cores of a laptop."""


@pytest.fixture(params=NODES, ids=lambda nodes: f"{nodes[0]} nodes of {nodes[1]}")
def nodes(request: pytest.FixtureRequest) -> conftest.Ranks:
    """Ranks on several nodes."""
    return conftest.on_nodes(*request.param)


def make_buffer(**options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, 1 << 26, 1 << 26, explicitly_destroy=True, **options)


@dataclass
class Trial:
    """What one rank sends, and what all of them say of it."""

    rank: int
    world: int
    nodes: int
    tokens: int = 48
    hidden: int = 256
    topk: int = 8
    where: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        torch.manual_seed(self.rank)
        self.experts, self.config = 4 * self.world, deep_ep.Config(8, 8, 512, 16, 128)
        ones = torch.ones(self.tokens, self.hidden, dtype=torch.bfloat16)
        constant, random = ones * self.rank, torch.randn(self.tokens, self.hidden).bfloat16()
        codes, scales = per_token_cast_to_fp8(constant)
        self.inputs = {
            "random bf16": random,
            "constant bf16": constant,
            "random fp8": per_token_cast_to_fp8(random),
            "constant fp8": (codes, scales.T.contiguous().T),
        }
        # The best experts of each token's best nodes, of which there are at most four.
        scores = torch.randn(self.tokens, self.experts).abs() + 1
        best = scores.view(self.tokens, self.nodes, -1).amax(2).topk(min(self.nodes, 4)).indices
        allowed = torch.zeros(self.tokens, self.nodes, dtype=torch.bool).scatter_(1, best, True)
        allowed = allowed.repeat_interleave(self.experts // self.nodes, 1)
        self.topk_idx = scores.masked_fill(~allowed, 0).topk(self.topk).indices
        self.weights = {
            True: torch.randn(self.tokens, self.topk),
            False: torch.full((self.tokens, self.topk), self.rank),
        }
        self.weights = {random: weights.float() for random, weights in self.weights.items()}
        local = self.experts // self.world
        self.in_rank = torch.stack([(self.topk_idx // local == rank).any(1) for rank in range(self.world)], 1)
        of_node = self.topk_idx // (self.experts // self.nodes)
        self.per_node = torch.stack([(of_node == node).any(1).sum() for node in range(self.nodes)]).int()
        self.per_rank = self.in_rank.sum(0).int()
        self.per_expert = torch.bincount(self.topk_idx.flatten(), minlength=self.experts).int()
        self.arriving, self.of_experts = self.per_rank.clone(), self.per_expert.clone()
        dist.all_reduce(self.arriving)
        dist.all_reduce(self.of_experts)
        self.inputs = {
            kind: tuple(part.to(self.where) for part in x) if isinstance(x, tuple) else x.to(self.where)
            for kind, x in self.inputs.items()
        }
        self.weights = {random: weights.to(self.where) for random, weights in self.weights.items()}
        self.topk_idx, self.in_rank = self.topk_idx.to(self.where), self.in_rank.to(self.where)
        self.per_rank, self.per_node = self.per_rank.to(self.where), self.per_node.to(self.where)
        self.per_expert = self.per_expert.to(self.where)


def check_layout(trial: Trial, buffer: deep_ep.Buffer) -> None:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(trial.topk_idx, trial.experts)
    assert per_node is not None and per_node.dtype == torch.int32
    assert torch.equal(per_rank, trial.per_rank) and torch.equal(per_node, trial.per_node)
    assert torch.equal(per_expert, trial.per_expert) and torch.equal(in_rank, trial.in_rank)


def check_segments(x: torch.Tensor, ends: list[int]) -> None:
    """Rows of each source are that rank's number."""
    assert torch.equal(x.amin(1), x.amax(1)) and ends[-1] == len(x)
    for rank, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert (x[first:end] == rank).all(), (rank, first, end)


def check_way(trial: Trial, buffer: deep_ep.Buffer, kind: str, chosen: bool, defer: bool, behind: bool) -> None:
    """A dispatch with these options, a cached one, and a combine."""
    x, random = trial.inputs[kind], kind.startswith("random")
    weights = trial.weights[random]

    def options() -> dict[str, Any]:
        given = {"config": trial.config, "async_finish": defer}
        return given | ({"previous_event": buffer.capture()} if behind else {})

    def plain(rows: Any) -> torch.Tensor:
        return per_token_cast_back(*rows) if isinstance(rows, tuple) else rows

    layout = {
        "num_tokens_per_rank": trial.per_rank,
        "num_tokens_per_rdma_rank": trial.per_node,
        "is_token_in_rank": trial.in_rank,
        "num_tokens_per_expert": trial.per_expert,
    }
    choices = {"topk_idx": trial.topk_idx, "topk_weights": weights} if chosen else {}
    rows, local_idx, local_weights, counts, handle, event = buffer.dispatch(x, **layout, **choices, **options())
    if defer:
        event.current_stream_wait()
    rows = plain(rows)
    ends = handle[-4].tolist()
    assert len(rows) == trial.arriving[trial.rank]
    assert counts == trial.of_experts.view(trial.world, -1)[trial.rank].tolist()
    if not random:
        check_segments(rows, ends)
    if chosen:
        local = trial.experts // trial.world
        assert ((local_idx >= -1) & (local_idx < local)).all()
        assert [int((local_idx == expert).sum()) for expert in range(local)] == counts
        if not random:
            # So that every rank returns all of a token's weights.
            local_weights = torch.where(local_idx == -1, local_weights.amax(1, keepdim=True), local_weights)
            check_segments(local_weights, ends)
    else:
        again, *nothing, event = buffer.dispatch(x, handle=handle, **options())
        if defer:
            event.current_stream_wait()
        assert nothing == [None] * 4 and torch.equal(plain(again), rows)
    bias = tuple(make(trial.tokens, trial.hidden).bfloat16().to(trial.where) for make in (torch.ones, torch.randn))
    sums, summed, event = buffer.combine(rows, handle, local_weights, bias=bias, **options())
    if defer:
        event.current_stream_wait()
    went = trial.in_rank.sum(1, keepdim=True)
    back = (sums.float() - bias[0].float() - bias[1].float()) / went
    bound = 5e-4 if kind == "random fp8" else 5e-6
    assert calc_diff(back, trial.inputs["random bf16" if random else "constant bf16"]) < bound
    if chosen:
        expected = weights if random else weights * went
        assert calc_diff(summed, expected) < 1e-9


def check_as_deep_ep(rank: int, world: int, nodes: int, **sizes: Any) -> int:
    trial, buffer, ways = Trial(rank, world, nodes, **sizes), make_buffer(), 0
    runtime = buffer.runtime
    size = world // nodes
    assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (nodes, rank // size)
    assert (runtime.get_root_rdma_rank(True), runtime.get_root_rdma_rank(False)) == (rank % size, 0)
    check_layout(trial, buffer)
    for behind, defer, kind, chosen in itertools.product((False, True), (False, True), trial.inputs, (False, True)):
        check_way(trial, buffer, kind, chosen, defer, behind)
        ways += 1
    buffer.destroy()
    return ways


def test_what_deep_eps_internode_test_looks_at(nodes: conftest.Ranks) -> None:
    count = nodes.world // (nodes.ranks_per_node or 1)
    assert nodes.run(check_as_deep_ep, count, limit=LIMIT) == [32] * nodes.world


# What it does not look at: every row, every bit, empty ranks, handles.

TOKENS = [37, 0, 64, 5]
LAYER = oracle.Layer(world=4, experts=8, topk=4, hidden=256, ranks_per_node=2)


def batches(seed: int = 0) -> list[oracle.Batch]:
    return oracle.batches(LAYER, TOKENS, seed)


def received_by_all(all_batches: list[oracle.Batch]) -> list[torch.Tensor]:
    each = [batch.x for batch in all_batches]
    return [oracle.gathered(each, oracle.arrived(LAYER, all_batches, rank)) for rank in range(LAYER.world)]


def dispatched(buffer: deep_ep.Buffer, batch: oracle.Batch, **options: Any) -> Any:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, LAYER.experts)
    choices = (batch.topk_idx, batch.topk_weights)
    return buffer.internode_dispatch(batch.x, None, per_rank, per_node, in_rank, per_expert, *choices, **options)


def check_bits(rank: int, world: int) -> None:
    buffer = make_buffer()
    for seed, alignment in ((0, 1), (1, 16), (2, 1)):
        all_batches = batches(seed)
        batch, arrived = all_batches[rank], oracle.arrived(LAYER, all_batches, rank)
        rows = received_by_all(all_batches)
        x, idx, weights, counts, handle, _ = dispatched(buffer, batch, expert_alignment=alignment)
        assert torch.equal(x, rows[rank]) and torch.equal(idx, arrived.topk_idx)
        assert torch.equal(weights, arrived.topk_weights)
        assert counts == [-(-count // alignment) * alignment for count in arrived.counts]
        # Experts that return other rows, so that sums have bits to round.
        results = [one * (other + 1) / 3 for other, one in enumerate(rows)]
        bias = [torch.randn(batch.x.shape).bfloat16() for _ in range(seed)]
        back, summed, _ = buffer.internode_combine(results[rank], handle, weights, tuple(bias) or None)
        assert torch.equal(back, oracle.combined(LAYER, all_batches, rank, results, bias))
        assert torch.equal(summed, batch.topk_weights * (batch.topk_idx >= 0))
        # Room for the worst case, and no counts.
        most, *_, handle, _ = dispatched(buffer, batch, num_worst_tokens=200)
        assert most.shape[0] == 200 and torch.equal(most[: len(x)], x)
    buffer.destroy()


def test_rows_and_sums_over_nodes_are_those_of_the_oracle(two_nodes: conftest.Ranks) -> None:
    two_nodes.run(check_bits)


CHANNELS = 3


def share(tokens: int, token: int) -> int:
    return token // -(-tokens // CHANNELS)


def upto(numbers: list[int]) -> list[int]:
    return list(itertools.accumulate(numbers))


def numbered(flags: list[bool], channels: list[int]) -> list[int]:
    """The number of each that is set among those of its channel, -1 of the others."""
    seen = dict.fromkeys(range(CHANNELS), -1)
    numbers = []
    for flag, channel in zip(flags, channels, strict=True):
        seen[channel] += flag
        numbers.append(seen[channel] if flag else -1)
    return numbers


def check_handle(rank: int, world: int) -> None:
    """Each entry against what all ranks' choices say, computed one token at a time."""
    buffer, all_batches = make_buffer(), batches()
    size = LAYER.ranks_per_node or world
    node, place = divmod(rank, size)
    members = [oracle.members(LAYER, batch.topk_idx) for batch in all_batches]
    of_node = [one.view(-1, world // size, size).any(2) for one in members]
    channels = [[share(len(one), token) for token in range(len(one))] for one in members]
    made = dispatched(buffer, all_batches[rank], config=deep_ep.Config(2 * CHANNELS))
    handle = made[4]
    assert len(handle) == 10 and torch.equal(handle[0], members[rank])

    def counted(source: int, flags: torch.Tensor) -> list[int]:
        """Tokens of each channel that are set."""
        chosen = [channel for channel, flag in zip(channels[source], flags.tolist(), strict=True) if flag]
        return [chosen.count(channel) for channel in range(CHANNELS)]

    gates = [other * size + place for other in range(world // size)]
    sent = [upto(counted(rank, of_node[rank][:, other])) for other in range(len(gates))]
    passed = [upto(counted(gate, of_node[gate][:, node])) for gate in gates]
    arrived = [counted(source, members[source][:, rank]) for source in range(world)]
    before = [0, *upto([sum(one) for one in arrived])]
    assert handle[1].tolist() == sent
    assert handle[2].tolist() == [upto(counted(rank, members[rank][:, other])) for other in range(world)]
    assert handle[3].tolist() == passed and handle[4].tolist() == upto([one[-1] for one in passed])
    begins = [[start + done for done in [0, *upto(one)][:-1]] for start, one in zip(before, arrived, strict=False)]
    assert handle[5].tolist() == begins and handle[6].tolist() == before[1:]
    sources = oracle.arrived(LAYER, all_batches, rank).source_rank
    assert handle[7].dtype == torch.uint8 and handle[7].shape == (len(sources), 8)
    assert handle[7].view(torch.int32)[:, 0].tolist() == (sources // size).tolist()
    assert (handle[7].view(torch.int32)[:, 1] == 1 << place).all()
    heads = [numbered(of_node[rank][:, other].tolist(), channels[rank]) for other in range(len(gates))]
    assert handle[8].T.tolist() == heads
    through = []
    for gate in gates:
        rows = of_node[gate][:, node].nonzero()[:, 0].tolist()
        mine = members[gate][rows, node * size : (node + 1) * size]
        through += zip(
            *[numbered(column, [channels[gate][row] for row in rows]) for column in mine.T.tolist()], strict=True
        )
    assert [tuple(row) for row in handle[9].tolist()] == through
    assert all(one.dtype == torch.int32 for number, one in enumerate(handle) if number not in (0, 7))
    buffer.destroy()


def test_handles_over_nodes_say_where_each_row_went(two_nodes: conftest.Ranks) -> None:
    two_nodes.run(check_handle)


class Silent:
    """A native handle of a backend that does not tell what passed through a rank, as GPUs do not."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        if name.startswith("rail_"):
            raise errors.Unsupported("what passed through this rank is not supported")
        return getattr(self.native, name)


def check_silent(rank: int, world: int) -> None:
    buffer, all_batches = make_buffer(), batches()
    rows = received_by_all(all_batches)
    handle = dispatched(buffer, all_batches[rank])[4]
    whole, native = list(handle), handle.routing.native
    handle.routing.native = Silent(native)
    parts = list(handle)
    for index in (3, 4, 9):
        assert parts[index].numel() == 0
        with pytest.raises(NotImplementedError, match="what passed through this rank"):
            handle[index]
    assert all(torch.equal(parts[index], whole[index]) for index in (0, 1, 2, 5, 6, 7, 8))
    handle.routing.native = native
    sums = oracle.combined(LAYER, all_batches, rank, rows)
    assert torch.equal(buffer.combine(rows[rank], parts)[0], sums)  # type: ignore[arg-type]
    buffer.destroy()


def test_handles_are_taken_apart_where_a_backend_tells_less(two_nodes: conftest.Ranks) -> None:
    two_nodes.run(check_silent)


def check_remade(rank: int, world: int) -> None:
    buffer, all_batches = make_buffer(), batches()
    batch, rows = all_batches[rank], received_by_all(all_batches)
    handle = dispatched(buffer, batch)[4]
    sums = buffer.combine(rows[rank], handle)[0]
    assert torch.equal(sums, oracle.combined(LAYER, all_batches, rank, rows))
    operations = buffer._communicators.all_normal()[0].stats()["operations"]
    for remade, learns in ((list(handle), 0), ([one.clone() for one in handle], 1)):
        assert torch.equal(buffer.internode_dispatch(batch.x, handle=remade)[0], rows[rank])
        assert torch.equal(buffer.internode_combine(rows[rank], remade)[0], sums)
        done = buffer._communicators.all_normal()[0].stats()["operations"]
        assert done - operations == 2 + learns
        operations = done
    # Rows of another type than the handle's.
    codes, scales = per_token_cast_to_fp8(batch.x)
    cast = [per_token_cast_back(*per_token_cast_to_fp8(each.x)) for each in all_batches]
    expected = oracle.gathered(cast, oracle.arrived(LAYER, all_batches, rank))
    for _ in range(2):
        assert torch.equal(per_token_cast_back(*buffer.dispatch((codes, scales), handle=handle)[0]), expected)
    with pytest.raises(ValueError, match="or its ten tensors"):
        buffer.combine(rows[rank], list(handle)[:6])  # type: ignore[arg-type]
    short = [*list(handle)[:7], handle[7][:, :4], *list(handle)[8:]]
    with pytest.raises(ValueError, match=r"handle\[7\] is torch.uint8 .* recv_src_meta, torch.uint8 \[rows, 8\]"):
        buffer.combine(rows[rank], short)  # type: ignore[arg-type]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, LAYER.experts)
    with pytest.raises(ValueError, match=r"num_tokens_per_rdma_rank .* \[2\]"):
        buffer.dispatch(batch.x, None, per_rank, per_rank, in_rank, per_expert, batch.topk_idx, batch.topk_weights)
    buffer.destroy()


def test_handles_over_nodes_may_be_put_together_again(two_nodes: conftest.Ranks) -> None:
    two_nodes.run(check_remade)


def check_positional(rank: int, world: int) -> None:
    """All that DeepEP's has, in its order."""
    buffer, all_batches = make_buffer(), batches()
    batch = all_batches[rank]
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, LAYER.experts)
    choices, asked = (batch.topk_idx, batch.topk_weights), (16, buffer.get_dispatch_config(world), None, True, False)
    x, _, _, counts, *_ = buffer.internode_dispatch(
        batch.x, None, per_rank, per_node, in_rank, per_expert, *choices, *asked
    )
    assert torch.equal(x, received_by_all(all_batches)[rank]) and all(count % 16 == 0 for count in counts)
    buffer.destroy()


def test_a_dispatch_over_nodes_takes_deep_eps_arguments_by_their_places(two_nodes: conftest.Ranks) -> None:
    two_nodes.run(check_positional)


def check_one_node(rank: int, world: int) -> None:
    buffer = make_buffer()
    for call in (buffer.internode_dispatch, buffer.internode_combine):
        with pytest.raises(NotImplementedError, match=r"is not supported on one node, where all 2 ranks are: use \w+"):
            call(torch.zeros(1, 8).bfloat16(), None)  # type: ignore[arg-type]
    buffer.destroy()


def test_on_one_node_calls_between_nodes_are_refused(two: conftest.Ranks) -> None:
    two.run(check_one_node)
