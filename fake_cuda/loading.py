"""Modules are loaded while nothing is collected.

A library makes some hundred thousand objects when it loads, and nearly all of them stay. Python
would sweep them again and again meanwhile, which is a fifth of the time that loading takes.
"""

import gc
import importlib
import sys
from types import ModuleType


def load(name: str) -> ModuleType:
    """The module of that full name. Afterwards garbage is collected as it was before."""
    if name in sys.modules:
        return importlib.import_module(name)
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if not gc.get_freeze_count():  # else something would be thawed that is not ours
            gc.freeze()
            gc.unfreeze()  # to what is old: the next sweep of what is new passes it by
        if collects:
            gc.enable()
