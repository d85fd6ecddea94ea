"""The shared libraries that a program needs, as the dynamic loader of this machine finds them."""

import os
import re

from common import Broken, call

# Where the guest's loader looks by itself: it has no cache made by ldconfig.
DEFAULT = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib", "/usr/lib", "/lib64", "/usr/lib64")


def needed(program, root):
    """
    Files that go with `program`: path in the guest -> file here. Libraries below `root` (the unpacked packages) come first,
    since libibverbs and its providers must be of one version; glibc and all others are this machine's.
    """
    with open(program, "rb") as file:
        if file.read(4) != b"\x7fELF":
            return {}  # a script, or data
    search = [root + directory for directory in DEFAULT[:2]] + [os.environ.get("LD_LIBRARY_PATH", "")]
    try:
        listed = call(["ldd", program], 60, env={"LD_LIBRARY_PATH": ":".join(filter(None, search))})
    except Broken as reason:
        if "not a dynamic executable" in str(reason):
            return {}
        raise
    files = {}
    for line in listed.splitlines():
        if "=> not found" in line:
            raise Broken(f"{program} needs {line.split()[0]}, which is not on this machine")
        if found := re.match(r"\s+(?:\S+ => )?(/.*) \(0x[0-9a-f]+\)$", line):
            path = os.path.normpath(found[1])
            files[path[len(root):] if path.startswith(root + "/") else path] = path
    return files


def extra_directories(paths):
    """The directories of guest libraries that its loader would not search by itself, for LD_LIBRARY_PATH."""
    directories = dict.fromkeys(os.path.dirname(path) for path in paths)
    return [directory for directory in directories if directory not in DEFAULT]
