"""The runs that can be predicted: which modules have them, and how one is found by its name.

A module of `evidence/sources` has PEAKS, runs whose bytes somebody measured, STEPS, runs that
somebody timed, or both: of each set a function that yields (run, function that predicts it). A
module of `evidence/lessons` has SETS, functions that yield (run, variant, function that predicts
it); the function's name is the set's.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from evidence.code import code_hash
from evidence.libraries.rows import as_it_ran
from evidence.tables import ROOT

VERSIONS = "evidence.libraries.rows"  # behaviours of older libraries, by the versions of a row


class Job(NamedTuple):
    """One prediction. A `run` of a source in both PEAKS and STEPS is one job, which tells both."""

    kind: str  # source, lesson, fit, atlas or full
    module: str
    set: str
    run: str
    variant: str = ""  # of a lesson's run; of a recipe the family of cards
    nth: int = 0  # of the lesson's runs of that name: one for each card
    bytes_too: bool = False  # of a source's run: it stands in PEAKS
    seconds_too: bool = False  # it stands in STEPS

    @property
    def key(self) -> tuple[str, str, str]:
        return self.set, self.run, self.variant

    @property
    def code(self) -> str:
        return hash_of(self.module)


def hash_of(module: str, without: tuple[str, ...] = ()) -> str:
    """The hash of the code behind a module's runs; of the sets it names as SOURCES, too.

    Args:
        module: one of evidence.
        without: modules that do not count.
    """
    others = [of_steps()[name] for name in getattr(importlib.import_module(module), "SOURCES", ())]
    of_a_source = others or module.startswith("evidence.sources.")
    return code_hash(module, *others, *([VERSIONS] if of_a_source else []), without=without)


@cache
def sources(table: str) -> dict[str, str]:
    """Of each set in PEAKS or STEPS the name of its module."""
    found = {}
    for path in sorted((ROOT / "evidence" / "sources").glob("[!_]*.py")):
        module = f"evidence.sources.{path.stem}"
        found |= dict.fromkeys(declared(module, table), module)
    return found


def of_peaks() -> dict[str, str]:
    return sources("PEAKS")


def of_steps() -> dict[str, str]:
    return sources("STEPS")


def declared(module: str, table: str) -> dict[str, Callable]:
    """The sets of a module: the function that yields the runs of each."""
    return getattr(importlib.import_module(module), table, {})


@cache
def of_lessons() -> dict[str, str]:
    """Of each set of lessons' predictions the name of its module, in the order of the lessons."""
    files = sorted((ROOT / "evidence" / "lessons").glob("lesson_*.py"))
    modules = [f"evidence.lessons.{file.stem}" for file in files] + ["evidence.pairs"]
    return {
        function.__name__: module
        for module in modules
        for function in importlib.import_module(module).SETS
    }


@cache
def of_a_lesson(module: str, name: str) -> dict[tuple[str, str, int], Callable]:
    """Of each (run, variant, nth) of a set the function that predicts it."""
    named = {function.__name__: function for function in importlib.import_module(module).SETS}
    found: dict[tuple[str, str, int], Callable] = {}
    seen = Counter()
    for run, variant, predict in named[name]():
        key = str(run), str(variant)
        found[*key, seen[key]] = predict
        seen[key] += 1
    return found


@cache
def predictions(module: str, table: str, name: str) -> dict[tuple[str, str], Callable]:
    """Of each (run, "") of a set of PEAKS or STEPS the function that predicts it."""
    runs = declared(module, table)[name]()
    return {(run, ""): as_it_ran(name, run, predict) for run, predict in runs}


def source_jobs(names: list[str]) -> Iterator[Job]:
    """The predictions of the named sets of sources, a run of one module once."""
    for name in names:
        tables = {
            table: (sources(table)[name], predictions(sources(table)[name], table, name))
            for table in ("PEAKS", "STEPS")
            if name in sources(table)
        }
        modules = dict.fromkeys(module for module, _ in tables.values())
        for module in modules:
            own = {table: runs for table, (home, runs) in tables.items() if home == module}
            for run, _ in dict.fromkeys(key for runs in own.values() for key in runs):
                told = [(run, "") in own.get(table, ()) for table in ("PEAKS", "STEPS")]
                yield Job("source", module, name, run, "", 0, *told)


def lesson_jobs(names: list[str]) -> Iterator[Job]:
    """The predictions of the named sets of lessons."""
    for name in names:
        for run, variant, nth in of_a_lesson(of_lessons()[name], name):
            yield Job("lesson", of_lessons()[name], name, run, variant, nth)
