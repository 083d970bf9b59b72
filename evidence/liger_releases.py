"""Liger as it was released: several versions of it, one at a time, in one process."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from evidence.tables import ROOT

RELEASES = ROOT / "build" / "liger"  # a folder a version


@contextmanager
def released(version: str) -> Iterator[None]:
    """`liger_kernel` is that of a release, for a while."""
    folder = RELEASES / version / "liger_kernel"
    if not folder.is_dir():
        raise ImportError(
            f"Liger {version} is not in build/liger: python -m pip install --no-deps "
            f"--target build/liger/{version} liger-kernel=={version}"
        )
    own = {name: module for name, module in sys.modules.items() if _is_liger(name)}
    for name in own:
        del sys.modules[name]
    # Its packages without what they import first: old releases patch models that have moved.
    for name in ("", ".transformers", ".megatron"):
        package = ModuleType(f"liger_kernel{name}")
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_liger(name)]:
            del sys.modules[name]
        sys.modules.update(own)


def _is_liger(name: str) -> bool:
    return name.partition(".")[0] == "liger_kernel"


def liger(path: str) -> Callable:
    """A class or function of Liger's: `liger("transformers.jsd.LigerJSD")`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"liger_kernel.{module}"), name)
