"""Where a script runs: a view of the files in which nothing of the user's changes.

`enter` takes the best of three ways that the system allows, for the process that calls it and all
that it starts:

"overlay"  Linux with namespaces. Every folder is copy-on-write, for libraries and programs alike;
           what is written lies in memory, can be read back, and is gone with the process.
"copy"     Linux with Landlock. The script's folders are copied, and the kernel refuses to write
           anywhere else (modes and times of files apart, which only Python's hook refuses).
"watched"  elsewhere. The same copies; Python refuses to write anywhere else and to start programs.
           What a compiled library writes to an absolute path is not held back: `WATCHED` says so.

The network is closed unless asked for. This guards against what scripts do, not against attackers.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

WATCHED = (
    "This system keeps no private view of its files: writing elsewhere than in a copy of the "
    "script's folder is refused in Python, but not what a compiled library writes by itself."
)
NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000  # linux/sched.h
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18  # linux/mount.h
KERNEL = ("/proc", "/sys", "/dev")  # its own folders: no files of anybody's
NO_NEW_PRIVILEGES = 38  # linux/prctl.h
# linux/landlock.h: all rights to write, make or remove, by the version that brought them
WRITE_FILE, WRITES, RENAMES, TRUNCATES = 1 << 1, 0x1FF2, 1 << 13, 1 << 14
CONNECT_OR_BIND = 3
ENTRIES, SMALL = 10_000, 2**20  # of a copied folder: so many; files up to so many bytes, else links


def _call(name: str, *arguments) -> int:
    """A function of the C library, which says by a number below 0 that it failed."""
    arguments = [a.encode() if isinstance(a, str) else a for a in arguments]
    found = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return found


def _mount(what: str, where: str, kind: str | None = None, flags: int = 0, options: str = ""):
    _call("mount", what, where, kind, flags, options)


def enter(base: str, folders: list[str], network: bool, ways: tuple[str, ...]) -> str:
    """Enter the best view of `ways`: its name. `base` is an empty folder, removed by the caller;
    `folders` are those in which the script will work."""
    refused = []
    for way in ways:
        try:
            {"overlay": _overlay, "copy": _copy, "watched": _watched}[way](base, folders, network)
            return way
        except (OSError, AttributeError) as error:  # the second: no Linux
            refused.append(f"{way}: {error}")
    raise OSError("no private view of the files can be had: " + "; ".join(refused))


def place(path: str, base: str, way: str) -> str:
    """Where a path of the user's is found in the view."""
    path = os.path.abspath(path)
    return path if way == "overlay" or not os.path.lexists(base + path) else base + path


# ------------------------------------------------------------------------------ copy-on-write


def _overlay(base: str, folders: list[str], network: bool) -> None:
    home, who = os.getcwd(), (os.getuid(), os.getgid())
    apart = NEWNS | (0 if network else NEWNET)
    try:
        _call("unshare", apart)
    except OSError:  # who is not root is it in a world of their own
        _call("unshare", apart | NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), who, strict=True):
            Path("/proc/self", name).write_text(f"{number} {number} 1")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounted = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", base, "tmpfs")
    os.setxattr(base, "user.overlay.works", b"")  # in memory from Linux 6.6 on
    os.chdir(base)
    os.mkdir("root")
    _cover("/", "root", [m for m in mounted if m != "/"], folders)
    _mount("tmpfs", "root/dev/shm", "tmpfs")
    os.chroot("root")
    os.chdir(home)
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            up = struct.pack("16sh", b"lo", 0x41)  # IFF_UP | IFF_RUNNING: this machine alone
            fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS


def _cover(path: str, new: str, mounted: list[str], folders: list[str]) -> None:
    """Show the folder `path` at `new`, copy-on-write. What has other file systems inside is
    covered entry by entry: an overlay does not reach into them."""
    if path in KERNEL:
        return _bind(path, new)
    if not any(m.startswith(path.rstrip("/") + "/") for m in mounted):
        k = len(os.listdir("."))
        layers = [f"{name}{k}" for name in ("upper", "work")]
        for layer in layers:
            os.mkdir(layer)
        shutil.copymode(path, layers[0])
        try:
            # The lower folder's name may hold what options may not: it is named by its descriptor.
            lower = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            named = f"lowerdir=/proc/self/fd/{lower},upperdir={layers[0]},workdir={layers[1]}"
            _mount("overlay", new, "overlay", 0, f"{named},userxattr")
            os.close(lower)
        except OSError:
            if any(f == path or f.startswith(path + "/") for f in folders):
                raise
            _bind(path, new)
        return None
    shutil.copymode(path, new)
    with suppress(PermissionError):  # a folder that only others read
        for entry in os.scandir(path):
            inside = os.path.join(new, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), inside)
            elif entry.is_dir():
                os.mkdir(inside)
                _cover(entry.path, inside, mounted, folders)
            else:
                open(inside, "x").close()
                _bind(entry.path, inside)
    return None


