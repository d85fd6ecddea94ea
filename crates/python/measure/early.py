# Kernels of Triton have no types.
# mypy: ignore-missing-imports, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Times experts that begin before all of their rows are there, and a combine that begins before all of their results are, on GPUs; needs Triton.

    python -m measure.early --ranks 2                       # needs two GPUs

Each expert is two GEMMs in bf16, hidden -> inner -> hidden: a masked, persistent kernel of Triton over tiles of ``--block`` rows. The same kernel runs behind
the calls, and beside them: there it waits for each block of rows by the counters of :class:`moexpress.Early`, and adds to them what it has made. Rows of the
table, in microseconds of the slowest rank, medians:

    dispatch                    both halves in one launch
    dispatch, halves            one launch each
    dispatch, then GEMM         one launch, and the first GEMM behind it
    dispatch beside GEMM        the sending half, then the receiving half beside the first GEMM
      replayed                  the same, captured into a graph: nothing is reset between replays
    layer                       dispatch, both GEMMs, combine, one behind the other
    layer beside                the first GEMM beside the dispatch, the second beside the combine's sending half

The kernel and the half beside it share the multiprocessors: ``--dispatch-sms`` and ``--combine-sms`` are the half's, the rest the kernel's. Whatever runs
beside is compared bit for bit with what runs behind, in ``--rounds`` rounds of other rows each, before anything is timed.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from moexpress import Communicator, Early, LowReceived, Ready

from . import ranks
from .ranks import Clock, say

try:
    import triton
    import triton.language as tl
except ImportError:  # where only the rest of this package is used
    triton = None

TOPK = 8
COLUMNS, DEPTH = 128, 64
"""Of a tile of the result, and of a step along the sum."""
SPINS = 1 << 24
"""Looks at a counter before a consumer gives up: seconds."""

if triton is not None:

    @triton.jit
    def _reaches(counter, due, stopped, epoch, spins_allowed):
        """Waits until a counter has reached ``due``; whether it has. One thread looks, with acquire, and a barrier follows."""
        spins = 0
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        while (seen < due) & (spins < spins_allowed):
            spins += 1
            if tl.atomic_add(stopped, 0, sem="acquire", scope="gpu") == epoch:
                spins = spins_allowed
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        return seen >= due

    @triton.jit
    def _experts(
        x,  # bf16 [experts, room, depth]
        weights,  # bf16 [experts, depth, width]
        y,  # out: bf16 [experts, room, width]
        counts,  # int32 [experts]
        epoch_at,
        stopped,
        expected,
        arrived,
        ready,  # of Early
        missed,  # int32 [1], added to: tiles whose rows did not come
        experts,
        room,
        depth,
        width,
        spins_allowed,
        BLOCK: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
        WAITS: tl.constexpr,
        SAYS: tl.constexpr,
    ):
        blocks = tl.cdiv(room, BLOCK)
        across = tl.cdiv(width, COLUMNS)
        epoch = tl.load(epoch_at, volatile=True)
        # Tiles of a block are neighbours: a block is complete soon, and its rows are in the cache.
        for tile in range(tl.program_id(0), experts * blocks * across, tl.num_programs(0)):
            at = tile // across
            expert = at // blocks
            first = (at % blocks) * BLOCK
            there = True
            if WAITS:
                # How many rows there are is known when `expected` is of this batch.
                there = _reaches(expected + at, epoch, stopped, epoch, spins_allowed)
            rows = tl.load(counts + expert, volatile=True) - first
            if rows > 0:
                if WAITS:
                    due = tl.load(expected + at, volatile=True)
                    there = there & _reaches(arrived + at, due, stopped, epoch, spins_allowed)
                if there:
                    row = tl.arange(0, BLOCK)
                    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
                    along = tl.arange(0, DEPTH)
                    begin = (expert * room + first).to(tl.int64)
                    total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
                    for step in range(0, depth, DEPTH):
                        a_at = x + (begin + row[:, None]) * depth + step + along[None, :]
                        a = tl.load(a_at, mask=(row[:, None] < rows) & (step + along[None, :] < depth), other=0.0)
                        b_at = weights + (expert.to(tl.int64) * depth + step + along[:, None]) * width + column[None, :]
                        b = tl.load(b_at, mask=(step + along[:, None] < depth) & (column[None, :] < width), other=0.0)
                        total = tl.dot(a, b, total)
                    y_at = y + (begin + row[:, None]) * width + column[None, :]
                    tl.store(y_at, total.to(tl.bfloat16), mask=(row[:, None] < rows) & (column[None, :] < width))
                    if SAYS:
                        # All threads have stored; then one thread's release.
                        tl.debug_barrier()
                        tl.atomic_add(ready + at, 1, sem="release", scope="gpu")
                else:
                    tl.atomic_add(missed, 1, sem="relaxed", scope="gpu")


