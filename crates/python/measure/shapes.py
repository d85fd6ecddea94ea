"""Times calls of deep_ep for shapes of many kinds, so that a cliff is seen.

    python -m measure.shapes --ranks 2                      # needs two GPUs
    python -m measure.shapes --ranks 2 --hidden 2048,8192 --topk 4,16
    python -m measure.shapes --ranks 2 --device cpu --quick

A row for each shape, throughput mode (cached dispatch of bf16 rows, and combine, on 24 multiprocessors) and low latency (FP8 cast on
the way; combine with a row a choice). Times are microseconds as the caller's stream sees them, of the slowest rank. GB/s are those of
the rows that the busiest rank receives from others, or returns to them: what its link carries. The last column looks for cliffs: the
more bytes, the better a call should use the link, so it is the row's GB/s against the best of the shapes with at most as many bytes
in this run, of dispatch or combine, whichever is worse. Rows below half of that are marked. Every result is compared with what must come.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import deep_ep
import torch
import torch.distributed as dist

from . import ranks
from .ranks import Clock, largest, plain, say


class Shape(NamedTuple):
    """A batch."""

    hidden: int
    topk: int
    tokens: int
    skewed: bool
    """Whether experts are chosen by a power law, and not evenly: the first rank's most."""


class Row(NamedTuple):
    """What was measured for one."""

    mode: str
    shape: Shape
    sent: tuple[int, int]
    """Bytes between GPUs, at the busiest rank: there and back."""
    took: tuple[float, float]

    def rates(self) -> tuple[float, float]:
        """GB/s, there and back."""
        return self.sent[0] / self.took[0] / 1e3, self.sent[1] / self.took[1] / 1e3


EXPERTS = 256


def choices(shape: Shape, rank: int, where: torch.device) -> torch.Tensor:
    """int64 ``[tokens, topk]``, the same each time."""
    generator = torch.Generator().manual_seed(1 + rank)
    scores = -torch.log(torch.rand(shape.tokens, EXPERTS, generator=generator))
    if shape.skewed:
        scores *= torch.arange(1, EXPERTS + 1)
    return scores.topk(shape.topk, largest=False).indices.to(where)


def busiest(shape: Shape, rank: int, world: int, where: torch.device, row_bytes: int, deduplicated: bool) -> int:
    """Bytes of the rows that the busiest rank receives from others."""
    owners = choices(shape, rank, torch.device("cpu")) // (EXPERTS // world)
    sent = torch.zeros(world, dtype=torch.int64)
    for owner in range(world):
        hits = owners == owner
        sent[owner] = int((hits.any(1) if deduplicated else hits).sum())
    sent[rank] = 0
    sent = sent.to(where)
    dist.all_reduce(sent)
    return int(sent.max()) * row_bytes


def throughput(shape: Shape, rank: int, world: int, where: torch.device, clock: Clock, buffer: deep_ep.Buffer) -> Row:
    topk_idx = choices(shape, rank, where)
    x = torch.randn(shape.tokens, shape.hidden, device=where).bfloat16()
    layout = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    weights = torch.rand(shape.tokens, shape.topk, device=where)
    given = (layout[0], None, layout[3], layout[2], topk_idx, weights)
    received, *_, handle, _ = buffer.dispatch(x, None, *given)
    assert handle is not None
    y = plain(received).clone()
    sums = buffer.combine(y, handle)[0]
    expected = x.float() * layout[3].sum(1, keepdim=True)
    torch.testing.assert_close(sums.float(), expected, rtol=2e-2, atol=2e-2)
    del received
    there = clock(lambda: buffer.dispatch(x, handle=handle))
    back = clock(lambda: buffer.combine(y, handle))
    sent = busiest(shape, rank, world, where, 2 * shape.hidden, True)
    return Row("throughput", shape, (sent, sent), (there, back))


