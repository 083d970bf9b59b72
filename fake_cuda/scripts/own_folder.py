"""The folder of a run, which is held by a lock as long as its keeper lives.

A lock ends with its process, whatever ends that. So what nobody holds was left by a caller and a
keeper that were both killed, also where process numbers tell nothing: in another container.
"""

import fcntl
import os
import re
import secrets
import shutil
from contextlib import suppress

NAME = re.compile(r"fake_cuda_held_[0-9a-f]{16}")


def name() -> str:
    """Of a new one."""
    return f"fake_cuda_held_{secrets.token_hex(8)}"


def make(path: str) -> int:
    """Make it: what holds it, a number of an open file. On some network's file systems nothing
    does, and there nothing is removed either."""
    while True:
        os.mkdir(path, 0o700)
        with suppress(FileNotFoundError):  # another run found it before it was held
            held = os.open(path, os.O_RDONLY)
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX)
            if os.path.lexists(path):
                return held
            os.close(held)


def sweep(folder: str) -> None:
    """Remove what runs of this user have left in `folder`."""
    for entry in os.scandir(folder):
        if not NAME.fullmatch(entry.name):
            continue
        with suppress(OSError):  # held, no folder, or gone meanwhile
            held = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(held).st_uid == os.getuid():
                    shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(held)
