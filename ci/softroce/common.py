"""What the harness's commands share: how they fail, where they keep things, how they call other programs."""

import contextlib
import os
import signal
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = os.path.dirname(os.path.dirname(HERE))
CACHE = os.path.join(os.environ.get("CARGO_TARGET_DIR") or os.path.join(REPOSITORY, "target"), "softroce")

# A command that left something behind; and the exit codes of `timeout` and `env`: one that ran too long, and a harness that could
# not do its part.
LEFT, TIMED_OUT, BROKEN = 123, 124, 125


class Broken(Exception):
    """The harness could not do its part. The message is for the user."""


def say(message):
    print(f"softroce: {message}", file=sys.stderr, flush=True)


def main(body):
    """Runs a command's body and exits with what it returns. A signal unwinds, so that everything is put away."""

    def unwind(number, _frame):
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        # Not `say`: the signal may have come in the midst of a print.
        os.write(2, f"softroce: ended by {signal.Signals(number).name}\n".encode())
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, unwind)
    try:
        code = body()
        sys.stdout.flush()
    except Broken as reason:
        say(reason)
        code = BROKEN
    except BrokenPipeError:
        # Whoever read the output is gone. Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = BROKEN
    except OSError as reason:
        say(reason)  # a full disk, a file that vanished: the message names the file
        code = BROKEN
    sys.exit(code)


def call(command, limit, **options):
    """Runs a program for at most `limit` seconds and returns its output; raises Broken when it fails."""
    # Programs that are parsed must speak English.
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **options.pop("env", {})}
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                                 text=True, errors="surrogateescape", env=environment, **options)
    except FileNotFoundError as missing:
        raise Broken(f"{missing.filename} is not installed") from None
    try:
        output, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise Broken(f"`{' '.join(command)}` ran longer than {limit} s") from None
    finally:
        put_away(child)
    if child.returncode != 0:
        raise Broken(f"`{' '.join(command)}` failed with {child.returncode}:\n{(errors or output).strip()}")
    return output


def put_away(child, grace=15):
    """Ends a child that still runs: asks first, so that a package manager can leave its files in order."""
    for end in (child.terminate, child.kill):
        if child.poll() is not None:
            return
        # What sudo started is not ours to end; it has had the same Ctrl-C.
        with contextlib.suppress(PermissionError):
            end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    if child.poll() is None:
        say(f"process {child.pid} ({child.args[0]}) does not end")
