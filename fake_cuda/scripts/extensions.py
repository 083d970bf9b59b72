"""Packages that a script may import, whose kernels run on a card alone.

They are found where nobody installed them, and answer as if somebody had. Of each some functions
are known, by its source: what they keep and allocate is what torch's kernels of the same algorithm
do, which stand in. Asked for another name, a package says that it is not known here, by an error of
imports: libraries ask for some names in case they are there, and go on without.
"""

import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import NamedTuple

from . import apex, flash_attn, xformers

ASKED = (
    "uses {} of the package {}, whose kernels run on a card alone, and of which that is not known "
    "here"
)
MISSING = (
    "{} of the package {} is not known here: it was taken as missing, and what the run does "
    "without it is predicted."
)
NO_MODULE = "__path__ __file__ __spec__ __all__ __wrapped__".split()


class Package(NamedTuple):
    """A package that stands in."""

    distribution: str  # as pip calls it
    version: str
    modules: dict[str, dict]  # of each module's whole name what it has


PACKAGES = {
    "flash_attn": Package("flash-attn", flash_attn.VERSION, flash_attn.MODULES),
    "xformers": Package("xformers", xformers.VERSION, xformers.MODULES),
    "apex": Package("apex", apex.VERSION, apex.MODULES),
}


class Distribution(importlib.metadata.Distribution):
    """What pip would have written of a package: its name, its version, what it installs."""

    def __init__(self, name: str):
        self.package = PACKAGES[name]
        lines = f"Name: {self.package.distribution}\nVersion: {self.package.version}\n"
        self.texts = {"METADATA": f"Metadata-Version: 2.1\n{lines}", "top_level.txt": name}

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(path)


class NotKnown(ImportError):
    """What is asked for is not known; its text is that of a `Stop`."""


def not_known(name: str, package: Package, note: Callable[[str], None]) -> NotKnown:
    """The error for a name of a package; the note is for a run that goes on."""
    note(MISSING.format(name, package.distribution))
    return NotKnown(ASKED.format(name, package.distribution))


class Finder:
    """Asked last, when no other has a module or a distribution; `note` tells what was missing."""

    def __init__(self, note: Callable[[str], None]):
        self.note = note

    def find_spec(self, name: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        first = name.partition(".")[0]
        if first not in PACKAGES:
            return None
        if name in PACKAGES[first].modules:
            return importlib.machinery.ModuleSpec(name, Loader(self.note), is_package=True)
        if first in sys.modules and not getattr(sys.modules[first], "__file__", None):
            raise not_known(name, PACKAGES[first], self.note)
        return None

    @staticmethod
    def find_distributions(context=None) -> Iterable[Distribution]:
        asked = getattr(context, "name", None)
        for name, package in PACKAGES.items():
            if asked is None or asked.replace("_", "-").lower() == package.distribution:
                yield Distribution(name)


class Loader:
    """Makes a module of what is known of it."""

    def __init__(self, note: Callable[[str], None]):
        self.note = note

    def create_module(self, spec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        package = PACKAGES[module.__name__.partition(".")[0]]
        module.__version__ = package.version
        module.__dict__.update(package.modules[module.__name__])

        def asked(name: str):
            whole = f"{module.__name__}.{name}"
            if whole in package.modules or name in NO_MODULE or name.startswith("__"):
                raise AttributeError(whole)
            raise not_known(whole, package, self.note)

        module.__getattr__ = asked


def found(note: Callable[[str], None]) -> Iterator[tuple]:
    """(owner, name, value): Python finds the packages, those that are not installed.

    Args:
        note: takes what the answer is to say.
    """
    yield sys, "meta_path", [*sys.meta_path, Finder(note)]
