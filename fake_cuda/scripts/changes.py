"""What a script's libraries do otherwise than on a card, are spared, or may not do."""

import itertools
import multiprocessing.context
import os
import types
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import safetensors.torch
import torch
import transformers
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..trace import FakeTensor
from .host import CPU, CUDA, Moves, Where, _is_card, _number
from .ranks import ranks
from .words import Stop

COMPILED = "torch.compile was run as eager code: compiled code plans its own memory and time."
PASSES = 1000
SAVE_FILE = safetensors.torch.save_file  # whose tensors are read where they lie
EMPTY_FILE = (lambda tensors, filename, metadata=None: open(filename, "wb").close()).__code__


def changes(run, where: Where, moves: Moves) -> Iterator[tuple]:
    """(owner, name, value) of all that is replaced for a `Run`."""
    yield from _tensors(run, where)
    yield from _files(moves)
    yield from _processes()
    yield from ranks(run, where, moves)


def _tensors(run, where: Where) -> Iterator[tuple]:
    parameter, passes = torch.nn.Parameter.__new__, itertools.count()

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

    yield torch, "compile", compiled
    yield torch.nn.Module, "compile", lambda module, *_, **__: compiled(module) and None
    yield torch.jit, "script", compiled
    yield torch.Tensor, "backward", backward  # whose functions in Python ask for devices, too
    yield FakeTensor, "device", property(where.device)
    yield torch.nn.Parameter, "__new__", new


def _files(moves: Moves) -> Iterator[tuple]:
    load, save = torch.load, torch.save

    def loaded(*args, map_location=None, **options):
        with _disable_current_modes():  # else torch leaves the values out
            found = load(*args, map_location="cpu", **options)
        return tree_map(moves.upload, found) if _goes_to_card(map_location) else found

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


def _goes_to_card(map_location) -> bool:
    """Whether `torch.load` puts what it finds on the card; a map or a function is asked, too."""
    if isinstance(map_location, dict):
        return any([_is_card(place) for place in map_location.values()])
    if callable(map_location):  # it is given storages: this one only says where it would go
        storage = types.SimpleNamespace(cpu=lambda *_, **__: CPU, is_cuda=False)
        storage.cuda = lambda device=None, **__: _number(CUDA if device is None else device)
        return _is_card(map_location(storage, "cpu"))
    return _is_card(map_location)


def _processes() -> Iterator[tuple]:
    me, leave = os.getpid(), os._exit

    def ended(status: int):
        if os.getpid() == me:
            raise SystemExit(status)
        leave(status)

    yield os, "_exit", ended
    # A worker that starts anew would run the script without all this: it is forked instead.
    fork = multiprocessing.context._concrete_contexts["fork"]
    for name in ("spawn", "forkserver"):
        multiprocessing.context._concrete_contexts[name] = fork
