"""Times dispatch and combine of V2's expanded rows: one for each choice, ready for a grouped GEMM.

    python -m measure.expanded --ranks 2                    # needs two GPUs
    python -m measure.expanded --ranks 2 --device cpu --hidden 256 --tokens 1,16

A row for each number of tokens and each alignment. *Uncounted*: ``do_cpu_sync=False``, new routing. *Rounded once*: a combine of a buffer without
``allow_multiple_reduction``. Beside them compact rows, each once, as they are the least that moves. Times are microseconds as the caller's stream sees them, of the slowest rank. Every result is compared with
what must come.
"""

from __future__ import annotations

import argparse
import sys

import deep_ep
import torch
import torch.distributed as dist
from deep_ep.utils.math import per_token_cast_to_fp8

from . import ranks
from .ranks import Clock, plain, say

EXPERTS = 256
TOPK = 8


def compared(x: torch.Tensor, expand: bool, buffer: deep_ep.ElasticBuffer, **how: object) -> None:
    """Rows, sent back as they came, sum up to the token's row times its experts, or times its ranks."""
    topk_idx, world = how["topk_idx"], buffer.num_ranks
    assert isinstance(topk_idx, torch.Tensor)
    received, *_, handle, _ = buffer.dispatch(x, do_expand=expand, **how)  # type: ignore[arg-type]
    sums, _, _ = buffer.combine(plain(received), handle)
    owners = torch.nn.functional.one_hot(topk_idx // (EXPERTS // world), world)
    times = (
        torch.full((len(x), 1), float(TOPK), device=x.device) if expand else (owners.sum(1) > 0).sum(1, keepdim=True)
    )
    torch.testing.assert_close(sums.float(), x.float() * times, rtol=2e-2, atol=2e-2)


def work(rank: int, world: int, where: torch.device, hidden: int, sizes: list[int], samples: int) -> None:
    clock = Clock(where, samples)
    say(rank, f"{world} ranks, hidden {hidden}, top-{TOPK} of {EXPERTS}; us\n")
    say(rank, "tokens  rows      alignment  bf16 cached  bf16 uncounted  FP8 uncounted  combine  rounded once")
    for tokens in sizes:
        generator = torch.Generator().manual_seed(1 + rank)
        topk_idx = torch.rand(tokens, EXPERTS, generator=generator).topk(TOPK).indices.to(where)
        weights = torch.rand(tokens, TOPK, generator=generator).to(where)
        x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(where)
        coded = per_token_cast_to_fp8(x)
        for expand, alignment in ((False, 1), (True, 1), (True, 128)):
            sized = {"num_max_tokens_per_rank": tokens, "hidden": hidden, "num_topk": TOPK, "explicitly_destroy": True}
            buffer = deep_ep.ElasticBuffer(dist.group.WORLD, **sized)  # type: ignore[arg-type]
            how = {
                "topk_idx": topk_idx,
                "topk_weights": weights,
                "num_experts": EXPERTS,
                "expert_alignment": alignment,
                "do_cpu_sync": False,
            }
            compared(x, expand, buffer, **how)
            handle = buffer.dispatch(x, do_expand=expand, **how)[3]  # type: ignore[arg-type]
            cached = clock(lambda: buffer.dispatch(x, handle=handle, do_expand=expand))
            uncounted = clock(lambda: buffer.dispatch(x, do_expand=expand, **how))  # type: ignore[arg-type]
            fp8 = clock(lambda: buffer.dispatch(coded, do_expand=expand, **how))  # type: ignore[arg-type]
            y = torch.zeros_like(plain(buffer.dispatch(x, do_expand=expand, **how)[0]))  # type: ignore[arg-type]
            back = clock(lambda: buffer.combine(y, handle))
            del handle
            buffer.destroy()
            sized["allow_multiple_reduction"] = False
            buffer = deep_ep.ElasticBuffer(dist.group.WORLD, **sized)  # type: ignore[arg-type]
            handle = buffer.dispatch(x, do_expand=expand, **how)[3]  # type: ignore[arg-type]
            once = clock(lambda: buffer.combine(y, handle)) if expand else back
            kind = "expanded" if expand else "compact"
            say(
                rank,
                f"{tokens:>6}  {kind:<8}  {alignment:>9}  {cached:>11.1f}  {uncounted:>14.1f}  {fp8:>13.1f}  {back:>7.1f}  {once:>12.1f}",
            )
            del handle, y
            buffer.destroy()


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
    sizes = [int(tokens) for tokens in arguments.tokens.split(",")]
    return ranks.spawn(work, arguments.ranks, arguments.device, arguments.hidden, sizes, arguments.samples)


if __name__ == "__main__":
    sys.exit(main())
