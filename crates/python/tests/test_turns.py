"""One call at a time: signal handlers, destructors, other threads, closes and forks while a call is under way. Nobody waits for ever."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpus
import oracle
import pytest
import torch
import torch.distributed as dist
from moexpress import Communicator, errors


def make(**settings: Any) -> tuple[Communicator, oracle.Batch]:
    world, rank = dist.get_world_size(), dist.get_rank()
    layer = oracle.Layer(world, 2 * world, 2, 64)
    batch = oracle.batches(layer, [8] * world)[rank]
    sizes = {"experts": layer.experts, "topk": 2, "hidden": 64, "max_tokens": 8, "device": "cpu", "timeout": 20.0}
    return Communicator(**{**sizes, "low_latency": True, **settings}), batch


def store() -> Any:
    """Where ranks tell each other things inside a handler."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def on_alarm(handler: Callable[[], None], after: float = 0.3) -> Iterator[list[BaseException]]:
    """Runs ``handler`` as a signal handler of the main thread, once; what it raised."""
    raised: list[BaseException] = []

    def handle(*_: object) -> None:
        try:
            handler()
        except BaseException as error:
            raised.append(error)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield raised
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_handler(rank: int, world: int) -> None:
    """Rank 0 waits for the others, who come once its handler has run. What that calls is refused, and the wait goes on."""
    communicator, batch = make()
    before = communicator.dispatch(batch.x, batch.topk_idx)
    calls: list[Callable[[], Any]] = [
        lambda: communicator.dispatch(batch.x, batch.topk_idx),
        lambda: communicator.combine(before.x, before.handle),
        lambda: communicator.redispatch(batch.x, before.handle),
        lambda: communicator.low_latency_dispatch(batch.x, batch.topk_idx),
        communicator.stats,
        communicator.rejoin,
        lambda: communicator.window_bytes,
    ]
    told: list[str] = []

    def handler() -> None:
        try:
            for call in calls:
                with pytest.raises(
                    errors.Busy, match="dispatch is under way in this thread, and waits for what made"
                ) as raised:
                    call()
                told.append(str(raised.value))
        finally:
            store().set("check_handler", "has run")

    dist.barrier()
    if rank == 0:
        with on_alarm(handler) as raised:
            received = communicator.dispatch(batch.x, batch.topk_idx)
        assert not raised and len(told) == len(calls), raised
    else:
        store().wait(["check_handler"])
        received = communicator.dispatch(batch.x, batch.topk_idx)
    assert received.x.equal(before.x)
    communicator.close()


def test_a_signal_handler_inside_a_call_is_told_that_it_is_under_way(two: Any) -> None:
    two.run(check_handler)


def check_handler_closes(rank: int, world: int) -> None:
    """A handler that closes ends the call that it interrupted."""
    communicator, batch = make()
    dist.barrier()
    if rank == 0:
        began = time.monotonic()
        with on_alarm(communicator.close) as raised, pytest.raises(errors.Closed, match="communicator was closed"):
            communicator.dispatch(batch.x, batch.topk_idx)
        assert not raised and time.monotonic() - began < 5
        with pytest.raises(errors.Closed):
            communicator.stats()
    dist.barrier()
    communicator.close()


def test_a_signal_handler_may_close_the_communicator_of_the_call_that_it_interrupted(two: Any) -> None:
    two.run(check_handler_closes)


def check_thread_closes(rank: int, world: int, on_gpus: bool = False) -> None:
    """So does another thread, and one that waits for its turn is told, too."""
    where = gpus.device(rank) if on_gpus else torch.device("cpu")
    # A call ends at once; on GPUs its kernels go on waiting until the deadline, and its rank as long for the others to part.
    deadline = 5.0 if on_gpus else 0.0
    communicator, batch = make(device=where, timeout=deadline or 20.0)
    batch = gpus.on(batch, where)
    failed: list[BaseException] = []

    def call() -> None:
        try:
            communicator.dispatch(batch.x, batch.topk_idx)
        except BaseException as error:
            failed.append(error)

    dist.barrier()
    if rank == 0:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        began = time.monotonic()
        communicator.close()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - began < 5 + 3 * deadline
        assert [type(error) for error in failed] == [errors.Closed] * 3, failed
    dist.barrier()
    communicator.close()


