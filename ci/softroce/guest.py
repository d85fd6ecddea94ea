"""The guest: a Debian kernel and an initramfs with what every run needs. Built once, kept in target/softroce."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time

import libraries
import packages
from common import CACHE, HERE, Broken, say
from cpio import MERGED, Archive

QEMU = "qemu-system-x86_64"

# What is loaded, in this order; modules that these name as their own needs go before them. rxe asks for a CRC by name only.
MODULES = "virtio_pci virtio_console configfs crc32_generic ib_uverbs rdma_ucm rdma_rxe dummy veth sch_netem".split()

# The last ones are libraries of iproute2. libibverbs-dev serves programs that are built against the guest's libibverbs.
PACKAGES = ("busybox-static iproute2 libibverbs1 libibverbs-dev ibverbs-providers libnl-3-200 libnl-route-3-200 "
            "libbpf1 libbsd0 libcap2 libelf1 libmd0 libmnl0 libxtables12 zlib1g").split()
# rxe of this line is what the harness was made for: one network namespace, uncompressed modules.
KERNEL = r"linux-image-6\.1\.0-\d+-amd64"

PROGRAMS = ("/bin/ip", "/sbin/tc", "/usr/bin/rdma")
PROVIDER = ("/etc/libibverbs.d/rxe.driver", "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so")
VERBS = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
# busybox's applets that init and scripts may call by name; never `ip`, see init.
APPLETS = ("awk cat chmod cp cut date dd dmesg echo env false find grep head hostname insmod kill killall ln ls lsmod md5sum "
           "mkdir mkfifo mount mv od poweroff ps pwd rm sed seq sh sleep sort stat stty tail tee test timeout top touch tr true "
           "uname wc xargs").split()


class Guest:
    """A built guest. `root` holds the unpacked packages: headers and libraries for programs that will run in it."""

    def __init__(self, directory):
        self.directory = directory
        self.kernel = os.path.join(directory, "vmlinuz")
        self.initramfs = os.path.join(directory, "base.cpio")
        self.root = os.path.join(directory, "root")


def build():
    """The guest, from the cache if its packages and the harness's files are the same."""
    if os.uname().machine != "x86_64":
        raise Broken(f"the guest is an x86-64 machine that runs this machine's binaries; this one is {os.uname().machine}")
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Broken("needs apt-get and dpkg: the guest is made from Debian's packages")
    packages.ensure({QEMU: "qemu-system-x86"})
    try:
        return _cached()
    except packages.Gone as reason:
        say(reason)
    packages.refresh()
    return _cached()


def _cached():
    kernel = packages.dependency("linux-image-amd64", KERNEL)
    versions = packages.candidates([kernel, *PACKAGES])
    guest = Guest(os.path.join(CACHE, _key(versions)))
    if not os.path.exists(guest.directory):
        with _alone():
            if not os.path.exists(guest.directory):
                _make(guest, versions)
    return guest


def _key(versions):
    digest = hashlib.sha256()
    # The guest's own programs run on this machine's C library, so it counts too.
    for name, version in sorted({**versions, "libc6 of this machine": packages.installed("libc6")}.items()):
        digest.update(f"{name}={version}\n".encode())
    for name in ("init", "guest.py", "cpio.py", "libraries.py"):
        with open(os.path.join(HERE, name), "rb") as file:
            digest.update(file.read() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _alone():
    """One build at a time; the next finds the guest made. Removes what a killed build left."""
    os.makedirs(CACHE, exist_ok=True)
    with open(os.path.join(CACHE, "lock"), "w") as lock:
        deadline = time.monotonic() + 2 * packages.INSTALL_LIMIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Broken(f"another build held {lock.name} for {2 * packages.INSTALL_LIMIT} s") from None
                time.sleep(0.5)
        for name in os.listdir(CACHE):
            if name.startswith("unfinished-"):
                _remove(os.path.join(CACHE, name))
        yield


def _make(guest, versions):
    say(f"builds the guest: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    began = time.monotonic()
    scratch = tempfile.mkdtemp(prefix="unfinished-", dir=CACHE)
    try:
        made = Guest(os.path.join(scratch, "guest"))
        downloads = os.path.join(scratch, "downloads")
        os.makedirs(made.root)
        os.mkdir(downloads)
        packages.unpack(versions, made.root, downloads)
        _image(made)
        # All but the packages' headers, libraries and programs has served: the kernel's modules are most of it.
        for used in ("boot", "lib/modules", "usr/share"):
            shutil.rmtree(os.path.join(made.root, used))
        os.rename(made.directory, guest.directory)
    finally:
        _remove(scratch)
    size = os.path.getsize(guest.initramfs) >> 20
    say(f"built the guest in {time.monotonic() - began:.1f} s: an initramfs of {size} MiB, in {guest.directory}")


def _remove(directory):
    """Removes a directory, also while an interrupted dpkg's children still write their last file into it."""
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            return
        time.sleep(0.1)
    say(f"cannot remove {directory}; the next build tries again")


def _image(guest):
    boot = os.path.join(guest.root, "boot")
    kernel = next((name for name in os.listdir(boot) if name.startswith("vmlinuz-")), None)
    if kernel is None:
        raise Broken("the kernel's package has no boot/vmlinuz")
    shutil.copyfile(os.path.join(boot, kernel), guest.kernel)
    with open(guest.initramfs, "wb") as out:
        archive = Archive(out)
        for name, target in MERGED.items():
            archive.directory(f"/{target}")
            archive.link(f"/{name}", target)
        for name in ("proc", "sys", "dev", "tmp", "run", "root"):
            archive.directory(f"/{name}")
        archive.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        archive.text("/etc/group", "root:x:0:\n")
        archive.text("/etc/hosts", "127.0.0.1 localhost softroce\n")
        archive.file("/init", os.path.join(HERE, "init"))
        archive.file("/softroce/busybox", guest.root + "/bin/busybox")
        for applet in APPLETS:
            archive.link(f"/usr/bin/{applet}", "/softroce/busybox")
        _modules(archive, os.path.join(guest.root, "lib/modules"))
        files = {path: guest.root + path for path in (*PROGRAMS, *PROVIDER, VERBS)}
        for path in list(files):
            files.update(libraries.needed(files[path], guest.root))
        for path, source in files.items():
            archive.file(path, source)
        archive.end()


def _modules(archive, tree):
    found = {name[:-3].replace("-", "_"): os.path.join(directory, name)
             for directory, _, names in os.walk(tree) for name in names if name.endswith(".ko")}
    order = []
    for module in MODULES:
        _load_order(module, found, order)
    for module in order:
        archive.file(f"/softroce/modules/{module}.ko", found[module])
    archive.text("/softroce/modules.order", "\n".join(order) + "\n")


def _load_order(module, found, order):
    """Appends the module to `order`, after all that it needs. What needs what changes within one line of kernels."""
    if module in order:
        return
    if module not in found:
        raise Broken(f"the kernel's package has no module {module}.ko")
    with open(found[module], "rb") as file:
        depends = re.search(rb"\0depends=([^\0]*)\0", file.read())
    for other in depends[1].decode().split(",") if depends else ():
        if other:
            _load_order(other.replace("-", "_"), found, order)
    order.append(module)
