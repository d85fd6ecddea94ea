"""deep_ep.Buffer after what failed: a rank that came late, or made a mistake, in a first call; hooks and handles of before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deep_ep
import moexpress
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep import _arena, _communicators
from moexpress import errors
from test_arena import Log, limit_memory
from test_dropin import Job, layer_of

MOST = 64


@contextmanager
def impatient(meeting: moexpress.Meeting) -> Iterator[None]:
    """Ranks that do not meet within a second have not. Whoever is to be missed waits for the others outside of it."""
    before, meeting.timeout = meeting.timeout, 1.0
    try:
        yield
    finally:
        meeting.timeout = before


@contextmanager
def much_memory() -> Iterator[None]:
    """Says that there is, so that an arena grows as batches do."""
    before = _arena.free_bytes
    limit_memory(1 << 40)
    try:
        yield
    finally:
        _arena.free_bytes = before


def make_buffer(**options: Any) -> deep_ep.Buffer:
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26, explicitly_destroy=True, low_latency_mode=True, **options)
    dist.barrier()
    return buffer


def check_sums(buffer: deep_ep.Buffer, job: Job) -> None:
    x, *_, handle, _ = job.dispatch(buffer)
    assert torch.equal(x, job.received) and torch.equal(buffer.combine(x, handle)[0], job.sums)


def low_dispatch(buffer: deep_ep.Buffer, job: Job, **options: Any) -> Any:
    return buffer.low_latency_dispatch(job.own.x, job.own.topk_idx, MOST, job.layer.experts, use_fp8=False, **options)


def low_sizes(job: Job) -> _arena.Sizes:
    return _arena.Sizes(job.layer.experts, job.layer.topk, job.layer.hidden, "bf16")


# First calls that failed.


def check_late(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    if rank == 1:
        dist.barrier()
    with impatient(buffer._meeting), pytest.raises(errors.MeetingFailed):
        job.dispatch(buffer)
    if rank != 1:
        dist.barrier()
    dist.barrier()
    # Until the ranks agree to go on, and then for all sizes.
    with pytest.raises(errors.MeetingFailed, match="did not come by the deadline; the ranks meet again after recover"):
        job.dispatch(buffer)
    dist.barrier()
    buffer.recover()
    check_sums(buffer, job)
    low_dispatch(buffer, job)
    buffer.destroy()


def test_a_first_call_that_came_late_is_gone_after_recover(ranks: Any) -> None:
    ranks.run(check_late)


def check_mistake(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    if rank == 1:
        with pytest.raises(ValueError, match="topk_weights"):
            job.dispatch(buffer, topk_weights=job.own.topk_weights.double())
    else:
        with impatient(buffer._meeting), pytest.raises(errors.MeetingFailed):
            job.dispatch(buffer)
    dist.barrier()
    buffer.recover()
    check_sums(buffer, job)
    buffer.destroy()


def test_a_mistake_in_a_first_call_is_gone_after_recover(ranks: Any) -> None:
    ranks.run(check_mistake)


def check_apart(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    communicators, made = buffer._communicators, _communicators.Communicator

    def stops(*arguments: Any, **settings: Any) -> Any:
        made(*arguments, **settings)
        raise KeyboardInterrupt

    if rank == 1:
        _communicators.Communicator = stops  # type: ignore[assignment, misc]
    try:
        if rank == 1:
            with pytest.raises(KeyboardInterrupt):
                low_dispatch(buffer, job)
        else:
            with impatient(buffer._meeting), pytest.raises(errors.MeetingFailed):
                communicators.low(torch.device("cpu"), low_sizes(job), MOST)
    finally:
        _communicators.Communicator = made  # type: ignore[misc]
    dist.barrier()
    buffer.recover()
    assert len(communicators._apart) == int(rank != 1) and not communicators.all_low()
    low_dispatch(buffer, job)
    for _ in range(2):
        check_sums(buffer, job)
    # All know them by the same numbers.
    numbers = [communicators._numbers[one] for one in (*communicators.all_low(), *communicators.all_normal())]
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, numbers)
    assert everybody == [numbers] * world and len(set(numbers)) == 2
    buffer.recover()
    check_sums(buffer, job)
    low_dispatch(buffer, job)
    assert all(count >= 0 for count in buffer.stats().values())
    buffer.destroy()


def test_communicators_that_only_some_ranks_made_are_left_alone(ranks: Any) -> None:
    ranks.run(check_apart)


def check_short_memory(rank: int, world: int, kind: str) -> None:
    job = Job(rank, world)
    if kind == "small":
        options = {"num_max_tokens_per_rank": MOST, "hidden": job.layer.hidden, "explicitly_destroy": True}
        elastic = deep_ep.ElasticBuffer(dist.group.WORLD, **options)
        dispatch = lambda: elastic.dispatch(job.own.x, job.own.topk_idx, num_experts=job.layer.experts)  # noqa: E731
        buffer: Any = elastic
    else:
        buffer = make_buffer()
        dispatch = (lambda: low_dispatch(buffer, job)) if kind == "low latency" else lambda: job.dispatch(buffer)
    if rank == 1:
        os.environ["MOEXPRESS_MEMORY"] = "1000"
    try:
        with pytest.raises(errors.InvalidArgument, match=r"memory of the .* ranks .* allowed: at most 1000 B") as told:
            dispatch()
    finally:
        os.environ.pop("MOEXPRESS_MEMORY", None)
    assert ("(rank 1)" in str(told.value)) == (rank != 1)
    # It was one call's. What small batches are not to be had for goes by throughput mode, on all ranks, until they meet again.
    x = dispatch()[0]
    if kind == "small":
        assert torch.equal(x, job.received) and buffer.stats()["rows_by_low_latency"] == 0
        dist.barrier()
        buffer.recover()
        x = dispatch()[0]
        assert torch.equal(x, job.received) and buffer.stats()["rows_by_low_latency"] >= len(x)
    buffer.destroy()


@pytest.mark.parametrize("kind", ["throughput", "low latency", "small"])
def test_a_rank_that_is_short_of_memory_in_a_first_call_is_heard_by_all(ranks: Any, kind: str) -> None:
    ranks.run(check_short_memory, kind)


def check_recover_of_nothing(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    buffer.recover()
    dist.barrier()
    if rank == 0:
        with impatient(buffer._meeting), pytest.raises(errors.OperationFailed):
            buffer.recover()
    dist.barrier()
    buffer.recover()
    check_sums(buffer, job)
    buffer.destroy()
    with pytest.raises(errors.Closed):
        buffer.recover()


def test_recover_needs_no_call_before_it(two: Any) -> None:
    two.run(check_recover_of_nothing)


def check_meeting(rank: int, world: int) -> None:
    meeting = moexpress.Meeting(timeout=20)
    if rank == 0:
        with impatient(meeting), pytest.raises(errors.MeetingFailed):
            meeting.barrier()
    dist.barrier()
    with pytest.raises(ValueError, match=f"mask is {world}, allowed: 0 to {world - 1}"):
        meeting.recover([world])
    with pytest.raises(ValueError, match="mask is nobody"):
        meeting.recover(["nobody"])  # type: ignore[list-item]
    assert meeting.recover() == []
    meeting.barrier()
    dist.barrier()
    if rank == 1:
        with pytest.raises(errors.Excluded):
            meeting.recover()
    else:
        assert meeting.recover([1]) == [1]
        assert meeting.all_gather(b"here")[1] is None
    # Rank 0 holds the meeting place: nobody is told anything behind its end.
    dist.barrier()
    meeting.close()


def test_a_meeting_goes_on_after_a_failure(ranks: Any) -> None:
    ranks.run(check_meeting)


@much_memory()
def check_no_memory(rank: int, world: int, late: bool) -> None:
    buffer, layer, made = make_buffer(), layer_of(world), _communicators.Communicator
    small, large = (oracle.batches(layer, [tokens] * world, 1) for tokens in (2, 20_000))

    def fails(*arguments: Any, **settings: Any) -> Any:
        if late:
            made(*arguments, **settings).close()
        raise errors.Broken("planted: this rank has no memory left")

    for batches in (small, large, large, small):
        own, layout = batches[rank], buffer.get_dispatch_layout(batches[rank].topk_idx, layer.experts)
        given = {"topk_idx": own.topk_idx, "topk_weights": own.topk_weights}
        _communicators.Communicator = fails if rank == 1 and batches is large else made  # type: ignore[assignment, misc]
        try:
            x = buffer.dispatch(own.x, None, layout[0], layout[1], layout[3], layout[2], **given)[0]
        finally:
            _communicators.Communicator = made  # type: ignore[misc]
        assert torch.equal(x, oracle.gathered([each.x for each in batches], oracle.arrived(layer, batches, rank)))
    assert buffer._communicators._apart == [] and len(buffer._communicators.all_normal()) == 1
    buffer.destroy()


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_where_one_rank_has_no_memory_for_an_arena_all_go_on(ranks: Any, late: bool) -> None:
    ranks.run(check_no_memory, late)


def check_interrupted(rank: int, world: int) -> None:
    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    job, buffer = Job(rank, world), make_buffer()
    if rank == 0:
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Stopped):
            buffer.recover()
        signal.signal(signal.SIGALRM, before)
    dist.barrier()
    buffer.recover()
    check_sums(buffer, job)
    buffer.destroy()


def test_who_was_interrupted_in_recover_may_come_again(ranks: Any) -> None:
    ranks.run(check_interrupted)


@much_memory()
def check_growth(rank: int, world: int) -> None:
    agreed = _arena.agreed
    buffer, layer = make_buffer(), layer_of(world)
    small, large = (oracle.batches(layer, [tokens] * world, 1) for tokens in (2, 20_000))

    def dispatch(batches: Any) -> Any:
        own, layout = batches[rank], buffer.get_dispatch_layout(batches[rank].topk_idx, layer.experts)
        given = {"topk_idx": own.topk_idx, "topk_weights": own.topk_weights}
        x = buffer.dispatch(own.x, None, layout[0], layout[1], layout[3], layout[2], **given)[0]
        assert torch.equal(x, oracle.gathered([each.x for each in batches], oracle.arrived(layer, batches, rank)))

    def late(*arguments: Any) -> Any:
        dist.barrier()
        return agreed(*arguments)

    dispatch(small)
    if rank == 1:
        _arena.agreed = late
    try:
        # The rows came before the ranks were to meet.
        with Log() as log, impatient(buffer._meeting):
            dispatch(large)
        assert any("the arena stays as it is" in said for said in log.said)
    finally:
        _arena.agreed = agreed
    if rank != 1:
        dist.barrier()
    before = buffer.stats()["arena_bytes"]
    dispatch(large)
    dist.barrier()
    buffer.recover()
    dispatch(large)
    dispatch(large)
    assert before < buffer.stats()["arena_bytes"]
    buffer.destroy()


def test_rows_are_not_lost_where_an_arena_cannot_grow(two: Any) -> None:
    two.run(check_growth)


# Ranks that are given up.


def check_given_up(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer(enable_shrink=True)
    check_sums(buffer, job)
    low_dispatch(buffer, job)
    dist.barrier()
    if rank == 2:
        with pytest.raises(errors.Excluded):
            buffer.recover()
        dist.barrier()
        return
    # One of them says it, and all know.
    buffer.recover([2] if rank == 0 else [])
    status = torch.zeros(world, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 1, 0]
    low_dispatch(buffer, job)
    with pytest.raises(errors.Unsupported, match=r"new sizes is not supported after ranks \[2\] were given up"):
        buffer.low_latency_dispatch(job.own.x, job.own.topk_idx, 2 * MOST, job.layer.experts, use_fp8=False)
    job.dispatch(buffer)
    dist.barrier()
    # Its memory is freed, whoever does not come.
    buffer.destroy()


def test_ranks_that_were_given_up_are_told_and_new_sizes_refused(four: Any) -> None:
    four.run(check_given_up)


def check_failed_unmask(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer(enable_shrink=True)
    low_dispatch(buffer, job)
    dist.barrier()
    buffer.low_latency_update_mask_buffer((rank + 1) % world, True)
    dist.barrier()
    status = torch.zeros(world, dtype=torch.int32)
    if rank != 1:
        with impatient(buffer._meeting), pytest.raises(errors.Error):
            buffer.low_latency_update_mask_buffer((rank + 1) % world, False)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist()[(rank + 1) % world] == 1
    dist.barrier()
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    low_dispatch(buffer, job)
    buffer.destroy()


def test_a_rank_that_could_not_be_unmasked_stays_masked(two: Any) -> None:
    two.run(check_failed_unmask)


# Hooks.


def check_hooks(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer(enable_shrink=True)
    for rejoin in (buffer.recover, buffer.rejoin, buffer.low_latency_clean_mask_buffer):
        *_, hook = low_dispatch(buffer, job, return_recv_hook=True)
        dist.barrier()
        rejoin()
        with pytest.raises(ValueError, match="hook is of an operation that was under way when"):
            hook()
        *_, received = low_dispatch(buffer, job, return_recv_hook=True)
        received()
        received()
        dist.barrier()
        # What was received before is nothing to complain of.
        rejoin()
        received()
    buffer.destroy()


def test_hooks_of_before_are_refused(ranks: Any) -> None:
    ranks.run(check_hooks)


def check_hooks_of_threads(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    raised: list[BaseException] = []

    def call(hook: Any) -> None:
        try:
            hook()
        except BaseException as error:
            raised.append(error)

    stop = threading.Event()

    def send() -> None:
        # Other operations come and go meanwhile, unasked for.
        while not stop.is_set():
            buffer._low_latency._under_way(buffer._communicators.all_low()[0]).sent(None, None)  # type: ignore[arg-type]

    low_dispatch(buffer, job)
    sending = threading.Thread(target=send)
    sending.start()
    for _ in range(50):
        sent = [low_dispatch(buffer, job, return_recv_hook=True) for _ in range(2)]
        threads = [threading.Thread(target=call, args=(one[4],)) for one in reversed(sent)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not raised, raised
        assert torch.equal(sent[0][1], sent[1][1])
    stop.set()
    sending.join()
    buffer.destroy()


def test_hooks_of_two_threads_receive_one_at_a_time(two: Any) -> None:
    two.run(check_hooks_of_threads)
