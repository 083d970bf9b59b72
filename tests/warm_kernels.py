"""Kernels of nbval that have loaded the helpers when they start, which takes three seconds each."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from ipykernel import kernelspec

import notebook_rules as rules
import warm
from exercises import names, python

LOADED = (warm.IN_A_KERNEL, "helpers.prediction")
CARDS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # what CUDA starts does not survive a fork


def loads_them(notebook: Path) -> bool:
    """Whether its first cell asks for what loads them all: then it finds no module that it would
    not find in a fresh kernel."""
    return "predict" in names(python(rules.code(rules.read(notebook))[1])).bound


def start_for(notebook: Path | None, usual: Callable = kernelspec.get_kernel_dict) -> None:
    """Have nbval, which asks ipykernel how a kernel is started, start its kernel so; None: all
    kernels as they usually are."""
    there = sys.platform == "linux" and not any(map(os.path.exists, CARDS))

    def get_kernel_dict() -> dict:
        found = usual()
        if there and notebook and loads_them(notebook):
            found["argv"][0] = warm.executable(*LOADED)
        return found

    kernelspec.get_kernel_dict = get_kernel_dict