def test_another_thread_may_close_a_communicator_in_the_middle_of_a_call(two: Any) -> None:
    two.run(check_thread_closes)


@gpus.needs_two
def test_so_it_may_on_gpus(two: Any) -> None:
    two.run(check_thread_closes, True, limit=gpus.LIMIT)


def check_turns(rank: int, world: int) -> None:
    """A thread whose turn does not come within the timeout is told; its wait answers Ctrl-C."""
    communicator, batch = make(timeout=8.0)
    dist.barrier()
    if rank == 0:
        failed: list[BaseException] = []

        def call() -> None:
            try:
                communicator.dispatch(batch.x, batch.topk_idx)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.3)

        def interrupt() -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            communicator.stats()
        assert time.monotonic() - began < 6
        signal.signal(signal.SIGALRM, before)
        # A call inside another one from a second thread, for which a handler waits: neither can go on before the other.
        thread.join()
        assert [type(error) for error in failed] == [errors.OperationFailed]
    dist.barrier()
    communicator.close()


def test_whoever_waits_for_a_turn_answers_ctrl_c(two: Any) -> None:
    two.run(check_turns)


def check_handler_that_waits(rank: int, world: int) -> None:
    """A handler that waits for a thread, which waits for the call that the handler interrupted: ends by the timeout."""
    communicator, batch = make(timeout=2.0)
    failed: list[BaseException] = []

    def call() -> None:
        try:
            communicator.stats()
        except BaseException as error:
            failed.append(error)

    def handler() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    dist.barrier()
    if rank == 0:
        with on_alarm(handler, 0.2) as raised, pytest.raises(errors.OperationFailed):
            communicator.dispatch(batch.x, batch.topk_idx)
        assert not raised
        with pytest.raises(errors.Busy, match="dispatch has been under way in another thread for 2 s, the timeout"):
            raise failed[0]
    dist.barrier()
    communicator.close()


def test_a_handler_that_waits_for_another_threads_turn_ends(two: Any) -> None:
    two.run(check_handler_that_waits)


def check_destructor(rank: int, world: int) -> None:
    """A destructor that garbage collection runs inside a call, or that a handler brings about, calls and closes."""
    communicator, batch = make()
    told: list[type[BaseException]] = []

    class Last:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            try:
                communicator.stats()
            except BaseException as error:
                told.append(type(error))

    def handler() -> None:
        gc.collect()
        store().set("check_destructor", "has run")

    dist.barrier()
    if rank == 0:
        Last()
        with on_alarm(handler) as raised:
            communicator.dispatch(batch.x, batch.topk_idx)
        assert not raised and told == [errors.Busy]
    else:
        store().wait(["check_destructor"])
        communicator.dispatch(batch.x, batch.topk_idx)
    communicator.close()


def test_a_destructor_inside_a_call_is_told_that_it_is_under_way(two: Any) -> None:
    two.run(check_destructor)


def check_fork(rank: int, world: int) -> None:
    """A process forks while a call is under way in another thread: the child is told at once, and ends."""
    communicator, batch = make()
    received = communicator.dispatch(batch.x, batch.topk_idx)
    dist.barrier()
    if rank == 0:
        thread = threading.Thread(target=lambda: communicator.dispatch(batch.x, batch.topk_idx))
        thread.start()
        time.sleep(0.3)
        for _ in range(5):
            child = os.fork()
            if child == 0:
                status = 0
                for call in (
                    communicator.stats,
                    communicator.close,
                    lambda: communicator.combine(received.x, received.handle),
                ):
                    try:
                        call()
                        status = 1
                    except errors.Forked:
                        pass
                    except BaseException:
                        status = 2
                del received
                os._exit(status)
            deadline = time.monotonic() + 10
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.01)
            if ended == (0, 0):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            assert ended[0] == child and os.waitstatus_to_exitcode(ended[1]) == 0, ended
        thread.join()
    else:
        time.sleep(1.5)
        communicator.dispatch(batch.x, batch.topk_idx)
    communicator.close()


def test_a_child_forked_in_the_middle_of_a_call_is_told(two: Any) -> None:
    two.run(check_fork)
