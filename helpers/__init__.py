"""Predict, measure and judge the GPU memory of training: the helpers that every lesson imports.

Importing this package loads nothing and changes nothing. A name is fetched when it is first asked
for, with the libraries that it needs; loading `show` gives matplotlib the style of the course.
"""

import importlib.metadata
from contextlib import suppress

from packaging.requirements import Requirement

HOMES = {  # the public names of each module; `show` is one itself
    "hardware": "describe device gib gpu supports",
    "memory": "free measure",
    "prediction": "Prediction predict",
    "runs": "Run compare load record",
    "show": "show",
    "training": "train",
    "workload": "Workload",
    "workloads": "image_classification image_text_to_text language_modelling speech_recognition "
    "text_classification",
}
__all__ = sorted(name for names in HOMES.values() for name in names.split())
MODULES = {*HOMES, *"host kernels models own_data samples settings tasks tiny trainers".split()}


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


def __getattr__(name: str):
    """A public name or a module, loaded when it is first asked for."""
    home = next((module for module, names in HOMES.items() if name in names.split()), None)
    if home is None and name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fake_cuda.loading import load  # first: it quiets libraries that print when they load

    module = load(f"{__name__}.{home or name}")
    value = module if name in MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *MODULES})
