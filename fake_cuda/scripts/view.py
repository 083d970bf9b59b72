"""Where a script runs: a view of the files in which nothing of the user's changes.

`enter` takes the best of three ways that the system allows, for the process that calls it and all
that it starts:

"overlay"  Linux with namespaces. Every folder is copy-on-write, for libraries and programs alike;
           what is written lies in memory, can be read back, and is gone with the process.
"copy"     Linux with Landlock. The script's folders are copied, its home is a folder of links, and
           the kernel refuses to write anywhere else. Changes of modes, owners and times seem to
           succeed and do nothing, in the copies too. Shared memory (/dev/shm) is the machine's own.
"watched"  elsewhere. The same copies; Python refuses to write anywhere else and to start programs.
           What a compiled library writes to an absolute path is not held back: `WATCHED` says so.

The network is closed unless asked for. This guards against what scripts do, not against attackers.
"""

import functools
import os
import shutil
import sys
import tempfile
from contextlib import suppress

from .closed import close, landlock
from .overlay import overlay, renamed
from .watch import watch

WATCHED = (
    "This system keeps no private view of its files: writing elsewhere than in a copy of the "
    "script's folder is refused in Python, but not what a compiled library writes by itself."
)
# What is copied: files up to so many bytes, of a folder so many entries and bytes; else links
SMALL, ENTRIES, ROOM = 2**20, 1000, 2**28
TINY = 4096  # in caches: locks, references and settings
CACHES = (".cache/huggingface", ".cache", ".config", ".local", "")  # folders of the home
NAMED = ("HF_", "XDG_", "TORCH", "TRITON_", "MPL", "WANDB_")  # variables that name such folders
COMPILED = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}  # with what can be compiled again: empty

entered = ""  # the way that this process took


def enter(base: str, folders: list[str], network: bool, ways: tuple[str, ...]) -> str:
    """Enter the best view of `ways`: its name. `base` is an empty folder, removed by the caller;
    `folders` are those in which the script will work. The process must have one thread."""
    refused, here = [], os.getcwd()
    for way in ways:
        try:
            {"overlay": overlay, "copy": _copy, "watched": _watched}[way](base, folders, network)
            break
        except (OSError, AttributeError) as error:  # the second: no Linux
            refused.append(f"{way}: {error}")
            os.chdir(here)
    else:
        raise OSError("no private view of the files can be had: " + "; ".join(refused))
    global entered
    entered = way
    for name in ("rename", "replace"):
        setattr(os, name, functools.partial(renamed, getattr(os, name)))
    return way


def place(path: str, base: str, way: str) -> str:
    """Where a path of the user's is found in the view: itself, unless it was copied or is new."""
    path = os.path.abspath(path)
    if way == "overlay" or os.path.lexists(path) and not os.path.lexists(base + path):
        return path
    os.makedirs(os.path.dirname(base + path), exist_ok=True)
    return base + path


def _copy(base: str, folders: list[str], network: bool) -> None:
    version = landlock()
    _copied(base, folders)
    close(base, version, network)


def _watched(base: str, folders: list[str], network: bool) -> None:
    _copied(base, folders)
    watch(base, network)


def _copied(base: str, folders: list[str]) -> None:
    """Copies of the folders, with links to large files, and a home with links to the user's."""
    here, home = os.getcwd(), os.path.expanduser("~")
    named = {n: f for n, f in os.environ.items() if n.startswith(NAMED) and os.path.isdir(f)}
    for folder in folders:
        _fill(folder, base, SMALL, 10 * ENTRIES)
    read = (folder for name, folder in named.items() if name not in COMPILED)
    for cache in (*read, *(os.path.join(home, name) for name in CACHES)):
        _fill(os.path.abspath(cache), base, TINY, ENTRIES)
    temporary = os.path.join(base, "tmp")
    os.makedirs(temporary, exist_ok=True)
    os.makedirs(base + home, exist_ok=True)
    moved = (os.path.join(home, ".cache"), *map(os.path.abspath, named.values()))
    os.environ.update({name: base + os.path.abspath(folder) for name, folder in named.items()})
    for name in COMPILED & named.keys():
        os.makedirs(os.environ[name], exist_ok=True)
    os.environ.update(HOME=base + home, TMPDIR=temporary)
    tempfile.tempdir = temporary
    for module in list(sys.modules.values()):  # what they remember since they were imported
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is str and value.startswith(moved):
                setattr(module, name, base + value)
    os.chdir(base + here if os.path.isdir(base + here) else base)


def _fill(folder: str, base: str, small: int, entries: int) -> None:
    """Make `base + folder`, level by level: small files are copies, the others are links, and so
    is what else is mounted, an environment of Python, and what is too much to copy."""
    queue, room = [folder] if os.path.isdir(folder) else [], ROOM
    while queue:
        here = queue.pop(0)
        if entries < 0:
            os.symlink(here, base + here)
            continue
        os.makedirs(base + here, exist_ok=True)
        with suppress(PermissionError):
            for entry in os.scandir(here):
                new, entries = base + entry.path, entries - 1
                if os.path.lexists(new) or _within(base, entry.path):
                    continue
                if entry.is_dir(follow_symlinks=False) and _plain(entry.path):
                    queue.append(entry.path)
                    continue
                size = entry.stat().st_size if entry.is_file() else room
                if entries >= 0 and size <= min(small, room) and os.access(entry.path, os.R_OK):
                    shutil.copy2(entry.path, new)
                    room -= size
                else:
                    os.symlink(entry.path, new)


def _within(path: str, folder: str) -> bool:
    return (path + "/").startswith(folder.rstrip("/") + "/")


def _plain(folder: str) -> bool:
    return not os.path.ismount(folder) and not os.path.exists(os.path.join(folder, "pyvenv.cfg"))
