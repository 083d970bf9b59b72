"""What older libraries did with memory and time otherwise than today's, by their versions.

A published row names its versions in the columns `torch` and `transformers`; `of` says from them
what to switch on before its run is predicted. No set of rows is asked for by its name.
"""

from functools import partial

from evidence.libraries import torch_1_10, torch_1_13, torch_2_1, transformers_4_48
from evidence.libraries.behaviour import Behaviour, behaving
from fake_cuda import rules_of

TORCH = (*torch_1_10.BEHAVIOURS, *torch_1_13.BEHAVIOURS, *torch_2_1.BEHAVIOURS)
TRANSFORMERS = transformers_4_48.BEHAVIOURS

__all__ = ["TORCH", "TRANSFORMERS", "Behaviour", "behaving", "of", "rules_of_torch"]


def rules_of_torch(version: str) -> Behaviour:
    """What the simulation itself knows of a version: workspaces, the choice of attention."""
    return Behaviour("rules of the version", "inf", partial(rules_of, torch=version))


def of(torch: str | None = None, transformers: str | None = None) -> tuple[Behaviour, ...]:
    """The behaviours of these versions, such as "2.1.0" or "1.13.0a0+d0d6b1f".

    Of a library whose version is None, today's: a row that names no version changes nothing.
    """
    found = [behaviour for behaviour in TORCH if torch and behaviour.was_in(torch)]
    found += [rules_of_torch(torch)] if torch else []
    found += [old for old in TRANSFORMERS if transformers and old.was_in(transformers)]
    return tuple(found)
