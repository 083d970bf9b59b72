"""Python's audit hook, which refuses to change files elsewhere, to start programs and to call."""

import errno
import functools
import os
import re
import shlex
import socket
import sqlite3
import sys
from urllib.parse import unquote

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of the hook: the arguments that name what changes; the first of the folders that such names
# may be relative to; whether a link's target changes instead of the link.
CHANGES = {
    "os.remove": ((0,), 1, False), "os.rmdir": ((0,), 1, False), "os.mkdir": ((0,), 2, False),
    "os.rename": ((0, 1), 2, False), "os.link": ((0, 1), 2, False), "os.symlink": ((1,), 2, False),
    "os.chmod": ((0,), 2, True), "os.chown": ((0,), 3, True), "os.utime": ((0,), 3, True),
    "os.truncate": ((0,), 9, True), "os.setxattr": ((0,), 9, True), "os.chflags": ((0,), 9, True),
    "os.removexattr": ((0,), 9, True), "sqlite3.connect": ((0,), 9, True),
}  # fmt: skip
NO_PROGRAMS = "no programs are started here"
ATTACH = 24  # sqlite3.h: SQLITE_ATTACH, of which the hook hears nothing
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
RUNNERS = ("uv", "poetry", "pdm", "pipenv", "hatch", "rye", "pixi", "conda", "mamba", "micromamba")
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
BEFORE = ("env", "exec", "time", "nohup", "command", "then", "do", "else", "{", "!")
ASSIGNS = re.compile(r"[A-Za-z_]\w*=")
REDIRECTS = re.compile(r"\d*[<>]")
PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
CALLS = ("connect", "sendto", "sendmsg", "getaddrinfo", "gethostbyname", "gethostbyaddr")
CALLS = tuple(f"socket.{name}" for name in CALLS)


def watch(base: str, network: bool) -> None:
    """Refuse, in Python, to change what lies outside of `base`, to start programs, and unless the
    `network` is open to call other machines."""
    guard = _Guard(base)
    asked = {"open": guard.opened, **dict.fromkeys(CHANGES, guard.changed)}
    asked |= dict.fromkeys(PROGRAMS, _started)
    if not network:
        asked |= dict.fromkeys(CALLS, _called)

    def heard(event: str, given: tuple) -> None:
        if event in asked:
            asked[event](event, given)

    for module in (sqlite3, sqlite3.dbapi2):
        module.connect = functools.partial(guard.connected, module.connect)
    for name in ("mkfifo", "mknod"):
        setattr(os, name, functools.partial(guard.made, getattr(os, name)))
    os.open = functools.partial(_opened, os.open)
    sys.addaudithook(heard)


class _Guard:
    """Lets files be changed in some folders alone: PermissionError for any other."""

    def __init__(self, base: str):
        folders = (base, "/dev", "/proc/self")
        self.allowed = tuple(os.path.realpath(folder) + os.sep for folder in folders)

    def check(self, path, folder: int, follows: bool) -> None:
        """Whether `path`, or an open file's number, may be changed. It may be relative to an open
        `folder`, -1 for none; `follows` says whether a link's target changes."""
        path = _named(path) if isinstance(path, int) else os.fsdecode(path)
        if path.startswith("file:"):  # sqlite's
            path = unquote(path[5:].split("?")[0])
        if path in (":memory:", ""):
            return
        path = os.path.abspath(os.path.join("" if folder < 0 else _named(folder), path))
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if not (os.path.realpath(path) if follows else real).startswith(self.allowed):
            raise PermissionError(errno.EACCES, "outside of the script's folder", path)

    def opened(self, event: str, given: tuple) -> None:
        """A file is opened, here by its name, perhaps to write."""
        path, _, flags = given
        if isinstance(flags, int) and flags & WRITES and not isinstance(path, int):
            self.check(path, -1, True)

    def changed(self, event: str, given: tuple) -> None:
        """One of the `CHANGES`."""
        names, first, follows = CHANGES[event]
        for k, name in enumerate(names):
            folder = given[first + k] if first + k < len(given) else -1
            self.check(given[name], folder, follows)

    def made(self, make, path, *rest, dir_fd=None):
        """os.mkfifo and os.mknod, of which the hook hears nothing."""
        self.check(path, -1 if dir_fd is None else dir_fd, False)
        return make(path, *rest, dir_fd=dir_fd)

    def connected(self, connect, *given, **named):
        """sqlite3.connect; the connection asks before it attaches another database."""
        connection = connect(*given, **named)
        connection.set_authorizer(self.attached)
        return connection

    def attached(self, action: int, path: str | None, *_) -> int:
        """What is raised here, sqlite denies; it tells no path of a parameter."""
        if action == ATTACH:
            self.check("/?" if path is None else path, -1, True)
        return 0


