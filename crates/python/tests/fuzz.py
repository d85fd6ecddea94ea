"""A fuzzer of arguments: every public call of `moexpress` and `deep_ep`, with what nobody should give it.

    MOEXPRESS_FUZZ_CALLS=1000000 MOEXPRESS_FUZZ_SEED=7 python tests/fuzz.py

A child process makes a share of the calls, on a rank alone; shares take turns: `moexpress`, `deep_ep` of V1, and of V2. A child that dies, a
call that takes too long, an exception that is not documented, bytes that are nobody's business: each is a finding, told with the share's
seed, which replays it: `python tests/fuzz.py SEED CALLS`.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz_calls import Calls

Call = Callable[[], Any]

SURFACES = 3
"""That calls are made of, a child of one."""
SHARE = 40_000
"""Calls of a child."""
FRUITFUL = 2000
"""Calls among which each that takes microseconds is right at least once."""
LIMIT = 60.0
"""Seconds that a call may take."""
SLOW, BESIDE, FORKED = 0.002, 0.02, 0.0005
"""Shares of calls that make something anew; that have two more beside them, in a thread or a signal handler; that a forked child makes."""


def child(seed: int, calls: int, progress: str) -> None:
    """Makes ``calls`` calls, and writes how many it has begun to the file ``progress``."""
    import torch
    import torch.distributed as dist
    from fuzz_deep_ep import OfDeepEp
    from fuzz_elastic import OfElastic
    from fuzz_moexpress import OfMoexpress
    from fuzz_values import Values

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["MOEXPRESS_TIMEOUT"] = "5"
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", world_size=1, rank=0)
    values = Values(seed)
    surface: Calls = (OfMoexpress, OfDeepEp, OfElastic)[seed % SURFACES](values)
    every, answers = surface.all(), Counter[str]()
    with open(progress, "r+b") as file, mmap.mmap(file.fileno(), 8) as begun:
        for number in range(calls):
            begun[:] = struct.pack("<q", number + 1)
            values.begin()
            draw = values.random.choice(surface.slow() if values.chance(SLOW) else every)
            name = draw.__name__
            try:
                call = draw()
                if values.chance(BESIDE):
                    call = beside(surface, call, values.random.choice((by_thread, by_signal)))
                elif values.chance(FORKED):
                    call = partial(forked, surface, call)
            except surface.documented:  # what a call is drawn from may have been closed
                continue
            except Exception:
                finding(seed, number, f"drawing {name}")
            try:
                call()
                answers[f"{name}: returned"] += 1
            except surface.documented as error:
                answers[f"{name}: {type(error).__name__}"] += 1
            except BaseException:
                finding(seed, number, name)
            surface.calm = False
            values.check()
    surface.close()
    barren = {draw.__name__ for draw in surface.all() if not answers[f"{draw.__name__}: returned"]}
    # Where no drawn call is right, what is behind the checks is not tried.
    assert calls < FRUITFUL or not barren, f"no call of {barren} was right: what it is drawn from has changed"
    for answer, count in sorted(answers.items()):
        print(f"{count:8} {answer}")


def finding(seed: int, number: int, name: str) -> None:
    """Ends the child with what happened."""
    print(f"seed {seed}, call {number}, {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    os._exit(1)


def beside(surface: Calls, call: Call, how: Callable[[Call, Call], None]) -> Call:
    """The call, and two more beside it. What those raise is raised, unless it is documented."""
    others = [surface.random.choice(surface.all())() for _ in range(2)]
    surface.calm = True

    def more() -> None:
        for other in others:
            with suppress(*surface.documented):
                other()

    return partial(how, call, more)


def by_thread(call: Call, more: Call) -> None:
    """``more`` in a second thread."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            more()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        call()
    finally:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread hangs"
        if raised:
            raise AssertionError("in a thread") from raised[0]


def by_signal(call: Call, more: Call) -> None:
    """``more`` in a signal handler, somewhere in the call or behind it."""
    raised: list[BaseException] = []

    def handle(*_: object) -> None:
        try:
            more()
        except BaseException as error:
            raised.append(error)

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 2e-5)
    try:
        call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if raised:
            raise AssertionError("in a signal handler") from raised[0]


def forked(surface: Calls, call: Call) -> None:
    """The call in a child that is forked: it is refused there, or needs no communicator; and the child ends."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LIMIT) // 2)
        status = 0
        try:
            call()
        except surface.documented:
            pass
        except BaseException:
            traceback.print_exc()
            status = 1
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"a forked child ended with {status}"


def share(seed: int, calls: int) -> tuple[int, str | None]:
    """Runs a share in a child; how many calls it made, and what was found."""
    with tempfile.NamedTemporaryFile() as progress, tempfile.TemporaryFile("w+") as told:
        progress.write(bytes(8))
        progress.flush()
        command = [sys.executable, __file__, str(seed), str(calls), progress.name]
        process = subprocess.Popen(command, stdout=told, stderr=told, env={**os.environ, "PYTHONMALLOC": "malloc"})
        begun, since = 0, time.monotonic()
        hung, since = False, since + LIMIT  # to import torch takes its time
        while process.poll() is None:
            time.sleep(0.05)
            (now,) = struct.unpack("<q", Path(progress.name).read_bytes())
            if now != begun:
                begun, since = now, time.monotonic()  # a call has ended
            elif time.monotonic() - since > LIMIT:
                hung = True
                process.send_signal(signal.SIGUSR1)  # where it hangs
                time.sleep(1)
                process.kill()
                process.wait()
        (begun,) = struct.unpack("<q", Path(progress.name).read_bytes())
        told.seek(0)
        text = told.read()
        if process.returncode == 0:
            return calls, None
        how = f"hung for {LIMIT} s" if hung else f"ended with {process.returncode}"
        return begun, f"seed {seed}: call {begun} of {calls} {how}\n{text[-6000:]}"


def run(calls: int, seed: int) -> list[str]:
    """Makes ``calls`` calls in shares; what was found."""
    found, made, began = [], 0, time.monotonic()
    size = min(SHARE, -(-calls // SURFACES))  # of each at least one
    while made < calls:
        count, finding = share(seed, min(size, calls - made))
        if finding is not None:
            found.append(finding)
            print(finding, flush=True)
        made, seed = made + count, seed + 1
        print(f"{made} calls, {len(found)} findings, {time.monotonic() - began:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    if len(sys.argv) == 4:
        child(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    elif len(sys.argv) == 3:
        print(*share(int(sys.argv[1]), int(sys.argv[2])))
    else:
        calls, seed = (
            int(os.environ.get(f"MOEXPRESS_FUZZ_{name}", usual)) for name, usual in (("CALLS", 20_000), ("SEED", 0))
        )
        sys.exit(bool(run(calls, seed)))
