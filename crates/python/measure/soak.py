"""Compares many low-latency rounds bit for bit: batches of random sizes, ranks that are late at random.

    python -m measure.soak --ranks 2 --rounds 1000000            # needs two GPUs
    python -m measure.soak --ranks 2 --rounds 40 --device cpu

A round is a dispatch, experts, and a combine. Rows and weights are small whole numbers, and the expert ``e`` adds a number of its own to
each row, so that every sum is exact in bf16 whatever its order, and a row that is stale, torn, or at another expert shows. Experts, rows, weights and
the choices that are left out are drawn anew in each round, on the device. How many tokens a rank has (from none to the most), whether calls have one
launch or two, whether a token's results come home as a row a choice or a row a rank, and before what a rank is late and how long, is drawn for each of
``--scripts`` scripts of eight rounds. On GPUs each script is a captured graph, and the scripts are replayed in an order that is drawn, too.

The exit status is 0 if no element of any result was wrong. ``--plant`` changes one element of what one expert makes: it must be found.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from moexpress import Communicator

from . import ranks
from .ranks import largest, plain, say

TOPK, EXPERTS = 8, 16
ROUNDS = 8
"""Of a script."""
LONGEST = 40_000
"""Clock cycles that a rank is late at most: some 20 us."""
EVERY = 64
"""Scripts after which the host looks at what was found."""


class Round:
    """One round of a script: what is drawn for it, and its memory."""

    def __init__(self, soak: Soak, draw: random.Random, by_choice: bool) -> None:
        self.soak, self.by_choice = soak, by_choice
        most, hidden, where = soak.most, soak.hidden, soak.where
        # Half of the batches are small, as decoding has them.
        self.tokens = draw.randint(0, draw.choice([4, most]))
        self.halves = draw.random() < 0.5
        self.late = [draw.randint(1, LONGEST) if draw.random() < 0.25 else 0 for _ in range(4)]
        self.x = torch.empty(self.tokens, hidden, dtype=torch.bfloat16, device=where)
        self.plant = False

    def pause(self, at: int) -> None:
        if self.late[at] and self.soak.where.type == "cuda":
            torch.cuda._sleep(self.late[at])

    def run(self) -> None:
        soak, tokens, where = self.soak, self.tokens, self.soak.where
        communicator = soak.communicator
        x = self.x.random_(-2, 3)
        chosen = torch.rand(tokens, EXPERTS, device=where).topk(TOPK).indices
        left_out = torch.rand(tokens, TOPK, device=where) < 0.1
        chosen = chosen.masked_fill(left_out, -1)
        weights = torch.randint(1, 3, (tokens, TOPK), device=where).float()
        # Weights that go along with the rows ask for a row a rank on the way home, others for a row a choice.
        there, back = (None, weights) if self.by_choice else (weights, None)
        self.pause(0)
        if self.halves:
            sent = communicator.send_dispatch(x, chosen, there)
            self.pause(1)
            got = sent.receive()
        else:
            got = communicator.low_latency_dispatch(x, chosen, there)
        assert got.handle is not None
        y = plain(got.x) + soak.added
        if self.plant:
            y[0, 0, 0] += 1
        self.pause(2)
        if self.halves:
            returned = communicator.send_combine(y, got.handle, back)
            self.pause(3)
            sums = returned.receive()
        else:
            sums = communicator.low_latency_combine(y, got.handle, back)
        counted = weights.masked_fill(left_out, 0)
        extra = (counted * soak.of_expert[chosen.clamp(min=0)]).sum(1, keepdim=True)
        expected = x.float() * counted.sum(1, keepdim=True) + extra
        soak.wrong += (sums != expected.bfloat16()).sum()


class Soak:
    """A rank's communicator and its scripts."""

    def __init__(
        self, rank: int, world: int, where: torch.device, hidden: int, most: int, options: argparse.Namespace
    ) -> None:
        self.where, self.hidden, self.most = where, hidden, most
        self.communicator = Communicator(
            experts=EXPERTS, topk=TOPK, hidden=hidden, max_tokens=most, device=where, low_latency=True
        )
        self.of_expert = (torch.arange(EXPERTS, device=where) % 4).float()
        local = EXPERTS // world
        self.added = self.of_expert[rank * local : (rank + 1) * local].bfloat16().view(local, 1, 1)
        self.wrong = torch.zeros((), dtype=torch.int64, device=where)
        torch.manual_seed(options.seed * 1000 + rank)
        # What all ranks must have alike is drawn by all, and what is each one's own by it alone.
        own = random.Random(options.seed * 1000 + rank + 1)
        shared = random.Random(options.seed)
        # A graph writes to the memory of its rounds.
        self._replayed: list[list[Round]] = []
        self.scripts = []
        for at in range(options.scripts):
            script = [Round(self, own, by_choice=shared.random() < 0.5) for _ in range(ROUNDS)]
            script[0].plant = options.plant and rank == 0 and at == 0
            self.scripts.append(self._runs(script))

    def _runs(self, script: list[Round]) -> Callable[[], None]:
        def run() -> None:
            for one in script:
                one.run()

        if self.where.type == "cpu":
            return run
        run()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        self._replayed.append(script)
        return graph.replay


SHAPES = [(512, 128), (2048, 64), (7168, 32)]
"""Hidden size and most tokens of the communicators, which take turns."""


def work(rank: int, world: int, where: torch.device, options: argparse.Namespace) -> None:
    soaks = [Soak(rank, world, where, hidden, most, options) for hidden, most in SHAPES]
    order, began, done, told = random.Random(options.seed), time.monotonic(), 0, 0.0
    while done < options.rounds:
        for _ in range(EVERY if where.type == "cuda" else 1):
            order.choice(order.choice(soaks).scripts)()
            done += ROUNDS
        wrong = sum(int(soak.wrong) for soak in soaks)
        if largest(wrong, where) > 0:
            raise SystemExit(f"rank {rank}: {wrong} elements are wrong after {done} rounds of seed {options.seed}")
        took = time.monotonic() - began
        if took - told >= 10:
            say(rank, f"{done} rounds in {took:.0f} s")
            told = took
    say(rank, f"{done} rounds in {time.monotonic() - began:.0f} s, nothing wrong; seed {options.seed}")
    dist.barrier()
    for soak in soaks:
        soak.scripts.clear()
        soak.communicator.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m measure.soak", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--scripts", type=int, default=24, help="of each communicator")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options = parser.parse_args()
    missing = ranks.check_gpus(options.ranks, options.device)
    if missing:
        parser.error(missing)
    return ranks.spawn(work, options.ranks, options.device, options)


if __name__ == "__main__":
    sys.exit(main())
