"""Every folder copy-on-write, for this process and all that it starts: Linux with namespaces."""

import ctypes
import errno
import fcntl
import glob
import itertools
import os
import re
import shutil
import socket
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000  # linux/sched.h
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18  # linux/mount.h
HERE, ALL_INSIDE, READ_ONLY = -100, 0x8000, struct.pack("4Q", 1, 0, 0, 0)  # for mount_setattr
KERNEL = ("/proc", "/sys", "/dev")  # its own folders: no files of anybody's
NO_NEW_PRIVILEGES = 38  # linux/prctl.h
SMALL = 2**20  # bytes of a file that is copied where no overlay can be
LOOKED_AT = 10000  # files of which it is asked whose they are
ROOM = "50%"  # of this machine's memory, for all that is written


def call(name: str, *arguments) -> int:
    """A function of the C library, which says by a number below 0 that it failed."""
    arguments = [os.fsencode(a) if isinstance(a, str) else a for a in arguments]
    found = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return found


def _mount(what: str, where: str, kind: str | None = None, flags: int = 0, options: str = ""):
    call("mount", what, where, kind, flags, options)


def overlay(base: str, folders: list[str], network: bool) -> None:
    """Enter a view of all files, of which at least `folders` can be written; it lies in `base`."""
    here = os.getcwd()
    own = _unshare(NEWNS | (0 if network else NEWNET), folders)
    found = re.findall(rb"^\S+ \S+ \S+ \S+ (\S+)", Path("/proc/self/mountinfo").read_bytes(), re.M)
    plain = [re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), m) for m in found]
    mounted = sorted({*map(os.fsdecode, plain), *own} - {"/"})
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", base, "tmpfs", 0, f"size={ROOM}")
    os.chdir(base)
    try:  # what an overlay remembers of removed folders; root's also of renamed ones
        os.setxattr(base, "trusted.overlay.works", b"")
        kind = "redirect_dir=on"
    except OSError:  # in memory from Linux 6.6 on
        os.setxattr(base, "user.overlay.works", b"")
        kind = "userxattr"
    os.mkdir("root")
    _cover("/", mounted, folders, kind)
    if os.path.isdir("/dev/shm"):
        _mount("tmpfs", "root/dev/shm", "tmpfs")
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            up = struct.pack("16sh", b"lo", 0x41)  # IFF_UP | IFF_RUNNING: this machine alone
            fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
    os.chroot("root")
    os.chdir(here)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _unshare(apart: int, folders: list[str]) -> list[str]:
    """Leave the world of all processes. An ordinary user does so as the root of one where nobody
    else is: then the folders are returned that need an overlay of their own."""
    try:
        call("unshare", apart)
        return []
    except OSError:
        who = (os.getuid(), os.getgid())
        own = _owned(folders, who)
        call("unshare", apart | NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), who, strict=True):
            Path("/proc/self", name).write_text(f"{number} {number} 1")
        return own


def _owned(folders: list[str], who: tuple[int, int]) -> list[str]:
    """The user's own folders. An overlay cannot copy for them what is another user's or group's
    (EOVERFLOW): neither the folders above a new file, so each gets an overlay of its own, nor what
    is inside: then OSError, for the next way."""
    for folder in folders:
        found = glob.iglob("**", root_dir=folder, recursive=True, include_hidden=True)
        for name in itertools.islice(found, LOOKED_AT):
            path = os.path.join(folder, name)
            if name and _owner(path) != who and os.access(path, os.W_OK):
                raise PermissionError(f"{path} has another owner or group")
    found = set()
    for folder in {*folders, os.path.expanduser("~"), tempfile.gettempdir()}:
        folder = os.path.realpath(folder)
        while (above := os.path.dirname(folder)) != "/" and _owner(above) == who:
            folder = above
        found |= {folder} if os.path.isdir(folder) else set()
    return sorted(found)


def _owner(path: str) -> tuple[int, int]:
    about = os.lstat(path)
    return about.st_uid, about.st_gid


def _cover(path: str, mounted: list[str], folders: list[str], kind: str) -> None:
    """Show `path` and all that is mounted inside of it below "root", copy-on-write."""
    inside = [m for m in mounted if m != path and _within(m, path)]
    try:
        if path in KERNEL:
            return _bind(path)
        if os.path.isfile(path):
            return _file(path)
        try:
            _layer(path, kind)
        except OSError:  # of mounts that were there before, an ordinary user gets no overlay
            if not inside:
                raise
            return _entries(path, mounted, folders, kind)
        for m in inside:
            if not any(m != other and _within(m, other) for other in inside):
                _cover(m, mounted, folders, kind)
    except OSError:  # a file system that can be no layer, or what may not be read
        if any(_within(folder, path) for folder in folders):
            raise
        with suppress(OSError):
            _bind(path)


def _within(path: str, folder: str) -> bool:
    return (path + "/").startswith(folder.rstrip("/") + "/")


def _layer(path: str, kind: str) -> None:
    k = len(os.listdir("."))
    upper, work = f"upper{k}", f"work{k}"
    os.mkdir(upper)
    os.mkdir(work)
    shutil.copymode(path, upper)
    # The lower folder's name may hold what options may not: it is named by its descriptor.
    lower = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        named = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work},{kind}"
        _mount("overlay", "root" + path, "overlay", 0, named)
    finally:
        os.close(lower)


def _entries(path: str, mounted: list[str], folders: list[str], kind: str) -> None:
    """Show a folder entry by entry."""
    shutil.copymode(path, "root" + path)
    for entry in os.scandir(path):
        new = "root" + entry.path
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), new)
        elif entry.is_dir():
            os.mkdir(new)
            _cover(entry.path, mounted, folders, kind)
        else:
            _file(entry.path)


def _file(path: str) -> None:
    """Show a file: a copy of a small one, which can be changed, else as it is, read-only."""
    new = "root" + path
    open(new, "a").close()
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > SMALL:
            raise PermissionError
        shutil.copy2(path, new)
    except PermissionError:  # or it may not be read
        _bind(path)


def _bind(path: str) -> None:
    """Show a file or folder as it is, read-only."""
    _mount(path, "root" + path, None, BIND | RECURSIVE)
    call("syscall", 442, HERE, "root" + path, ALL_INSIDE, READ_ONLY, len(READ_ONLY))


def renamed(rename, old, new, **folders) -> None:
    """os.rename; by copying where an overlay cannot, as with folders that were there before."""
    try:
        return rename(old, new, **folders)
    except OSError as error:
        if error.errno != errno.EXDEV or folders:
            raise
    beside = os.path.abspath(os.fsdecode(new)) + ".renamed"
    if os.path.isdir(old) and not os.path.islink(old):
        shutil.copytree(old, beside, symlinks=True)
        rename(beside, new)
        return shutil.rmtree(old)
    shutil.copy2(old, beside, follow_symlinks=False)
    rename(beside, new)
    return os.unlink(old)
