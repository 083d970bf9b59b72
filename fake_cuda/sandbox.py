"""What a script would write, rename or remove lands in a temporary folder.

Only what goes through Python is caught; programs that a script starts write where they please.
"""

import builtins
import io
import os
import shutil
import sqlite3
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
REMOVES = ("unlink", "remove", "rmdir")
CHANGES = [*REMOVES, *"chmod utime truncate chown".split()]
MOVES = "rename replace link".split()
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Entries:
    """What os.scandir gives."""

    def __init__(self, entries):
        self.entries = iter(entries)

    __iter__ = __enter__ = lambda self: self
    __next__ = lambda self: next(self.entries)  # noqa: E731
    __exit__ = close = lambda *_: None  # noqa: E731


@contextmanager
def sandbox() -> Iterator[None]:
    """In this block reading finds what was written in it, else the user's files, which stay."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root, ExitStack() as stack:
        root, really_open, gone = os.path.realpath(root), io.open, set()
        os.mkdir(os.path.join(root, "files"))
        stack.callback(os.chdir, os.getcwd())
        ours = (root + os.sep, os.devnull, "/proc/", "/dev/")

        def place(path) -> str:
            """Where the writes to a path land."""
            path = os.path.abspath(os.fsdecode(path))
            inside = Path(root, "files", path.replace(":", "").lstrip("/\\"))
            return path if path.startswith(ours) else str(inside)

        def hidden(path) -> bool:
            """Whether the script has removed it, or a folder around it."""
            path = Path(os.path.abspath(os.fsdecode(path)))
            return not gone.isdisjoint(map(str, (path, *path.parents)))

        def found(path="."):
            """The path to read."""
            if isinstance(path, int):  # of an open file
                return path
            with suppress(OSError):  # not there
                real["lstat"](place(path))
                return place(path)
            return os.path.join(root, "gone") if hidden(path) else path

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
            return sorted(entry.name for entry in scandir(path))

        def scandir(path="."):
            """What was there before, and what was written."""
            if isinstance(path, int):
                return real["scandir"](path)
            entries = {entry.name: entry for entry in real["scandir"](found(path))}
            with suppress(OSError):
                old = (entry for entry in real["scandir"](path) if not hidden(entry.path))
                entries = {entry.name: entry for entry in old} | entries
            return Entries(entries.values())

        def elsewhere(function, writes: bool):
            """The function, with the name of a file among its first two arguments moved."""

            def moved(*args, **options):
                names = [isinstance(a, str | os.PathLike) and a != ":memory:" for a in args[:2]]
                if any(names):
                    at, args = names.index(True), list(args)
                    args[at] = fresh(args[at], True) if writes else found(args[at])
                return function(*args, **options)

            return moved

        def written(name, path=None, _=None):
            """A module of those that Evaluate and Transformers write and import."""
            return PathFinder.find_spec(name, [place(folder) for folder in path or sys.path])

        def read(name, path=".", *args, **options):
            return real[name](found(path), *args, **options)

        def change(name, path, *args, dir_fd=None, **options):
            """What the user has seems to change only."""
            if dir_fd is not None or isinstance(path, int):
                return
            old, mine = found(path), place(path)
            real["lstat"](old)  # or it is not there
            if name in REMOVES:
                gone.add(os.path.abspath(os.fsdecode(path)))
            if old == mine:
                real[name](mine, *args, **options)

        def rmtree(path, *_, **__):
            with suppress(OSError):  # nothing of it was written
                real["rename"](place(path), os.path.join(tempfile.mkdtemp(dir=root), "old"))
            gone.add(os.path.abspath(path))

        def symlink(old, new, *args, **options):
            old = os.path.join(os.path.dirname(os.path.abspath(new)), old)
            real["symlink"](found(old), fresh(new, False), *args, **options)

        def move(name, old, new, *args, **options):
            real[name](fresh(old, True), fresh(new, False), *args, **options)
            gone.update([os.path.abspath(old)] if name != "link" else [])

        put = dict(mkdir=mkdir, open=numbered, listdir=listdir, scandir=scandir, symlink=symlink)
        for way, names in ((read, READS), (change, CHANGES), (move, MOVES)):
            put |= {name: partial(way, name) for name in names if hasattr(os, name)}
        real = {name: getattr(os, name) for name in put}
        finders = [*sys.meta_path, SimpleNamespace(find_spec=written)]
        replaced = [(os, name, value) for name, value in put.items()]
        replaced += [(builtins, "open", opened), (io, "open", opened)]
        replaced += [(shutil, "rmtree", rmtree)]
        replaced += [(tempfile, "tempdir", tempfile.mkdtemp(dir=root))]
        replaced += [(sys, "dont_write_bytecode", True), (sys, "meta_path", finders)]
        # What is not written in Python opens files by itself.
        changed = [(sqlite3, "connect", True), (sqlite3.dbapi2, "connect", True)]
        with suppress(ImportError):
            import pyarrow
            import pyarrow.parquet as parquet  # with which Datasets and pandas open theirs
            import tokenizers

            changed += [(pyarrow, "memory_map", False), (pyarrow, "OSFile", True)]
            changed += [(parquet.ParquetWriter, "__init__", True)]
            changed += [(parquet.ParquetFile, "__init__", False)]
            changed += [(parquet.ParquetDataset, "__init__", False)]
            changed += [(tokenizers.Tokenizer, "save", True)]
        for owner, name, writes in changed:
            replaced += [(owner, name, elsewhere(getattr(owner, name), writes))]
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield
