"""Times dispatch and combine of V2's expanded rows: one for each choice, ready for a grouped GEMM.

    python -m measure.expanded --ranks 2                    # needs two GPUs
    python -m measure.expanded --ranks 2 --device cpu --hidden 256 --tokens 1,16

A row for each number of tokens and each alignment. *Uncounted*: ``do_cpu_sync=False``, new routing. *Rounded once*: a combine of a buffer without
``allow_multiple_reduction``. Beside them compact rows, each once, as they are the least that moves. Times are microseconds as the caller's stream
sees them, of the slowest rank. Every result is compared with what must come.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import deep_ep
import torch
import torch.distributed as dist
from deep_ep import EPHandle
from deep_ep.utils.math import per_token_cast_to_fp8

from . import ranks
from .ranks import Clock, plain, say

EXPERTS = 256
TOPK = 8


class Batch(NamedTuple):
    """What a rank sends."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @staticmethod
    def of(tokens: int, hidden: int, rank: int, where: torch.device) -> Batch:
        generator = torch.Generator().manual_seed(1 + rank)
        topk_idx = torch.rand(tokens, EXPERTS, generator=generator).topk(TOPK).indices
        weights = torch.rand(tokens, TOPK, generator=generator)
        x = torch.randn(tokens, hidden, generator=generator).bfloat16()
        return Batch(x.to(where), topk_idx.to(where), weights.to(where))


class Calls:
    """Those of a buffer, whose rows are all of one kind."""

    def __init__(self, batch: Batch, expand: bool, alignment: int, once: bool) -> None:
        tokens, hidden = batch.x.shape
        self.batch, self.expand, self.alignment = batch, expand, alignment
        group = dist.group.WORLD
        assert group is not None
        self.buffer = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=tokens,
            hidden=hidden,
            num_topk=TOPK,
            allow_multiple_reduction=not once,
            explicitly_destroy=True,
        )

    def dispatch(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[object, EPHandle]:
        received, _, _, handle, _ = self.buffer.dispatch(
            x,
            self.batch.topk_idx,
            self.batch.topk_weights,
            num_experts=EXPERTS,
            expert_alignment=self.alignment,
            do_cpu_sync=False,
            do_expand=self.expand,
        )
        return received, handle

    def check(self, received: torch.Tensor, handle: EPHandle) -> None:
        """Rows, sent back as they came, sum up to the token's row times its experts, or times its ranks."""
        batch, world = self.batch, self.buffer.num_ranks
        sums = self.buffer.combine(received, handle)[0]
        owners = torch.nn.functional.one_hot(batch.topk_idx // (EXPERTS // world), world).sum(1)
        times = owners.sum(1, keepdim=True) if self.expand else (owners > 0).sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), batch.x.float() * times, rtol=2e-2, atol=2e-2)


def times(clock: Clock, batch: Batch, expand: bool, alignment: int) -> list[float]:
    """Dispatch of bf16 rows cached, uncounted, of FP8 rows likewise; combine, and the same rounded once."""
    calls = Calls(batch, expand, alignment, once=False)
    received, handle = calls.dispatch(batch.x)
    calls.check(plain(received), handle)
    y, coded = torch.zeros_like(plain(received)), per_token_cast_to_fp8(batch.x)
    _, of_coded = calls.dispatch(coded)
    took = [
        clock(lambda: calls.buffer.dispatch(batch.x, handle=handle, do_expand=expand)),
        clock(lambda: calls.dispatch(batch.x)),
        clock(lambda: calls.buffer.dispatch(coded, handle=of_coded, do_expand=expand)),
        clock(lambda: calls.dispatch(coded)),
        clock(lambda: calls.buffer.combine(y, handle)),
    ]
    del received
    calls.buffer.destroy()
    once = Calls(batch, expand, alignment, once=True)
    received, last = once.dispatch(batch.x)
    once.check(plain(received), last)
    took.append(clock(lambda: once.buffer.combine(y, last)))
    once.buffer.destroy()
    return took


def work(rank: int, world: int, where: torch.device, hidden: int, sizes: list[int], samples: int) -> None:
    clock = Clock(where, samples)
    say(rank, f"{world} ranks, hidden {hidden}, top-{TOPK} of {EXPERTS}; us\n")
    say(
        rank,
        "tokens  rows      alignment  bf16 cached  bf16 uncounted  FP8 cached  FP8 uncounted  combine  rounded once",
    )
    for tokens in sizes:
        batch = Batch.of(tokens, hidden, rank, where)
        for expand, alignment in ((False, 1), (True, 1), (True, 128)):
            cached, uncounted, coded, fp8, back, once = times(clock, batch, expand, alignment)
            kind = "expanded" if expand else "compact"
            say(
                rank,
                f"{tokens:>6}  {kind:<8}  {alignment:>9}  {cached:>11.1f}  {uncounted:>14.1f}  {coded:>10.1f}  {fp8:>13.1f}  {back:>7.1f}  {once:>12.1f}",
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m measure.expanded", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--tokens", default="1,16,128,4096", help="of a rank, by commas")
    parser.add_argument("--samples", type=int, default=30)
    arguments = parser.parse_args()
    missing = ranks.check_gpus(arguments.ranks, arguments.device)
    if missing:
        parser.error(missing)
    if arguments.ranks < 1 or EXPERTS % arguments.ranks:
        parser.error(f"--ranks is {arguments.ranks}, allowed: a divisor of {EXPERTS}")
    try:
        sizes = [int(tokens) for tokens in arguments.tokens.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        parser.error(f"--tokens is {arguments.tokens}, allowed: numbers of at least 1, by commas")
    return ranks.spawn(work, arguments.ranks, arguments.device, arguments.hidden, sizes, arguments.samples)


if __name__ == "__main__":
    sys.exit(main())
