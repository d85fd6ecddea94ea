"""Debian packages: installed for the host's tools, only downloaded and unpacked for what goes into the guest."""

import os
import re
import shutil

from common import Broken, call, say

INSTALL_LIMIT = 900  # seconds, also for a download
NETWORK = ["-o", "Acquire::Retries=3", "-o", "Acquire::http::Timeout=30", "-o", "DPkg::Lock::Timeout=120"]


class Gone(Broken):
    """A package could not be downloaded, perhaps since apt's lists are old and the archive has a newer version."""


def as_root(command):
    """The command, with sudo if need be."""
    if os.geteuid() == 0:
        return command
    if shutil.which("sudo"):
        # -n: a question for a password could never be answered in a continuous check.
        return ["sudo", "-n", "DEBIAN_FRONTEND=noninteractive", *command]
    raise Broken(f"needs root or sudo for this; run it yourself and try again: {' '.join(command)}")


def refresh():
    say("apt-get update")
    call(as_root(["apt-get", *NETWORK, "update"]), INSTALL_LIMIT)


def ensure(programs):
    """`programs`: program -> package. Installs the packages whose programs are missing."""
    missing = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if missing:
        install(missing)
    left = [program for program in programs if not shutil.which(program)]
    if left:
        raise Broken(f"installed {' '.join(missing)}, but there is still no {' '.join(left)}")


def install(missing):
    command = as_root(["apt-get", *NETWORK, "install", "--yes", "--no-install-recommends", *missing])
    say(f"installs {' '.join(missing)}")
    try:
        call(command, INSTALL_LIMIT)
    except Broken:
        refresh()  # the lists may be empty (a fresh image) or name versions that are gone
        call(command, INSTALL_LIMIT)


def candidates(names):
    """The version of each package that apt would fetch now."""
    versions = _policy(names)
    if any(name not in versions for name in names):
        refresh()
        versions = _policy(names)
    missing = [name for name in names if name not in versions]
    if missing:
        raise Broken(f"apt has no package {', '.join(missing)}: the guest is made from Debian 12 (bookworm), section main, amd64")
    return versions


def _policy(names):
    versions, name = {}, None
    for line in call(["apt-cache", "policy", *names], 60).splitlines():
        if line and not line.startswith(" "):
            name = line.rstrip(":")
        elif found := re.match(r"\s+Candidate: (?!\(none\))(\S+)", line):
            versions[name] = found[1]
    return versions


def dependency(name, pattern):
    """The package, matching `pattern`, that package `name` depends on."""
    candidates([name])
    listed = call(["apt-cache", "depends", name], 60)
    found = re.search(rf"Depends: ({pattern})$", listed, re.MULTILINE)
    if not found:
        raise Broken(f"the guest is made from Debian 12 (bookworm), where {name} depends on a package like {pattern}; "
                     f"here: {' '.join(listed.split()[1:]) or 'on nothing'}")
    return found[1]


def installed(name):
    """The installed version of a package."""
    return call(["dpkg-query", "-W", "-f", "${Version}", name], 60)


def unpack(versions, root, scratch):
    """Downloads each package in its version into `scratch` and unpacks it below `root`. Nothing is installed."""
    wanted = [f"{name}={version}" for name, version in sorted(versions.items())]
    # Root's downloads drop to a user who cannot write here; the checksums are verified all the same.
    download = ["apt-get", *NETWORK, "-o", "APT::Sandbox::User=root", "download", *wanted]
    try:
        call(download, INSTALL_LIMIT, cwd=scratch)
    except Broken as first:
        raise Gone(str(first)) from None
    for package in sorted(os.listdir(scratch)):
        call(["dpkg", "-x", os.path.join(scratch, package), root], 300)
