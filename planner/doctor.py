"""Whether this installation can predict, and what a bug report needs: `onegpu doctor`."""

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement

from fake_cuda.files import data_file, example_file, is_installed, own_file

from .terminal import PROJECT, version

VARIABLES = "CUDA_VISIBLE_DEVICES HF_HUB_OFFLINE OMP_NUM_THREADS PYTORCH_ALLOC_CONF".split()
ROOM = 2 * 2**30  # bytes for caches and executed copies
READ = ("gpus.csv", "real_cards.csv", "configs/llama-3.2-1b.json", "atlas/llama-3.2-1b.json.gz")
EXAMPLES = ("recipe.jinja", "rank.jinja")


def libraries() -> list[str]:
    """One line a library that is needed: what is here, and what is needed where that is another."""
    try:
        needed = map(Requirement, importlib.metadata.requires(PROJECT) or ())
    except importlib.metadata.PackageNotFoundError:
        return []
    return [_library(wanted) for wanted in needed if wanted.marker is None]  # no extras


def _library(wanted: Requirement) -> str:
    try:
        here = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted.name} is missing (needed: {wanted.specifier})"
    good = wanted.specifier.contains(here, prereleases=True)
    return f"{wanted.name} {here}" + ("" if good else f" (needed: {wanted.specifier})")


def data() -> str:
    """Whether the tables, model descriptions and templates are there that an answer reads."""
    wanted = [data_file(*name.split("/")) for name in READ] + [example_file(n) for n in EXAMPLES]
    for path in wanted:
        if not path.is_file():
            where = f"{path.parent.name}/{path.name}"
            raise FileNotFoundError(f"{where} is missing beside data/gpus.csv: install it again")
    where = "the installed package" if is_installed() else "a clone"
    return f"tables, {len([*data_file('configs').iterdir()])} models and templates are in {where}"


def caches() -> str:
    """Whether what is predicted can be kept for the next time."""
    folder = own_file()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"the folder of caches cannot be written ({error.strerror})") from error
    return "the folder of caches can be written"


def room(where: Path | None = None) -> str:
    """Whether caches have room."""
    there = where or own_file()
    there = next(folder for folder in (there, *there.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < ROOM:
        raise ValueError(f"{free / 2**30:.1f} GiB are free on this disk: the course wants 2")
    return f"{free / 2**30:,.0f} GiB free on this disk"


def prediction() -> str:
    """Whether a prediction works, which leans on private names of torch."""
    from helpers import gib, predict, text_classification

    found = predict(text_classification("large"), gpu="T4", per_device_train_batch_size=4)
    return f"BERT-large on a T4: {gib(found.peak_allocated)} predicted in {found.took:.0f} s"


CHECKS = (data, caches, room, prediction)


def check(question: Callable[[], str]) -> tuple[bool, str]:
    """Whether a question was answered, and its answer or why not, in one line."""
    try:
        return True, question()
    except Exception as error:  # whatever it is, the report goes on
        return False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def machine() -> str:
    """This machine in a line."""
    import helpers

    return str(helpers.describe())


def report(
    title: str, libraries: Iterable[str], checks: Iterable[Callable[[], str]]
) -> tuple[str, bool]:
    """What a bug report needs, and whether all checks are good.

    Args:
        title: what is installed, and which version of it.
        libraries: a line each.
        checks: questions that answer in a line, or raise an error.
    """
    lines = [title, f"Python {platform.python_version()} on {platform.platform()}", *libraries]
    lines += [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    results = [check(question) for question in (machine, *checks)]
    lines += [f"{'ok    ' if good else 'FAILED'} {text}" for good, text in results]
    return "\n".join(lines), all(good for good, _ in results)


def examined() -> tuple[str, bool]:
    """The report of this installation."""
    return report(f"{PROJECT} {version()}", libraries(), CHECKS)
