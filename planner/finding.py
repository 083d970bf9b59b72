"""Who answers `onegpu fit`: the atlas at once, the search for one card, or that for several."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .terminal import Progress

if TYPE_CHECKING:  # they load torch
    from .answer import Fit
    from .several import Several

CARD = "T4"  # where none is named
ALONE = "gpu", "data", "longest", "exact", "order", "image_size"  # options of fit for one card
BOTH = "task", "length", "batch", "cache", "host"
COMPILES_NOTHING = "TORCHDYNAMO_DISABLE"  # which torch.compile looks for


def find(options: argparse.Namespace) -> Fit | Several:
    """The answer to what was asked.

    Raises:
        ValueError, OSError: one sentence that says what to change.
    """
    with nothing_compiled():
        return _found(options)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Around a search, in which nothing is compiled: functions that libraries hand to torch.compile
    as they are loaded stay as they are, in this process, and Inductor is not loaded for them."""
    before = os.environ.get(COMPILES_NOTHING)
    os.environ[COMPILES_NOTHING] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(COMPILES_NOTHING, None)
        else:
            os.environ[COMPILES_NOTHING] = before


def _found(options: argparse.Namespace) -> Fit | Several:
    if not options.gpus:
        found = _recorded(options)
        if found and (options.data or options.longest):
            return _with_lengths(found, options)
        return found or _predicted(options)
    asked = {name: getattr(options, name) for name in ALONE}
    given = (name for name, value in asked.items() if value is not None and value is not False)
    if alone := next(given, "").replace("_", "-"):
        raise ValueError(f"--{alone} is for one card, and --gpus names several: leave out one")
    from .search_several import fit_several
    from .workers import usual_number

    asked = _asked(options) | {"processes": usual_number()}
    with Progress() as progress:
        return fit_several(options.model, options.gpus, **asked, say=progress)


def _asked(options: argparse.Namespace) -> dict:
    return {name: getattr(options, name) for name in BOTH}


def _order(options: argparse.Namespace) -> dict:
    return {"order": options.order} if options.order else {}


def _recorded(options: argparse.Namespace) -> Fit | None:
    """What the atlas has; None where it has no answer or is not asked."""
    from . import recorded

    host = options.host is not None  # an empty one is refused
    more = options.exact, host, not options.cache
    if any(more):
        return None
    asked = options.model, options.gpu or CARD, options.length, options.batch
    about = _order(options) | {"task": options.task, "image_size": options.image_size}
    return recorded.fit(*asked, **about)


def _with_lengths(found: Fit, options: argparse.Namespace) -> Fit:
    """What the atlas has, and what is predicted of the lengths of samples."""
    from .search import with_lengths
    from .workers import usual_number

    asked = options.model, options.gpu or CARD, options.data, options.longest
    with Progress() as progress:
        return with_lengths(found, *asked, say=progress, processes=usual_number())


def _predicted(options: argparse.Namespace) -> Fit:
    """What is predicted now."""
    from . import fit
    from .workers import usual_number

    asked = _asked(options) | {"data": options.data, "longest": options.longest}
    asked |= _order(options) | {"processes": usual_number(), "image_size": options.image_size}
    with Progress() as progress:
        return fit(options.model, options.gpu or CARD, **asked, say=progress)