def _started(event: str, given: tuple) -> None:
    raise PermissionError(errno.EPERM, NO_PROGRAMS, str(given[0]))


def _called(event: str, given: tuple) -> None:
    """A machine is called, unless it is this one by a socket that is a file."""
    if getattr(given[0], "family", None) != getattr(socket, "AF_UNIX", 0):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))


def trained(command) -> list[str]:
    """The words of what trains in a command, which is a text for a shell or a list; or none."""
    if isinstance(command, str | bytes):
        return next(filter(None, map(trained, _split(os.fsdecode(command)))), [])
    words = [os.fsdecode(word) for word in command]
    while words and (words[0] in BEFORE or ASSIGNS.match(words[0])):
        words = words[1:]
    if words and os.path.basename(words[0]) in SHELLS:
        flags = (k for k, word in enumerate(words) if word.startswith("-") and word.endswith("c"))
        text = words[next(flags, len(words)) + 1 :]
        return trained(text[0]) if text else []
    ends = (k for k, word in enumerate(words) if REDIRECTS.match(word))
    return words[: next(ends, len(words))] if _run_by(words) or trains(words) else []


def _run_by(words: list[str]) -> bool:
    """Whether a runner, as in `uv run --with torch train.py`, is given what trains. Its options may
    have a word each."""
    if not words or os.path.basename(words[0]) not in RUNNERS or "run" not in words[1:]:
        return False
    given = words[words.index("run", 1) + 1 :]
    first = next((k for k, word in enumerate(given) if not word.startswith("-")), len(given))
    found = (given[k:] for k in range(first, first + (2 if first else 1)) if given[k:])
    return any(rest[0].endswith(".py") or trained(rest) for rest in found)


def _split(text: str) -> list[list[str]]:
    """The commands in a text for a shell."""
    text = text.replace("\\\n", " ")
    parts = shlex.shlex(text, posix=True, punctuation_chars=";&|()\n")
    parts.whitespace, parts.whitespace_split, parts.commenters = " \t\r", True, ""
    commands = [[]]
    try:
        for word in parts:
            if set(word) <= set(";&|()\n"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:  # a quotation that does not end
        return [text.split()]
    return commands


def trains(words: list[str]) -> bool:
    """Whether a command starts a script of Python's, or a launcher of several."""
    name = os.path.basename(words[0]) if words else ""
    if name.startswith("python"):
        given = [word for word in words[1:] if not word.startswith("-")] or [""]
        launched = given[0].split(".")[0] in (*LAUNCHERS, "torch") and "-m" in words
        return launched or given[0].endswith(".py") and "-c" not in words
    return name in LAUNCHERS


def _opened(open, path, flags, mode=0o777, *, dir_fd=None):
    """os.open by a full name: the hook does not hear of `dir_fd`."""
    return open(path if dir_fd is None else os.path.join(_named(dir_fd), path), flags, mode)


def _named(number: int) -> str:
    """The name of an open file or folder."""
    if sys.platform == "linux":
        return os.readlink(f"/proc/self/fd/{number}")
    import fcntl

    return os.fsdecode(fcntl.fcntl(number, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
