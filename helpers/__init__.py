"""Predict, measure and judge the GPU memory of training: the helpers that every lesson imports."""

import atexit
import gc
import importlib.metadata
import warnings
from contextlib import suppress

from packaging.requirements import Requirement


def refuse_other_versions() -> None:
    """ImportError for a library outside of the course's range, whose names may be others."""
    for wanted in map(Requirement, importlib.metadata.requires("one-gpu-measured") or ()):
        here = None if wanted.marker else importlib.metadata.version(wanted.name)  # no extras
        if here and not wanted.specifier.contains(here, prereleases=True):
            raise ImportError(
                f"{wanted.name} {here} is here, and the course needs {wanted.specifier}: "
                "run make install, or python -m pip install -c constraints.txt -e ."
            )


with suppress(importlib.metadata.PackageNotFoundError):
    refuse_other_versions()  # before they are imported

import torch

import fake_cuda  # noqa: F401  (before all others: it quiets libraries that print when they load)

from . import fit, report, show
from .hardware import describe, device, gib, gpu, supports
from .memory import free, live_bytes, measure
from .prediction import Prediction, predict
from .runs import Run, compare, load, record
from .training import train
from .workloads import Workload, language_modelling, text_classification

__all__ = (
    "Prediction Run Workload compare describe device free gib gpu language_modelling load measure "
    "predict record show supports text_classification train"
).split()

# PEFT asks for it by the old name, and a reader can do nothing about that.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
# What the imports made stays for good. Sweeping it again and again takes longer than the steps of
# a short run; but what a reader made before importing helpers must still be seen and swept.
if live_bytes() < 2**20 and not torch.cuda.is_initialized():
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton takes what stays frozen for a leak, and says so
