"""What a script would write, rename or remove lands in a temporary folder.

Only what goes through Python is caught; programs that a script starts write where they please.
"""

import builtins
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

READS = "stat lstat statvfs access chdir".split()
CHANGES = "unlink remove rmdir chmod utime truncate chown".split()
MOVES = "rename replace link".split()
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def sandbox() -> Iterator[None]:
    """In this block reading finds what was written in it, else the user's files, which stay."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root, ExitStack() as stack:
        root, really_open = os.path.realpath(root), io.open
        os.mkdir(os.path.join(root, "files"))
        stack.callback(os.chdir, os.getcwd())
        ours = (root + os.sep, os.devnull, "/proc/", "/dev/")

        def place(path) -> str:
            """Where the writes to a path land."""
            path = os.path.abspath(os.fsdecode(path))
            inside = Path(root, "files", path.replace(":", "").lstrip("/\\"))
            return path if path.startswith(ours) else str(inside)

        def found(path="."):
            """The path to read."""
            with suppress(OSError, TypeError):  # not there, or the number of an open file
                real["lstat"](place(path))
                return place(path)
            return path

        def fresh(path, keep: bool) -> str:
            """The path to write, with the user's content if that is to be changed."""
            mine = place(path)
            if os.path.isdir(os.path.dirname(os.path.abspath(path))):
                os.makedirs(os.path.dirname(mine), exist_ok=True)
            if keep and found(path) != mine and os.path.isfile(path):
                with really_open(path, "rb") as old, really_open(mine, "wb") as new:
                    shutil.copyfileobj(old, new)
            return mine

        def opened(file, mode="r", *args, **options):
            if not isinstance(file, int) and set(mode) & set("wax+"):
                file = fresh(file, "w" not in mode)
            return really_open(found(file), mode, *args, **options)

        def numbered(path, flags, *args, dir_fd=None, **options):
            if flags & WRITES and dir_fd is None:
                path = fresh(path, not flags & os.O_TRUNC)
            return real["open"](found(path), flags, *args, dir_fd=dir_fd, **options)

        def mkdir(path, *args, dir_fd=None):
            if os.path.lexists(path):
                raise FileExistsError(17, "File exists", os.fspath(path))
            real["mkdir"](fresh(path, False), *args)

        def listdir(path="."):
            names = set(real["listdir"](found(path)))
            with suppress(OSError):  # what was there before
                names |= set(real["listdir"](path))
            return sorted(names)

        def scandir(path="."):  # of the user's folders: what was there before
            with suppress(OSError):
                return real["scandir"](path)
            return real["scandir"](found(path))

        def written(name, path=None, _=None):
            """A module of those that Evaluate and Transformers write and import."""
            return PathFinder.find_spec(name, [place(folder) for folder in path or sys.path])

        def read(name, path=".", *args, **options):
            return real[name](found(path), *args, **options)

        def change(name, path, *args, dir_fd=None, **options):
            """What the user has seems to change only."""
            if dir_fd is None and not isinstance(path, int) and found(path) == place(path):
                return real[name](place(path), *args, **options)

        def move(name, old, new, *args, **options):
            return real[name](fresh(old, True), fresh(new, False), *args, **options)

        put = dict(mkdir=mkdir, open=numbered, listdir=listdir, scandir=scandir)
        for way, names in ((read, READS), (change, CHANGES), (move, MOVES)):
            put |= {name: partial(way, name) for name in names if hasattr(os, name)}
        real = {name: getattr(os, name) for name in put}
        finders = [*sys.meta_path, SimpleNamespace(find_spec=written)]
        replaced = [(os, name, value) for name, value in put.items()]
        replaced += [(builtins, "open", opened), (io, "open", opened)]
        replaced += [(shutil, "rmtree", lambda *_, **__: None)]
        replaced += [(tempfile, "tempdir", tempfile.mkdtemp(dir=root))]
        replaced += [(sys, "dont_write_bytecode", True), (sys, "meta_path", finders)]
        with suppress(ImportError):
            import pyarrow  # with which Datasets opens its files

            maps = pyarrow.memory_map
            replaced += [(pyarrow, "memory_map", lambda path, *a: maps(found(path), *a))]
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield
