"""Where files of the course are, in a clone of it or in a wheel, and where own ones are kept."""

import os
import sys
import tempfile
from pathlib import Path

WHEEL = "one_gpu_measured"  # the folder beside this package in which a wheel has data and examples
CACHE = "one-gpu-measured"  # in the user's folder of caches


def home() -> Path:
    """The folder that holds `data/`: a clone around the working folder, this one, or the wheel's.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = _wheel()
    folders = [Path.cwd(), *Path.cwd().parents, beside.parent, beside]
    found = next((f for f in folders if (f / "data" / "gpus.csv").is_file()), None)
    if found is None:
        raise FileNotFoundError(
            "data/gpus.csv was not found in this folder or any above it, nor in the installed "
            "package: start from inside a clone of the course repository, or install it again."
        )
    return found


def _wheel() -> Path:
    """The folder of a wheel's files, whether there is one or not."""
    return Path(__file__).resolve().parents[1] / WHEEL


def data_file(*parts: str) -> Path:
    """A path below the course's `data/` folder, found by looking upward from the working folder."""
    return home().joinpath("data", *parts)


def example_file(*parts: str) -> Path:
    """A path below `examples/`, which stands beside `data/`."""
    return home().joinpath("examples", *parts)


def is_installed() -> bool:
    """Whether the files are a wheel's, which nobody writes into."""
    return home() == _wheel()


def own_file(*parts: str, folder: str = "build") -> Path:
    """Where something that is made on this machine is kept.

    Args:
        parts: its path below that folder.
        folder: of a clone; a wheel's user has one folder of caches for all of them.
    """
    return (user_cache() if is_installed() else home() / folder).joinpath(*parts)


def user_cache() -> Path:
    """This course's folder among the user's caches, by the custom of the system; it may be deleted.

    XDG_CACHE_HOME or ~/.cache on Linux, ~/Library/Caches on macOS, LOCALAPPDATA on Windows. A user
    without a home, as in some containers, has the folder of temporary files.
    """
    variable, usual = {
        "win32": ("LOCALAPPDATA", "AppData/Local"),
        "darwin": ("", "Library/Caches"),
    }.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    told = Path(os.environ.get(variable, ""))
    if told.is_absolute():  # the custom wants another to be ignored
        return told / CACHE
    try:
        return Path.home() / usual / CACHE
    except RuntimeError:
        return Path(tempfile.gettempdir()) / CACHE