class Layer:
    """A batch, its experts, and the ways through them."""

    def __init__(self, rank: int, where: torch.device, options: argparse.Namespace) -> None:
        hidden, inner, local = options.hidden, options.inner, options.experts // options.ranks
        self.rank, self.where, self.options = rank, where, options
        self.communicator = Communicator(
            experts=options.experts,
            topk=TOPK,
            hidden=hidden,
            max_tokens=options.tokens,
            device=where,
            low_latency=True,
        )
        self.sms = torch.cuda.get_device_properties(where).multi_processor_count
        self.early = self.communicator.early(options.block, multiprocessors=options.dispatch_sms)
        self.side = torch.cuda.Stream(where)
        room = options.ranks * options.tokens
        generator = torch.Generator(where).manual_seed(1)

        def matrix(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=where).div_(shape[1] ** 0.5).bfloat16()

        self.up, self.down = matrix(local, hidden, inner), matrix(local, inner, hidden)
        self.between = torch.zeros(local, room, inner, dtype=torch.bfloat16, device=where)
        self.y = torch.zeros(local, room, hidden, dtype=torch.bfloat16, device=where)
        self.missed = torch.zeros(1, dtype=torch.int32, device=where)
        self.x = torch.empty(options.tokens, hidden, dtype=torch.bfloat16, device=where)
        self.topk_idx = torch.empty(options.tokens, TOPK, dtype=torch.int64, device=where)
        self.weights = torch.empty(options.tokens, TOPK, device=where)
        self.draw(0)

    def draw(self, turn: int) -> None:
        """Another batch, in the same memory."""
        generator = torch.Generator(self.where).manual_seed(1000 * turn + self.rank)
        self.x.normal_(generator=generator)
        scores = torch.rand(len(self.x), self.options.experts, generator=generator, device=self.where)
        self.topk_idx.copy_(scores.topk(TOPK).indices)
        self.weights.uniform_(generator=generator)

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        into: torch.Tensor,
        got: LowReceived,
        programs: int,
        waits: bool,
        says: bool,
    ) -> None:
        experts, room, depth = a.shape
        counters: Early = self.early
        _experts[(programs,)](
            a,
            b,
            into,
            got.expert_counts,
            counters.epoch,
            counters.stopped,
            counters.expected,
            counters.arrived,
            counters.ready,
            self.missed,
            experts,
            room,
            depth,
            b.shape[2],
            SPINS,
            BLOCK=self.options.block,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            WAITS=waits,
            SAYS=says,
            num_warps=4,
        )

    # Ways through the layer.

    def dispatch(self) -> LowReceived:
        return self.communicator.low_latency_dispatch(self.x, self.topk_idx, self.weights)

    def halves(self) -> LowReceived:
        return self.communicator.send_dispatch(self.x, self.topk_idx, self.weights).receive()

    def then(self) -> LowReceived:
        got = self.dispatch()
        self.gemm(got.x, self.up, self.between, got, self.sms, waits=False, says=False)
        return got

    def beside(self) -> LowReceived:
        sent = self.communicator.send_dispatch(self.x, self.topk_idx, self.weights, early=self.early)
        got = sent.receive(beside=True)
        # On the current stream, which does not wait for the receiving half.
        programs = self.sms - self.options.dispatch_sms
        self.gemm(got.x, self.up, self.between, got, programs, waits=True, says=False)
        torch.cuda.current_stream().wait_stream(self.communicator.order.stream)
        return got

    def layer(self) -> torch.Tensor:
        got = self.then()
        self.gemm(self.between, self.down, self.y, got, self.sms, waits=False, says=False)
        assert got.handle is not None
        return self.communicator.low_latency_combine(self.y, got.handle)

    def layer_beside(self) -> torch.Tensor:
        got, current = self.beside(), torch.cuda.current_stream()
        # The results are made on another stream than the one that the combine follows.
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            programs = self.sms - self.options.combine_sms
            self.gemm(self.between, self.down, self.y, got, programs, waits=False, says=True)
        due = triton.cdiv(self.options.hidden, COLUMNS)
        assert got.handle is not None
        ready = Ready(due, multiprocessors=self.options.combine_sms)
        sums = self.communicator.send_combine(self.y, got.handle, ready=ready).receive()
        current.wait_stream(self.side)
        return sums

    def check(self, turn: int) -> None:
        """Whatever runs beside gives what runs behind, bit for bit."""
        self.draw(turn)
        expected, got = self.layer().clone(), self.then()
        counts, between = got.expert_counts.tolist(), self.between.clone()
        self.between.zero_()
        self.y.zero_()
        beside = self.layer_beside().clone()
        torch.cuda.synchronize()
        if int(self.missed):
            raise SystemExit(f"rank {self.rank}, round {turn}: {int(self.missed)} tiles waited in vain")
        for expert, rows in enumerate(counts):
            if not torch.equal(self.between[expert, :rows], between[expert, :rows]):
                raise SystemExit(
                    f"rank {self.rank}, round {turn}: rows of expert {expert} were read before they were there"
                )
        if not torch.equal(beside, expected):
            raise SystemExit(f"rank {self.rank}, round {turn}: results were read before they were there")


