"""Writes a Linux initramfs: a cpio archive in the "newc" format (Documentation/driver-api/early-userspace/buffer-format)."""

import os
import shutil
import stat

# Debian's merged layout. The kernel would replace a link by a directory of the same name, so no entry may go through one.
MERGED = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}


def inside(path):
    """The archive's name of an absolute path."""
    path = os.path.normpath(path).lstrip("/")
    first, _, rest = path.partition("/")
    return os.path.join(MERGED.get(first, first), rest) if rest else MERGED.get(first, first)


class Archive:
    """Entries are written as they come; directories above them by themselves. A later file replaces an earlier one."""

    def __init__(self, out):
        self.out = out
        self.inode = 0
        self.directories = set()

    def directory(self, path):
        name = inside(path)
        if not name or name in self.directories:
            return
        self._parents(name)
        self.directories.add(name)
        self._entry(name, stat.S_IFDIR | 0o755, 0)

    def link(self, path, target):
        name = path.lstrip("/") if path.lstrip("/") in MERGED else inside(path)
        self._parents(name)
        data = os.fsencode(target)
        self._entry(name, stat.S_IFLNK | 0o777, len(data))
        self.out.write(data)
        self._pad()

    def text(self, path, text, mode=0o644):
        name = inside(path)
        self._parents(name)
        data = os.fsencode(text)
        self._entry(name, stat.S_IFREG | mode, len(data))
        self.out.write(data)
        self._pad()

    def file(self, path, source):
        """Copies the file `source` (links are followed) with its permissions."""
        name = inside(path)
        self._parents(name)
        with open(source, "rb") as data:
            about = os.fstat(data.fileno())
            if about.st_size >= 1 << 32:
                raise ValueError(f"{source} has {about.st_size} bytes; an initramfs holds files under 4 GiB")
            self._entry(name, stat.S_IFREG | stat.S_IMODE(about.st_mode), about.st_size)
            begin = self.out.tell()
            shutil.copyfileobj(data, self.out, 1 << 20)
            if self.out.tell() - begin != about.st_size:
                raise ValueError(f"{source} changed its size while it was read")
        self._pad()

    def end(self):
        self._entry("TRAILER!!!", 0, 0)

    def _parents(self, name):
        parent = os.path.dirname(name)
        if parent:
            self.directory(parent)

    def _entry(self, name, mode, size):
        self.inode += 1
        data = os.fsencode(name) + b"\0"
        # inode, mode, uid, gid, links, time (0: the same input makes the same archive), size, device and its target, check.
        fields = (self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(data), 0)
        self.out.write(b"070701" + b"".join(b"%08x" % field for field in fields) + data)
        self._pad()

    def _pad(self):
        self.out.write(b"\0" * (-self.out.tell() % 4))
