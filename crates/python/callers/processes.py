"""Runs the cases of a framework on ranks that are processes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .harness import Rank

CASE_SECONDS = 240.0
"""What a case may take on all ranks; the first one compiles kernels on GPUs."""
WAIT_SECONDS = "40"
"""What an operation of the drop-in may take (``MOEXPRESS_TIMEOUT``)."""

_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Setup:
    """What runs where."""

    framework: str
    commit: str
    source: Path
    """The folder that holds the framework's package."""
    ranks: int
    """Of a group."""
    groups: int
    """Groups that run the same side by side."""
    device: str
    tokens: int
    """The most that a rank has in throughput mode."""
    hidden: int
    """Elements of a row there."""
    only: str = ""
    """Only cases whose names contain this."""
    plant: str = ""
    """The call in which a fault is planted."""

    @property
    def world(self) -> int:
        """Processes."""
        return self.ranks * self.groups

    def __str__(self) -> str:
        name = "CPU" if self.device == "cpu" else torch.cuda.get_device_name().removeprefix("NVIDIA ")
        return f"{f'{self.groups} x ' if self.groups > 1 else ''}{self.ranks} x {name}"


@dataclass
class Outcome:
    """What became of a case on one rank."""

    difference: float = 0.0
    error: str = ""
    buffers: list[str] = field(default_factory=list)
    """Arguments of the buffers that were made."""


@dataclass
class Row:
    """Of the table."""

    setup: Setup
    case: str
    difference: float
    error: str
    buffers: list[str]

    def __str__(self) -> str:
        told = f"FAIL  {self.error}" if self.error else "PASS"
        setup = self.setup
        return f"{setup.framework:13} {setup.commit:12} {self.case:46} {setup!s:14} {self.difference:8.2g}  {told}"


def run(setup: Setup) -> Iterator[Row]:
    """Runs the cases in one set of processes; after one that fails, the rest in another."""
    module = importlib.import_module(f"callers.{setup.framework}")
    left = [case.name for case in module.cases() if setup.only in case.name]
    while left:
        for case, outcomes in _outcomes(setup, list(left)):
            left.remove(case)
            difference = max(outcome.difference for outcome in outcomes)
            yield Row(setup, case, difference, _errors(outcomes), outcomes[0].buffers)


def _outcomes(setup: Setup, cases: list[str]) -> Iterator[tuple[str, list[Outcome]]]:
    """Starts processes, and gives the cases' outcomes until one fails."""
    store = os.path.join(tempfile.mkdtemp(), "store")
    processes, pipes = [], []
    for rank in range(setup.world):
        mine, theirs = _context.Pipe()
        process = _context.Process(target=_work, args=(setup, rank, cases, store, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        for case in cases:
            end = time.monotonic() + CASE_SECONDS
            outcomes = [_received(pipe, end) for pipe in pipes]
            yield case, outcomes
            if any(outcome.error for outcome in outcomes):
                return
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _received(pipe: Any, end: float) -> Outcome:
    try:
        if pipe.poll(max(0.0, end - time.monotonic())):
            outcome: Outcome = pipe.recv()
            return outcome
        return Outcome(error=f"did not end within {CASE_SECONDS:.0f} s")
    except (EOFError, ConnectionError):
        return Outcome(error="the process has ended")


def _errors(outcomes: list[Outcome]) -> str:
    """What the ranks said, each thing once."""
    said: dict[str, list[str]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            said.setdefault(outcome.error, []).append(str(rank))
    return "; ".join(f"rank {', '.join(ranks)}: {error}" for error, ranks in said.items())


def _work(setup: Setup, number: int, names: list[str], store: str, pipe: Any) -> None:
    os.environ["MOEXPRESS_TIMEOUT"] = WAIT_SECONDS
    told: list[str] = []
    try:
        here, everyone = _met(setup, number, store)
        from . import buffers

        buffers.watch(told)
        if setup.plant:
            buffers.plant(setup.plant)
        module = importlib.import_module(f"callers.{setup.framework}")
        module.load(here)
        cases = {case.name: case for case in module.cases()}
    except BaseException:
        pipe.send(Outcome(error=_told()))
        return
    for name in names:
        here.differences, here.wrong = {}, ""
        told.clear()
        try:
            cases[name].run(here)
            error = here.wrong
        except BaseException:
            error = _told()
        pipe.send(Outcome(max(here.differences.values(), default=0.0), error, list(told)))
        errors: list[Any] = [None] * setup.world
        dist.all_gather_object(errors, error, group=everyone)
        if any(errors):
            break
    # Else some of torch's threads may end the process by an abort.
    dist.destroy_process_group()


def _met(setup: Setup, number: int, store: str) -> tuple[Rank, Any]:
    """Joins the others: this rank in its group, and the group of all processes."""
    torch.set_num_threads(1)
    cuda = setup.device == "cuda"
    if cuda:
        torch.cuda.set_device(number)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", world_size=setup.world, rank=number)
    rank, mine = number % setup.ranks, number // setup.ranks
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    groups = []
    for group in range(setup.groups):
        members = list(range(group * setup.ranks, (group + 1) * setup.ranks))
        groups.append((dist.new_group(members), dist.new_group(members, backend="gloo")))
    here = Rank(rank, setup.ranks, device, *groups[mine], setup.source, setup.tokens, setup.hidden)
    return here, dist.new_group(backend="gloo")


def _told() -> str:
    """The exception, and the files and lines on the way to it; with CALLERS_TRACE set, the whole trace on stderr."""
    if os.environ.get("CALLERS_TRACE"):
        traceback.print_exc()
    kind, error, trace = sys.exc_info()
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(trace)]
    return f"{kind.__name__ if kind else ''}: {str(error)[:300]} ({' > '.join(places[-4:])})"
