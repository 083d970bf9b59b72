"""Liger puts its kernels in the place of what stands in transformers: until a run is over.

`apply_liger_kernel_to_llama(model=model)`, which the Trainer calls, changes the model, and the
function that turns queries and keys for all models of its kind; without a model it changes classes.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType

import torch

from ..here import Here
from ..trace import Trace

MODELS = re.compile(r"transformers\.models\..+\.modeling_\w+")
# Where Liger changes what it does not own, beside the modules of models.
OTHERS = ("torch.nn.functional", "transformers.loss.loss_utils")
PACKAGE = "liger_kernel"


class _Kept:
    """What stands in modules that Liger may change, also in those that a run loads first.

    It is a finder of modules, the first of `sys.meta_path` for as long as a run lasts.
    """

    def __init__(self, here: Here):
        self.here = here
        self.before: list[tuple[object, dict]] = []  # an owner, and its names
        self.bound: set[int] = set()  # functions that are Liger's in this thread alone
        for name, module in list(sys.modules.items()):
            if name in OTHERS or MODELS.fullmatch(name):
                self.keep(module)

    def keep(self, module: ModuleType) -> None:
        names = dict(vars(module))
        self.before.append((module, names))
        for kind in names.values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                self.before.append((kind, dict(vars(kind))))

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if MODELS.fullmatch(name) else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_keep(module: ModuleType) -> None:
                execute(module)
                self.keep(module)

            spec.loader.exec_module = then_keep
        return spec

    def changed(self) -> Iterator[tuple[object, str, object, object]]:
        """(owner, name, what stood there, what stands there) of what is Liger's now."""
        for owner, names in self.before:
            for name, old in names.items():
                new = vars(owner).get(name, old)
                own = str(getattr(new, "__module__", "")).startswith(PACKAGE)
                if new is not old and (own or id(new) in self.bound):
                    yield owner, name, old, new

    def bind(self) -> None:
        """Functions that were changed are Liger's in this thread, and in others as they were."""
        for owner, name, old, new in self.changed():
            if isinstance(old, FunctionType) and id(new) not in self.bound:
                either = self.here.instead(old, new)
                self.bound.add(id(either))
                setattr(owner, name, either)

    def put_back(self) -> None:
        for owner, name, old, _ in self.changed():
            setattr(owner, name, old)


@contextmanager
def patches(trace: Trace) -> Iterator[None]:
    """What Liger changes is as before when the run is over; nothing where it is not installed."""
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        yield
        return
    kept = _Kept(trace.here)
    sys.meta_path.insert(0, kept)
    try:
        with _instances(kept):
            yield
    finally:
        sys.meta_path.remove(kept)
        kept.put_back()


@contextmanager
def _instances(kept: _Kept) -> Iterator[None]:
    """What the Trainer asks Liger to do to a model, it does in this thread."""
    liger = sys.modules.get(f"{PACKAGE}.transformers")
    apply = getattr(liger, "_apply_liger_kernel_to_instance", None)
    if apply is None:
        yield
        return

    def applied(model: torch.nn.Module, **options) -> None:
        apply(model=model, **options)
        kept.bind()

    with kept.here.replaced((liger, "_apply_liger_kernel_to_instance", applied)):
        yield