def _bind(path: str, new: str) -> None:
    """Show a file or folder as it is, read-only."""
    _mount(path, new, None, BIND | RECURSIVE)
    kept = os.statvfs(new).f_flag & 0xE  # no programs of other users, no devices, no programs
    with suppress(OSError):
        _mount("none", new, None, BIND | REMOUNT | READ_ONLY | kept)


# --------------------------------------------------------------------------------------- copies


def _copy(base: str, folders: list[str], network: bool) -> None:
    version = _call("syscall", 444, None, 0, 1)
    _copied(base, folders)
    rights = WRITES | (RENAMES if version > 1 else 0) | (TRUNCATES if version > 2 else 0)
    closed = CONNECT_OR_BIND if version > 3 and not network else 0
    about = struct.pack("QQ", rights, closed)[: 16 if version > 3 else 8]
    rules = _call("syscall", 444, about, len(about), 0)
    for folder, allowed in ((base, rights), ("/dev/shm", rights), ("/dev", WRITE_FILE)):
        with suppress(FileNotFoundError):
            opened = os.open(folder, os.O_PATH)
            _call("syscall", 445, rules, 1, struct.pack("=Qi", allowed, opened), 0)
            os.close(opened)
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("syscall", 446, rules, 0)
    os.close(rules)
    watch(base, network, programs=True)


def _watched(base: str, folders: list[str], network: bool) -> None:
    _copied(base, folders)
    watch(base, network, programs=False)


def _copied(base: str, folders: list[str]) -> None:
    """Copies of the folders, with links to large files, and a home with links to the user's."""
    here, home = os.getcwd(), os.path.expanduser("~")
    for folder in folders:
        _fill(folder, base, SMALL)
    _fill(os.path.join(home, ".cache", "huggingface"), base, -1)
    for near in (os.path.join(home, ".cache"), home):
        _fill(near, base, -1, 0)
    os.environ.update(HOME=base + home, TMPDIR=os.path.join(base, "tmp"))
    os.makedirs(os.environ["TMPDIR"], exist_ok=True)
    os.chdir(base + here if os.path.isdir(base + here) else base)


def _fill(folder: str, base: str, small: int, entries: int = ENTRIES) -> None:
    """Make `base + folder`: of its first `entries` folders and files, level by level, the small
    ones are copies; all others are links."""
    queue = [folder] if os.path.isdir(folder) else []
    while queue:
        here = queue.pop(0)
        os.makedirs(base + here, exist_ok=True)
        with suppress(PermissionError):
            for entry in os.scandir(here):
                new, entries = base + entry.path, entries - 1
                environment = os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
                if os.path.lexists(new):
                    continue
                if entry.is_dir(follow_symlinks=False) and entries >= 0 and not environment:
                    queue.append(entry.path)
                elif entries >= 0 and entry.is_file() and entry.stat().st_size <= small:
                    shutil.copy2(entry.path, new)
                elif not base.startswith(entry.path + os.sep):
                    os.symlink(entry.path, new)


# ------------------------------------------------------------------------- what Python is told of

# Events of Python's audit hook: (the arguments that name what changes, the first folder that such a
# name may be relative to), and whether a link's target changes instead of the link.
CHANGES = {
    "os.remove": ((0,), 1, False), "os.rmdir": ((0,), 1, False), "os.mkdir": ((0,), 2, False),
    "os.rename": ((0, 1), 2, False), "os.link": ((1,), 3, False), "os.symlink": ((1,), 2, False),
    "os.chmod": ((0,), 2, True), "os.chown": ((0,), 3, True), "os.utime": ((0,), 3, True),
    "os.truncate": ((0,), 9, True), "os.setxattr": ((0,), 9, True),
    "os.removexattr": ((0,), 9, True), "sqlite3.connect": ((0,), 9, True),
}  # fmt: skip
PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
CALLS = ("socket.connect", "socket.sendto", "socket.getaddrinfo")


def watch(base: str, network: bool, programs: bool) -> None:
    """Refuse, in Python, to change what lies outside of `base`, and to call other machines."""
    allowed = tuple(os.path.realpath(p) + os.sep for p in (base, "/dev", "/proc/self"))

    def refuse(event: str, given: tuple) -> None:
        if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            check(given[0], -1, True)
        elif event in CHANGES:
            names, folder, follows = CHANGES[event]
            for k, name in enumerate(names):
                check(given[name], *given[folder + k : folder + k + 1] or (-1,), follows)
        elif event in PROGRAMS and not programs:
            raise PermissionError(errno.EPERM, "no programs are started here", str(given[0]))
        elif event in CALLS and not network:
            if getattr(given[0], "family", None) != socket.AF_UNIX:
                raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    def check(path, folder: int, follows: bool) -> None:
        if isinstance(path, int) or path in (":memory:", b":memory:", ""):
            return
        near = "" if folder < 0 else os.readlink(f"/proc/self/fd/{folder}")
        path = os.path.abspath(os.path.join(near, os.fsdecode(path)))
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if not (os.path.realpath(path) if follows else real).startswith(allowed):
            raise PermissionError(errno.EACCES, "outside of the script's folder", path)

    sys.addaudithook(refuse)
