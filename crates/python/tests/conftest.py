"""Runs functions on several processes, which form a gloo group. They are kept from test to test; a function that takes too long, or a
process that ends, costs a new set of them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

# Each test has a shape of its own, for which kernels would be compiled.
os.environ.setdefault("EP_CUDA_SPECIALISE", "0")

LIMIT = 60.0
"""Seconds that a function may take on all ranks."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "moexpress", "deep_ep"])


@dataclass
class Outcome:
    """What became of a function on one rank."""

    value: Any = None
    error: str | None = None
    """The exception's class name."""
    trace: str = ""


def _work(rank: int, world: int, ranks_per_node: int | None, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["MOEXPRESS_TIMEOUT"] = "20"
    if ranks_per_node is not None:
        # As torchrun, or `moexpress launch --nodes`, tells them.
        told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": ranks_per_node}
        os.environ.update({name: str(number) for name, number in told.items()}, MOEXPRESS_FAR="loop")
    dist.init_process_group("gloo", init_method=f"file://{store}", world_size=world, rank=rank)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            outcome = Outcome(value=function(rank, world, *arguments))
        except BaseException as error:
            outcome = Outcome(error=type(error).__name__, trace=traceback.format_exc())
        pipe.send(outcome)


class Ranks:
    """A group of processes. ``ranks_per_node``: on several nodes, over the loop."""

    def __init__(self, world: int, ranks_per_node: int | None = None) -> None:
        self.world, self.ranks_per_node = world, ranks_per_node
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def _start(self) -> None:
        store = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(self.world):
            mine, theirs = _context.Pipe()
            process = _context.Process(
                target=_work, args=(rank, self.world, self.ranks_per_node, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def stop(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def outcomes(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[Outcome]:
        """What ``function(rank, world, *arguments)`` did on each rank."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            outcomes = []
            for rank, pipe in enumerate(self._pipes):
                # Starting the processes is not the function's time, so each has the whole limit.
                if not pipe.poll(limit):
                    # Others may have failed, and so have kept it waiting.
                    outcomes += [later.recv() for later in self._pipes[rank + 1 :] if later.poll(0)]
                    traces = "".join(f"\n{outcome.trace}" for outcome in outcomes if outcome.error)
                    pytest.fail(f"rank {rank} of {self.world} did not end within {limit} s{traces}", pytrace=False)
                try:
                    outcomes.append(pipe.recv())
                except EOFError:
                    self._processes[rank].join(10)
                    pytest.fail(f"rank {rank} of {self.world} ended: {self._processes[rank].exitcode}", pytrace=False)
            return outcomes
        except BaseException:
            self.stop()
            raise

    def run(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[Any]:
        """What ``function`` returned on each rank. Fails with what it raised."""
        outcomes = self.outcomes(function, *arguments, limit=limit)
        failed = [f"rank {rank}:\n{outcome.trace}" for rank, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)
        return [outcome.value for outcome in outcomes]


_groups: dict[int | tuple[int, int] | tuple[str, int, int], Ranks] = {}


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Two ranks, then four."""
    return _groups.setdefault(request.param, Ranks(request.param))


@pytest.fixture
def one() -> Ranks:
    """One rank, in a process of its own: a crash ends that, and the test."""
    return _groups.setdefault(1, Ranks(1))


@pytest.fixture
def two() -> Ranks:
    """Two ranks."""
    return _groups.setdefault(2, Ranks(2))


@pytest.fixture
def four() -> Ranks:
    """Four ranks."""
    return _groups.setdefault(4, Ranks(4))


def on_nodes(nodes: int, ranks_per_node: int) -> Ranks:
    """Nodes of so many ranks."""
    return _groups.setdefault((nodes, ranks_per_node), Ranks(nodes * ranks_per_node, ranks_per_node))


@pytest.fixture
def two_nodes() -> Ranks:
    """Two nodes of two ranks."""
    return on_nodes(2, 2)


@pytest.fixture(scope="session", autouse=True)
def _stop() -> Iterator[None]:
    yield
    for group in _groups.values():
        group.stop()
    from tests import npus

    npus.remove_library()