def low_latency(shape: Shape, rank: int, world: int, where: torch.device, clock: Clock, buffer: deep_ep.Buffer) -> Row:
    topk_idx = choices(shape, rank, where)
    x = torch.randn(shape.tokens, shape.hidden, device=where).bfloat16()
    weights = torch.rand(shape.tokens, shape.topk, device=where)

    received, _, handle, *_ = buffer.low_latency_dispatch(x, topk_idx, shape.tokens, EXPERTS, use_fp8=False)
    y = plain(received).clone()
    sums = buffer.low_latency_combine(y, topk_idx, weights, handle)[0]
    torch.testing.assert_close(sums.float(), x.float() * weights.sum(1, keepdim=True), rtol=2e-2, atol=2e-2)
    there = clock(lambda: buffer.low_latency_dispatch(x, topk_idx, shape.tokens, EXPERTS))
    back = clock(lambda: buffer.low_latency_combine(y, topk_idx, weights, handle))
    # Rows of FP8 with their scales go once to a rank; results come back for each choice.
    coded = shape.hidden + 4 * -(-shape.hidden // 128)
    sent = busiest(shape, rank, world, where, coded, True), busiest(shape, rank, world, where, 2 * shape.hidden, False)
    return Row("low latency", shape, sent, (there, back))


def marks(rows: list[Row]) -> list[float]:
    """The lesser share, of dispatch and combine, of the best rate among the rows of the mode with at most as many bytes."""
    shares = []
    for row in rows:
        least = 1.0
        for way in (0, 1):
            smaller = [other for other in rows if other.mode == row.mode and other.sent[way] <= row.sent[way]]
            best = max(other.rates()[way] for other in smaller)
            least = min(least, row.rates()[way] / best if best > 0 else 1.0)
        shares.append(least)
    return shares


HIDDEN = (2048, 4096, 7168, 8192)
TOPK = (4, 8, 16)


def every(hidden: Sequence[int], topk: Sequence[int]) -> list[Shape]:
    """Shapes of these sizes, with 16 to 512 tokens, even and skewed."""
    sizes = itertools.product(hidden, topk, (16, 64, 128, 512))
    return [Shape(*size, skewed) for size in sizes for skewed in (False, True)]


def few() -> list[Shape]:
    """Some small shapes."""
    return [Shape(256, topk, tokens, skewed) for topk in (4, 16) for tokens, skewed in ((16, False), (64, True))]


def work(rank: int, world: int, where: torch.device, shapes: list[Shape], samples: int) -> None:
    clock = Clock(where, samples)
    deep_ep.Buffer.set_num_sms(24)
    say(rank, f"{world} ranks, {EXPERTS} experts; us, and GB/s between GPUs at the busiest rank\n")
    say(rank, "mode          hidden  top-k  tokens  routing  dispatch  combine   GB/s there    back   of the best")
    rows = []
    for hidden, of_size in itertools.groupby(shapes, lambda shape: shape.hidden):
        for shape in of_size:
            for mode in (throughput, low_latency):
                # Communicators are made for sizes: a buffer for each shape keeps no more than one of them.
                buffer = deep_ep.Buffer(dist.group.WORLD, 0, low_latency_mode=True, explicitly_destroy=True)
                rows.append(mode(shape, rank, world, where, clock, buffer))
                buffer.destroy()
        say(rank, f"... hidden {hidden} is measured")
    for row, share in zip(rows, marks(rows), strict=True):
        shape, (there, back) = row.shape, row.rates()
        routing = "skewed" if shape.skewed else "even"
        mark = "  <-- look here" if largest(float(share < 0.5), where) else ""
        say(
            rank,
            f"{row.mode:<12} {shape.hidden:>7} {shape.topk:>6} {shape.tokens:>7}  {routing:<7} {row.took[0]:>9.1f} {row.took[1]:>8.1f} "
            f"{there:>12.1f} {back:>7.1f} {share:>13.2f}{mark}",
        )


def sizes(text: str) -> list[int]:
    """Of an option: numbers of at least 1 with commas between."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{min(numbers)} is no size, allowed: 1 and more")
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m measure.shapes", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="four small shapes")
    parser.add_argument("--hidden", type=sizes, default=HIDDEN, help="elements of a row, such as 2048,8192")
    parser.add_argument("--topk", type=sizes, default=TOPK, help=f"experts of a token, up to {EXPERTS}, such as 4,16")
    parser.add_argument("--samples", type=int, default=20)
    arguments = parser.parse_args()
    missing = ranks.check_gpus(arguments.ranks, arguments.device)
    if missing:
        parser.error(missing)
    if arguments.ranks < 1 or EXPERTS % arguments.ranks:
        parser.error(f"--ranks is {arguments.ranks}, allowed: a divisor of {EXPERTS}")
    if max(arguments.topk) > EXPERTS:
        parser.error(f"--topk has {max(arguments.topk)}, allowed: up to {EXPERTS}")
    shapes = few() if arguments.quick else every(arguments.hidden, arguments.topk)
    return ranks.spawn(work, arguments.ranks, arguments.device, shapes, arguments.samples)


if __name__ == "__main__":
    sys.exit(main())
