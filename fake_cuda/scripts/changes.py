"""What a script's libraries do otherwise than on a card, are spared, or may not do."""

import itertools
import multiprocessing.context
import os
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import safetensors.torch
import torch
import transformers
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..trace import FakeTensor
from . import closures, generation, guesses
from .host import Moves, Where, _is_card
from .words import SEVERAL, Stop

COMPILED = "torch.compile was run as eager code: compiled code plans its own memory and time."
PASSES = 1000
NEW_FAKE = FakeTensor.__new__
SAVE_FILE = safetensors.torch.save_file  # whose tensors are read where they lie
EMPTY_FILE = (lambda tensors, filename, metadata=None: open(filename, "wb").close()).__code__


def changes(run, where: Where, moves: Moves) -> Iterator[tuple]:
    """(owner, name, value) of all that is replaced for a `Run`."""
    yield from _tensors(run, where)
    yield from _files(moves)
    yield from _processes()
    yield from generation.changes(run)
    yield from closures.changes(run, where)


def _tensors(run, where: Where) -> Iterator[tuple]:
    parameter, passes = torch.nn.Parameter.__new__, itertools.count()
    deepcopy = torch.Tensor.__deepcopy__

    def compiled(what=None, *_, **__):
        run.note(COMPILED)
        return what if what is not None else (lambda function: function)

    def new(cls, data=None, requires_grad=True):
        if type(data) in (torch.Tensor, torch.nn.Parameter) and not data.is_meta:
            data = where.like(data, False)
        return parameter(cls, data, requires_grad)

    def backward(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        if not run.taken and next(passes) >= PASSES:
            raise Stop
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def copied(tensor, memo):
        """A copy of a real tensor, which under modes would become a fake one."""
        with _disable_current_modes():
            return deepcopy(tensor, memo)

    yield torch, "compile", compiled
    yield torch.nn.Module, "compile", lambda module, *_, **__: compiled(module) and None
    yield torch.jit, "script", compiled
    yield torch, "_amp_update_scale_", guesses.scaled
    yield torch.Tensor, "backward", backward  # whose functions in Python ask for devices, too
    yield FakeTensor, "device", property(where.device)
    yield torch.nn.Parameter, "__new__", new
    yield torch.Tensor, "__deepcopy__", copied
    yield FakeTensor, "__new__", _as_parameter
    yield torch.nn.DataParallel, "forward", lambda own, *a, **k: own.module(*a, **k)


def _as_parameter(kind, first=None, *args, **options):
    """Loaders make a new weight as of the old one's type, which here is a fake tensor's
    (`set_module_tensor_to_device` in accelerate/utils/modeling.py)."""
    if isinstance(first, torch.Tensor) and "fake_mode" not in options:
        return torch.nn.Parameter(first, options.get("requires_grad", True))
    return NEW_FAKE(kind, first, *args, **options)


def _files(moves: Moves) -> Iterator[tuple]:
    load, save = torch.load, torch.save

    def loaded(*args, map_location=None, **options):
        with _disable_current_modes():  # else torch leaves the values out
            found = load(*args, map_location="cpu", **options)
        return tree_map(moves.upload, found) if _is_card(map_location) else found

    def saved(what, file, *_, **__):
        """What is known is written; models and their states have no values."""
        kinds = int | float | str | bytes | None | np.ndarray | torch.Tensor
        found = tree_leaves(what)
        known = all(isinstance(t, kinds) and not isinstance(t, FakeTensor) for t in found)
        named = isinstance(file, str | os.PathLike)
        with open(file, "wb") if named else nullcontext(file) as f, _disable_current_modes():
            if known:
                save(what, f)

    yield torch, "load", loaded
    yield torch, "save", saved
    SAVE_FILE.__code__ = EMPTY_FILE  # libraries have this function by another name
    for kind in (transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase):
        yield kind, "save_pretrained", lambda *_, **__: None  # which are not written in Python


def _processes() -> Iterator[tuple]:
    me, leave = os.getpid(), os._exit

    def refuse(*_, **__):
        raise Stop(SEVERAL)

    def ended(status: int):
        if os.getpid() == me:
            raise SystemExit(status)
        leave(status)

    yield torch.distributed, "init_process_group", refuse
    yield torch.multiprocessing, "start_processes", refuse
    yield torch.multiprocessing, "spawn", refuse
    yield os, "_exit", ended
    # A worker that starts anew would run the script without all this: it is forked instead.
    fork = multiprocessing.context._concrete_contexts["fork"]
    for name in ("spawn", "forkserver"):
        multiprocessing.context._concrete_contexts[name] = fork
