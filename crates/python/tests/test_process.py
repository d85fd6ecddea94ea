"""Processes: Ctrl-C, other threads, forks, leaks, and ends without goodbye."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import deep_ep
import moexpress
import oracle
import pytest
import torch
import torch.distributed as dist
from moexpress import Communicator, _meeting, errors


def make(**settings: Any) -> tuple[Communicator, oracle.Batch]:
    world, rank = dist.get_world_size(), dist.get_rank()
    layer = oracle.Layer(world, 2 * world, 2, 64)
    batch = oracle.batches(layer, [8] * world)[rank]
    sizes = {"experts": layer.experts, "topk": 2, "hidden": 64, "max_tokens": 8, "device": "cpu"}
    return Communicator(**{**sizes, **settings}), batch


def check_interrupt(rank: int, world: int) -> None:
    """Rank 0 waits in vain for the others, a second thread counts meanwhile, and a signal ends the wait."""
    communicator, batch = make(timeout=30.0)
    communicator.dispatch(batch.x, batch.topk_idx)
    if rank == 0:
        steps, stop = [0], threading.Event()

        def count() -> None:
            while not stop.is_set():
                steps[0] += 1
                # It does not come so far where the wait keeps Python's lock.
                if steps[0] == 100:
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

        thread = threading.Thread(target=count)
        thread.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            communicator.dispatch(batch.x, batch.topk_idx)
        assert time.monotonic() - began < 20
        stop.set()
        thread.join()
        with pytest.raises(errors.Poisoned, match="dropped before it had ended"):
            communicator.dispatch(batch.x, batch.topk_idx)
    dist.barrier()
    communicator.recover()
    communicator.dispatch(batch.x, batch.topk_idx)
    communicator.close()


def test_waits_answer_ctrl_c_and_let_other_threads_run(ranks: Any) -> None:
    ranks.run(check_interrupt)


def check_interrupted_meeting(rank: int, world: int) -> None:
    """Making a communicator waits for the others, too."""
    meeting = moexpress.Meeting(timeout=30.0)
    if rank == 0:
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            meeting.barrier()
        assert time.monotonic() - began < 10
    dist.barrier()


def test_meetings_answer_ctrl_c(two: Any) -> None:
    two.run(check_interrupted_meeting)
    two.stop()  # The interrupted barrier is still waiting on a thread.


def late(kind: str, group: Any, seconds: int = 2) -> Any:
    """What is made within two seconds."""
    if kind == "Communicator":
        return make(group=group, timeout=float(seconds))[0]
    if kind == "ElasticBuffer":
        return deep_ep.ElasticBuffer(group, 0, num_gpu_timeout_secs=seconds)
    before = os.environ["MOEXPRESS_TIMEOUT"]
    os.environ["MOEXPRESS_TIMEOUT"] = str(seconds)
    try:
        return moexpress.Meeting(group) if kind == "Meeting" else deep_ep.Buffer(group)
    finally:
        os.environ["MOEXPRESS_TIMEOUT"] = before


def check_late(rank: int, world: int, kind: str) -> None:
    group = dist.new_group()
    if rank == 1:
        dist.barrier()
    began = time.monotonic()
    with pytest.raises(errors.MeetingFailed, match=f"not all {world} ranks of the group told wh.* within 2.0 s"):
        late(kind, group)
    assert time.monotonic() - began < 20
    # What still waits there would take part.
    with pytest.raises(errors.MeetingFailed, match="an earlier meeting of this group was given up"):
        late(kind, group)
    if rank != 1:
        dist.barrier()
    other = dist.new_group()
    late(kind, other, 20)
    dist.barrier()


@pytest.mark.parametrize("kind", ["Meeting", "Communicator", "Buffer", "ElasticBuffer"])
def test_a_rank_that_does_not_come_to_a_meeting_fails_it_in_time(ranks: Any, kind: str) -> None:
    ranks.run(check_late, kind)
    ranks.stop()  # Gathers of the groups are still waiting on threads.


def check_unhurried(rank: int, world: int) -> None:
    """Where nobody says how long ranks may take, one may load for longer than an operation may last."""
    group, usual = dist.new_group(), _meeting.TIMEOUT
    before = os.environ.pop("MOEXPRESS_TIMEOUT")
    _meeting.TIMEOUT = 1.0
    try:
        if rank == 1:
            time.sleep(3)
        assert moexpress.Meeting(group).world == world
    finally:
        _meeting.TIMEOUT = usual
        os.environ["MOEXPRESS_TIMEOUT"] = before


def test_a_rank_may_come_as_late_as_the_group_allows_unless_told_otherwise(ranks: Any) -> None:
    ranks.run(check_unhurried)


def check_interrupted_gather(rank: int, world: int) -> None:
    group = dist.new_group()
    if rank == 0:
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            moexpress.Meeting(group, timeout=30.0)
        assert time.monotonic() - began < 10
    dist.barrier()


def test_making_a_meeting_answers_ctrl_c(two: Any) -> None:
    two.run(check_interrupted_gather)
    two.stop()


def check_broken_gather(rank: int, world: int) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def tells_other(everybody: list[Any], told: Any, group: Any) -> None:
        everybody[:] = ["something else"]

    gather = dist.all_gather_object
    try:
        for group, other, why in [
            (dist.new_group(), breaks, "not tell each other where they are: .* Connection closed by peer"),
            (dist.new_group(), tells_other, "rank 0 did not tell where they are, but made another call of the group"),
        ]:
            dist.all_gather_object = other
            with pytest.raises(errors.MeetingFailed, match=why):
                moexpress.Meeting(group)
    finally:
        dist.all_gather_object = gather


def test_what_a_group_s_gather_raises_is_a_failed_meeting(one: Any) -> None:
    one.run(check_broken_gather)


class OneDevice:
    """As much of torch_npu as knows which device is current in which thread."""

    def __init__(self) -> None:
        self.current = {threading.get_ident(): 3}

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.current[threading.get_ident()]

    def set_device(self, number: int) -> None:
        self.current[threading.get_ident()] = number


def check_device(rank: int, world: int) -> None:
    torch.npu, gather, seen = OneDevice(), dist.all_gather_object, list[int]()

    def looks(*arguments: Any, **named: Any) -> None:
        seen.append(torch.npu.current_device())
        gather(*arguments, **named)

    dist.all_gather_object = looks
    try:
        moexpress.Meeting().close()
    finally:
        dist.all_gather_object = gather
        del torch.npu
    assert seen and set(seen) == {3}


def test_a_group_gathers_on_the_device_that_is_current(one: Any) -> None:
    one.run(check_device)


def check_threads(rank: int, world: int) -> None:
    """Calls from another thread than the main one, as those of autograd are; a second call waits for the first."""
    communicator, batch = make()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                received = communicator.dispatch(batch.x, batch.topk_idx)
                communicator.combine(received.x, received.handle)
                communicator.stats()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        communicator.stats()
    thread.join()
    assert not failures
    communicator.close()


def test_calls_from_other_threads(ranks: Any) -> None:
    ranks.run(check_threads)


def used() -> tuple[int, int, int]:
    """Resident bytes, descriptors, threads."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def check_leaks(rank: int, world: int, iterations: int) -> tuple[int, int]:
    communicator, batch = make(low_latency=True)
    weights = batch.topk_weights
    handle = communicator.dispatch(batch.x, batch.topk_idx).handle

    def once() -> None:
        received = communicator.dispatch(batch.x, batch.topk_idx, weights)
        communicator.combine(received.x, received.handle, topk_weights=received.topk_weights)
        again = communicator.redispatch(batch.x, handle)
        communicator.combine(again.x, handle, bias=batch.x)
        low = communicator.low_latency_dispatch(batch.x, batch.topk_idx)
        communicator.low_latency_combine(low.x, low.handle, weights)

    for _ in range(iterations // 10):
        once()
    gc.collect()
    before = used()
    for _ in range(iterations):
        once()
    gc.collect()
    after = used()
    communicator.close()
    return after[0] - before[0], after[1] - before[1] + after[2] - before[2]


def test_nothing_leaks_over_10000_iterations(two: Any) -> None:
    for grown, opened in two.run(check_leaks, 10_000, limit=500):
        # A leak of one small object an iteration would be more.
        assert grown < 1_000_000 and opened <= 0, f"{grown} bytes, {opened} descriptors and threads"


def check_made_and_closed(rank: int, world: int) -> tuple[int, int]:
    def once() -> None:
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
        batch = oracle.batches(oracle.Layer(world, 2 * world, 2, 128), [4] * world)[rank]
        buffer.low_latency_dispatch(batch.x, batch.topk_idx, 4, 2 * world)
        buffer.destroy()

    for _ in range(5):
        once()
    gc.collect()
    before = used()
    for _ in range(40):
        once()
    gc.collect()
    # Threads of the last meeting end.
    until = time.monotonic() + 20
    while sum((after := used())[1:]) > sum(before[1:]) and time.monotonic() < until:
        time.sleep(0.1)
    return after[0] - before[0], after[1] - before[1] + after[2] - before[2]


def test_buffers_made_and_destroyed_leave_nothing(two: Any) -> None:
    for grown, opened in two.run(check_made_and_closed):
        assert grown < 8_000_000 and opened <= 0, f"{grown} bytes, {opened} descriptors and threads"


ALONE = """
import os, sys, tempfile
import torch, torch.distributed as dist
import moexpress
from moexpress import Communicator, errors

store = "file://" + os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("gloo", init_method=store, world_size=1, rank=0)
communicator = Communicator(experts=2, topk=1, hidden=64, max_tokens=4, device="cpu", low_latency=True)
x, idx = torch.ones(4, 64).bfloat16(), torch.tensor([[0], [1], [-1], [0]])
received = communicator.dispatch(x, idx)
"""

FORKS = (
    ALONE
    + """
child = os.fork()
if child == 0:
    status = 1
    for call in (lambda: communicator.dispatch(x, idx), lambda: communicator.stats(), communicator.meeting.barrier):
        try:
            call()
        except errors.Forked as error:
            status = 0 if "start processes by spawn or forkserver" in str(error) else 2
    # What was received before the fork stays readable, and everything may be dropped.
    status = status or int(not torch.equal(received.x, torch.ones(3, 64).bfloat16()))
    del received, communicator
    sys.exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
back = communicator.combine(received.x, received.handle)
assert torch.equal(back.x[0], x[0])
print("done")
"""
)

ENDS = (
    ALONE
    + """
pending = communicator.send_dispatch(x, idx)
print("done")
"""
)


def run(script: str, *, limit: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=limit)


@pytest.mark.parametrize(
    "script", [FORKS, ENDS], ids=["a forked child is told and ends well", "an operation under way at exit"]
)
def test_a_process_ends_well(script: str) -> None:
    ended = run(script)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


GROUP = """
import os, sys
import torch, torch.distributed as dist
import deep_ep

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, world_size=world, rank=rank)
buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
x, idx = torch.ones(4, 64).bfloat16(), torch.arange(8).view(4, 2) % (2 * world)
for _ in range(20):
    layout = buffer.get_dispatch_layout(idx, 2 * world)
    got = buffer.dispatch(x, None, layout[0], None, layout[3], layout[2], idx, torch.ones(4, 2))
    back = buffer.combine(got[0], got[4])
    low = buffer.low_latency_dispatch(x, idx, 4, 2 * world, use_fp8=False)
    low_back = buffer.low_latency_combine(low[0], idx, torch.ones(4, 2), low[2])
"""


def test_ranks_end_well_without_destroy(tmp_path: Path) -> None:
    for attempt in range(3):
        store = str(tmp_path / f"store{attempt}")
        started = [
            subprocess.Popen([sys.executable, "-c", GROUP, str(rank), "2", store], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        for process in started:
            told = process.communicate(timeout=60)[1]
            assert process.returncode == 0 and "Error" not in told, told


def test_torch_is_not_needed_to_import_it() -> None:
    ended = run(
        "import sys, moexpress, moexpress.errors; assert 'torch' not in sys.modules; print(moexpress.__version__)"
    )
    assert ended.returncode == 0, ended.stderr


def test_what_needs_torch_comes_when_it_is_asked_for() -> None:
    ended = run(
        "import sys, moexpress; moexpress.autograd.dispatch; assert moexpress.Communicator and 'torch' in sys.modules"
    )
    assert ended.returncode == 0, ended.stderr
