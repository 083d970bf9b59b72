"""What a script would write, rename or remove lands in a temporary folder.

Only what goes through Python is caught; programs that a script starts write where they please.
"""

import builtins
import importlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

READS = "stat lstat statvfs access scandir chdir".split()
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
really_open = io.open


@contextmanager
def sandbox() -> Iterator[None]:
    """In this block reading finds what was written in it, else the user's files, which stay."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root, ExitStack() as stack:
        root = os.path.realpath(root)
        here = os.getcwd()

        def place(path) -> str:
            """Where the writes to a path land."""
            path = os.path.abspath(os.fsdecode(path))
            through = path.startswith((root + os.sep, os.devnull, "/proc/", "/dev/"))
            return (
                path
                if through
                else os.path.join(root, "files", path.replace(":", "").lstrip("/\\"))
            )

        def exists(mine: str) -> bool:
            with suppress(OSError):
                return bool(real["lstat"](mine))
            return False

        def found(path):
            """The path to read."""
            mine = path if isinstance(path, int) else place(path)
            return mine if isinstance(path, int) or exists(mine) else path

        def fresh(path, copy: bool = False) -> str:
            """The path to write, with the user's content if that is to be changed."""
            mine = place(path)
            missing = [folder for folder in Path(mine).parents if not exists(str(folder))]
            for folder in reversed(missing):
                real["mkdir"](folder)
            if copy and not exists(mine) and os.path.isfile(path):
                with really_open(path, "rb") as old, really_open(mine, "wb") as new:
                    shutil.copyfileobj(old, new)
            return mine

        def opened(file, mode="r", *args, **options):
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return really_open(found(file), mode, *args, **options)
            if "x" in mode and os.path.lexists(file):
                raise FileExistsError(file)
            return really_open(fresh(file, "w" not in mode), mode, *args, **options)

        def numbered(path, flags, *args, dir_fd=None, **options):
            if flags & WRITES and dir_fd is None:
                return real["open"](fresh(path, not flags & os.O_TRUNC), flags, *args, **options)
            return real["open"](found(path), flags, *args, dir_fd=dir_fd, **options)

        def mkdir(path, *args, dir_fd=None):
            if os.path.lexists(path):
                raise FileExistsError(17, "File exists", os.fspath(path))
            if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            real["mkdir"](fresh(path), *args)

        def listdir(path="."):
            mine = found(path)
            names = set(real["listdir"](mine))
            with suppress(OSError):  # what was there before
                names |= set() if mine == path else set(real["listdir"](path))
            return sorted(names)

        def changed(name):
            """Removes or changes what was written here; what the user has only seems to."""

            def change(path, *args, dir_fd=None, **options):
                if dir_fd is None and not isinstance(path, int) and exists(place(path)):
                    return real[name](place(path), *args, **options)

            return change

        def moved(name):
            def move(old, new, *args, **options):
                source = place(old) if exists(place(old)) else fresh(old, copy=True)
                return real[name](source, fresh(new))

            return move

        def reading(name):
            return lambda path=".", *args, **options: real[name](found(path), *args, **options)

        replaced = {name: reading(name) for name in READS if hasattr(os, name)}
        names = "unlink remove rmdir chmod utime truncate chown".split()
        replaced |= {name: changed(name) for name in names if hasattr(os, name)}
        replaced |= {name: moved(name) for name in ("rename", "replace", "link")}
        replaced |= dict(mkdir=mkdir, listdir=listdir, open=numbered)
        real = {name: getattr(os, name) for name in replaced}
        os.mkdir(os.path.join(root, "tmp"))
        for name, value in replaced.items():
            stack.enter_context(patch.object(os, name, value))
        stack.enter_context(patch.object(builtins, "open", opened))
        stack.enter_context(patch.object(io, "open", opened))
        stack.enter_context(patch.object(shutil, "rmtree", lambda *_, **__: None))
        stack.enter_context(patch.object(tempfile, "tempdir", os.path.join(root, "tmp")))
        stack.enter_context(patch.object(sys, "dont_write_bytecode", True))
        with suppress(ImportError):  # Datasets' files, which it opens by itself
            arrow = importlib.import_module("pyarrow")
            maps = arrow.memory_map
            stack.enter_context(
                patch.object(arrow, "memory_map", lambda path, *a: maps(found(path), *a))
            )
        try:
            yield
        finally:
            stack.close()
            os.chdir(here)
