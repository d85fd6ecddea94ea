"""Runs frameworks' code against ``deep_ep``: see README.md in this folder."""

from __future__ import annotations

import argparse
import sys

import torch

from . import buffers, processes, sources


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m callers", description=__doc__)
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help=f"a framework and its checkout, or with NAME all a folder of such; names: {', '.join(sources.FRAMEWORKS)}",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes, and GPUs with --device cuda")
    parser.add_argument("--groups", type=int, default=1, help="so many groups of --ranks at once, side by side")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=40, help="the most that a rank has in throughput mode")
    parser.add_argument("--hidden", type=int, default=256, help="elements of a row there, a multiple of 128")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--sizes", action="store_true", help="print also the sizes of the buffers that were made")
    parser.add_argument("--plant", choices=buffers.PLANTS, default="", help="plant a fault: every case must fail")
    arguments = parser.parse_args()
    try:
        found = sources.parse(arguments.source)
    except ValueError as error:
        parser.error(str(error))
    if min(arguments.ranks, arguments.groups) < 1:
        parser.error(f"--ranks is {arguments.ranks} and --groups {arguments.groups}, allowed: 1 or more")
    if arguments.tokens < 23 or arguments.hidden < 128 or arguments.hidden % 128:
        parser.error(
            f"--tokens is {arguments.tokens} and --hidden {arguments.hidden}, allowed: 23 or more, and a multiple of 128"
        )
    wanted = arguments.ranks * arguments.groups
    if arguments.device == "cuda" and torch.cuda.device_count() < wanted:
        parser.error(f"--device cuda needs {wanted} GPUs, {torch.cuda.device_count()} are here")
    failed, passed = 0, 0
    for name, source in found.items():
        setup = processes.Setup(
            name,
            source.commit,
            source.path,
            arguments.ranks,
            arguments.groups,
            arguments.device,
            arguments.tokens,
            arguments.hidden,
            arguments.only,
            arguments.plant,
        )
        for row in processes.run(setup):
            print(row, flush=True)
            for made in row.buffers if arguments.sizes else ():
                print(f"{'':13} Buffer({made})", flush=True)
            failed, passed = failed + bool(row.error), passed + (not row.error)
    if not failed + passed:
        print(f"no case has {arguments.only!r} in its name", file=sys.stderr)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
