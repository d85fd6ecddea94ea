"""One run of the guest under QEMU's software emulation: starts it, relays what the job prints, ends it by a deadline."""

import collections
import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time

from common import BROKEN, LEFT, TIMED_OUT, put_away, say
from guest import QEMU

CPUS = 2
MEMORY = 1024  # MiB, and more for a large job
END_LIMIT = 30  # seconds from the job's end to the machine's
CONSOLE_LINES = 60  # of the console, shown when something went wrong: a kernel's last words are long
PR_SET_PDEATHSIG = 1


class Machine:
    """A running guest. The job's output goes to this process's own, as it comes."""

    def __init__(self, guest, initramfs, size, names, show_console):
        """`initramfs`: an open file that may have no name. `names`: what to call the job's commands in messages."""
        self.names = names
        self.show_console = show_console
        self.console = collections.deque(maxlen=1000)
        self.partial = {"console": b"", "control": b""}
        self.stage = "boot"  # boot -> job -> end
        self.current = None
        self.codes = {}
        self.left = {}
        self.broken = None
        self.stopped_at = None
        self.stopped_for = 0.0
        self.streams = selectors.DefaultSelector()
        with contextlib.ExitStack() as ours:
            writers = {}
            for name in ("console", "output", "errors", "control"):
                reader, writer = os.pipe()
                ours.callback(os.close, writer)
                self.streams.register(reader, selectors.EVENT_READ, name)
                writers[name] = writer
            self.process = self._start(guest, initramfs, size, writers)

    @staticmethod
    def _start(guest, initramfs, size, writers):
        # QEMU opens the pipes and the unnamed initramfs by the numbers it inherits: nothing on disk is left to remove.
        command = [QEMU, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(CPUS),
                   "-m", str(MEMORY + 3 * (size >> 20)), "-no-user-config", "-nodefaults", "-display", "none",
                   "-monitor", "none", "-no-reboot", "-kernel", guest.kernel, "-initrd", f"/dev/fd/{initramfs.fileno()}",
                   "-append", "console=ttyS0 quiet panic=-1 oops=panic rdinit=/init", "-device", "virtio-serial-pci"]
        for name, writer in writers.items():
            command += ["-chardev", f"file,id={name},path=/dev/fd/{writer}"]
        command += ["-serial", "chardev:console"]
        for number, name in enumerate(("output", "errors", "control"), 1):
            command += ["-device", f"virtserialport,chardev={name},nr={number}"]
        libc = ctypes.CDLL(None)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writers["console"], stderr=writers["console"],
                                pass_fds=(initramfs.fileno(), *writers.values()), start_new_session=True,
                                # The machine must not outlive this process, even one that is killed.
                                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))

    def run(self, boot_limit, limit):
        """Waits for the job's end and returns the exit code of the whole."""
        limits = {"boot": boot_limit, "job": limit, "end": END_LIMIT}
        began = {"boot": time.monotonic()}
        try:
            stage = self.stage
            while self.streams.get_map():
                left = began[stage] + limits[stage] - time.monotonic()
                if left <= 0:
                    return self._late(stage, limits[stage])
                self._relay(min(left, 1.0))
                self._note_stops()
                if self.stage != stage:
                    stage = self.stage
                    began[stage] = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_LIMIT)  # all its ends are closed: it exits now
        finally:
            put_away(self.process, grace=2)
            self._close()
            if self.stopped_for >= 0.1:
                say(f"QEMU was stopped from outside for {self.stopped_for:.1f} s in all: deadlines in the guest passed meanwhile")
        return self._verdict(began)

    def _relay(self, limit):
        for key, _ in self.streams.select(limit):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.streams.unregister(key.fd)
                os.close(key.fd)
            elif key.data == "output":
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            elif key.data == "errors":
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()
            else:
                *lines, self.partial[key.data] = (self.partial[key.data] + data).split(b"\n")
                for line in lines:
                    getattr(self, f"_on_{key.data}")(line.decode(errors="replace").rstrip())

    def _note_stops(self):
        """While somebody has stopped QEMU (SIGSTOP), the guest's time goes on: its deadlines pass, and nothing there says why."""
        with contextlib.suppress(ChildProcessError):
            while (event := os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)) is not None:
                if event.si_code == os.CLD_STOPPED:
                    self.stopped_at = time.monotonic()
                elif self.stopped_at is not None:
                    self.stopped_for += time.monotonic() - self.stopped_at
                    self.stopped_at = None

    def _on_console(self, line):
        self.console.append(line)
        if self.show_console:
            say(f"console: {line}")

    def _on_control(self, line):
        word, *rest = line.split(" ")
        if word == "ready":
            self.stage = "job"
        elif word == "start":
            self.current = int(rest[0])
        elif word == "exit":
            self.codes[int(rest[0])] = int(rest[1])
            self.current = None
            if len(self.codes) == len(self.names):
                self.stage = "end"
        elif word == "left":
            self.left[int(rest[0])] = " ".join(rest[1:]).strip("; ").replace(";", "; ")
        elif word == "cut":
            say("a process that the job left behind still held its output: the rest is lost")
        elif word == "broken":
            self.broken = " ".join(rest)

    def _late(self, stage, limit):
        if stage == "boot":
            say(f"the guest was not up after {limit:g} s")
        elif stage == "job" and self.current is not None:
            say(f"{self.names[self.current]} was still running after {limit:g} s")
        else:
            say(f"the guest did not go on within {limit:g} s ({stage})")
        self._tell_console()
        return TIMED_OUT if stage == "job" else BROKEN

    def _verdict(self, began):
        if self.broken is not None or len(self.codes) < len(self.names):
            if self.broken is not None:
                say(f"the guest gave up: {self.broken}")
            elif self.current is not None:
                say(f"the guest ended while {self.names[self.current]} ran")
            else:
                say(f"the guest ended in stage \"{self.stage}\"; QEMU's exit code was {self.process.returncode}")
            self._tell_console()
            return BROKEN
        say(f"up after {began['job'] - began['boot']:.1f} s, the job took {began['end'] - began['job']:.1f} s")
        failed = [(self.names[number], code) for number, code in sorted(self.codes.items()) if code]
        for name, code in failed:
            killed = f" ({signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""
            say(f"{name} ended with {code}{killed}")
        for number, things in sorted(self.left.items()):
            say(f"{self.names[number]} left behind: {things}")
        if any(code > 128 for _, code in failed):
            self._tell_console()  # the kernel may have said why
        return failed[0][1] if failed else LEFT if self.left else 0

    def _tell_console(self):
        last = [*self.console, self.partial["console"].decode(errors="replace")]
        last = [line for line in last if line.strip()][-CONSOLE_LINES:]
        say("the console stopped at:" if last else "the console is empty")
        for line in last:
            say(f"  {line}")

    def _close(self):
        for key in list(self.streams.get_map().values()):
            os.close(key.fd)
        self.streams.close()
