"""What one run adds to the guest: programs, their libraries, and the script that runs them."""

import os
import shlex
import shutil

import libraries
from common import Broken
from cpio import Archive

# The guest mounts over these, so a file there would vanish.
HIDDEN = ("/proc", "/sys", "/dev")
PROVIDED = {"SOFTROCE_DEVICES": "rxv0,rxv1", "SOFTROCE_ADDRESSES": "10.9.0.1,10.9.0.2"}


def write(guest, commands, files, environment, out):
    """
    Appends the job to the initramfs in `out`. Everything lies in the guest where it lies here, so that paths that were
    compiled in hold. `commands`: lists of a program and its arguments; `files`: more paths, also of directories.
    """
    archive = Archive(out)
    programs = [_program(command[0]) for command in commands]
    paths = list(programs)
    for path in files:
        paths += _tree(os.path.abspath(path))
    needed = {}
    for path in dict.fromkeys(paths):
        if any(path == hidden or path.startswith(hidden + "/") for hidden in HIDDEN):
            raise Broken(f"{path} cannot be given to the guest: {', '.join(HIDDEN)} are its own there")
        archive.file(path, path)
        needed.update(libraries.needed(path, guest.root))
    for path, source in needed.items():
        archive.file(path, source)
    directories = [os.environ.get("LD_LIBRARY_PATH", ""), *libraries.extra_directories(needed)]
    settings = dict(PROVIDED)
    if any(directories):
        settings["LD_LIBRARY_PATH"] = ":".join(filter(None, directories))
    settings.update(environment)

    here = os.getcwd()
    if any(here.startswith(hidden) for hidden in HIDDEN):
        here = "/"
    archive.directory(here)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    lines.append(f"cd {shlex.quote(here)}")
    for number, (program, command) in enumerate(zip(programs, commands)):
        lines.append(f"run {number} {shlex.join([program, *command[1:]])}")
    archive.text("/softroce/job", "\n".join(lines) + "\n")
    archive.end()


def _program(name):
    path = os.path.abspath(name) if os.path.exists(name) or "/" in name else shutil.which(name)
    if path is None or not os.path.isfile(path):
        raise Broken(f"there is no program {name}")
    if not os.access(path, os.X_OK):
        raise Broken(f"{name} is not executable")
    return path


def _tree(path):
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise Broken(f"there is no file {path}")
    return sorted(os.path.join(directory, name) for directory, _, names in os.walk(path) for name in names)
