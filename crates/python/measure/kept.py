"""Results that are kept, as a backward pass keeps them: what each dispatch takes, and what memory a GPU has left, on two GPUs.

    python -m measure.kept [--ranks 2] [--layers 60] [--steps 3] [--tokens 4096] [--pause 0]

A step dispatches a new batch for each layer, with new routing and so with a wait for its counts, and drops its results at once. Then it dispatches
as many and keeps all results, compares them, combines them in the opposite order, and drops them. Printed for both are microseconds of a dispatch as
the caller's stream sees it, of the slowest rank: the first, the median, the longest ones; and memory in MB: of the arena, and what
`torch.cuda.mem_get_info` has free, after the forward pass and four seconds after the results were dropped, with a small dispatch now and then.
``--pause`` lets so many milliseconds pass between two layers, as a model's other kernels do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import deep_ep
import torch
import torch.distributed as dist

from . import ranks
from .ranks import say

HIDDEN, TOPK, EXPERTS = 7168, 8, 256


def free(where: torch.device) -> int:
    """MB that a GPU has free, but for what torch keeps for later."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(where)[0] >> 20


def work(rank: int, world: int, where: torch.device, options: argparse.Namespace) -> None:
    clock = ranks.Clock(where, 1)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    say(rank, f"before the buffer {free(where)} MB are free")

    def batch(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(1000 * rank + seed)
        topk_idx = torch.rand(tokens, EXPERTS, device=where).topk(TOPK).indices
        return torch.randn(tokens, HIDDEN, device=where).bfloat16(), topk_idx, torch.rand(tokens, TOPK, device=where)

    def dispatch(seed: int, tokens: int) -> tuple[float, torch.Tensor, torch.Tensor, Any]:
        x, topk_idx, weights = batch(seed, tokens)
        layout = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        time.sleep(options.pause / 1000)
        given = layout[0], None, layout[3], layout[2], topk_idx, weights
        came: list[Any] = []
        took = ranks.largest(clock.once(lambda: came.append(buffer.dispatch(x, None, *given))), where)
        received, *_, handle, _ = came.pop()
        return took, x, received, (handle, layout[3].sum(1, keepdim=True))

    for _ in range(3):
        dispatch(0, options.tokens)
    say(
        rank,
        f"after three batches {free(where)} MB are free, and the arena has {buffer.stats()['arena_bytes'] >> 20} MB",
    )

    def times_of(took: list[float]) -> str:
        longest = ", ".join(f"{one:.0f}" for one in sorted(took)[-4:])
        return f"first {took[0]:.0f}, median {statistics.median(took):.0f}, longest {longest}"

    for step in range(options.steps):
        dropped = [dispatch(layer, options.tokens)[0] for layer in range(options.layers)]
        say(rank, f"step {step + 1}: dropped at once: {times_of(dropped)}")
        layers = [dispatch(layer, options.tokens) for layer in range(options.layers)]
        took = [layer[0] for layer in layers]
        most, left = buffer.stats()["arena_bytes"] >> 20, free(where)
        for _, x, received, (handle, times) in reversed(layers):
            sums = buffer.combine(received, handle)[0]
            torch.testing.assert_close(sums.float(), x.float() * times, rtol=1e-2, atol=1e-2)
        del layers, x, received, handle, times, sums
        for _ in range(20):
            time.sleep(0.2)
            dispatch(0, 16)
        after = buffer.stats()["arena_bytes"] >> 20
        say(
            rank,
            f"step {step + 1}: kept: {times_of(took)}; arena {most} MB, free {left}; afterwards {after} MB, "
            f"free {free(where)}",
        )
    stats = buffer.stats()
    say(rank, f"rows placed {stats['rows_placed']}, by other ways {stats['rows_through_rings']}")
    buffer.destroy()
    say(rank, f"after the buffer {free(where)} MB are free")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pause", type=float, default=0)
    options = parser.parse_args()
    sys.exit(ranks.spawn(work, options.ranks, "cuda", options))