def work(rank: int, world: int, where: torch.device, options: argparse.Namespace) -> None:
    layer, clock = Layer(rank, where, options), Clock(where, options.samples)
    for turn in range(options.rounds):
        layer.check(turn)
    say(rank, f"{options.rounds} rounds beside as behind")
    for name, call in [
        ("dispatch", layer.dispatch),
        ("dispatch, halves", layer.halves),
        ("dispatch, then GEMM", layer.then),
        ("dispatch beside GEMM", layer.beside),
    ]:
        say(rank, f"{name:<28}{clock(call):>10.1f}")
    graph = torch.cuda.CUDAGraph()
    dist.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = layer.beside()
    say(rank, f"{'  replayed':<28}{clock(graph.replay):>10.1f}")
    for name, whole in [("layer", layer.layer), ("layer beside", layer.layer_beside)]:
        say(rank, f"{name:<28}{clock(whole):>10.1f}")
    if int(layer.missed):
        raise SystemExit(f"rank {rank}: {int(layer.missed)} tiles waited in vain")
    torch.cuda.synchronize()
    dist.barrier()
    del graph, kept
    layer.communicator.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Experts beside dispatch and combine of low latency.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--dispatch-sms", type=int, default=32)
    parser.add_argument("--combine-sms", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    problem = "Triton is missing: pip install triton" if triton is None else ranks.check_gpus(options.ranks, "cuda")
    if problem is not None:
        print(f"error: {problem}")
        return 2
    return ranks.spawn(work, options.ranks, "cuda", options)


if __name__ == "__main__":
    sys.exit(main())
