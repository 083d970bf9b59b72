"""What libraries and random numbers keep for the whole process, forgotten or put back."""

import ctypes
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch

from .here import Here, OwnHere

try:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    SHARED = (PartialState, AcceleratorState, GradientState)
except ModuleNotFoundError:  # a loop of one's own does without it
    SHARED = ()


def _manager_of_bitsandbytes() -> type | None:
    """bitsandbytes' record of the parameters, and with them the models, that it treats apart."""
    if "bitsandbytes" not in sys.modules:
        return None
    from bitsandbytes.optim import GlobalOptimManager

    return GlobalOptimManager


def forget_libraries() -> None:
    """Clear Accelerate's device and precision, and what bitsandbytes was told of parameters."""
    if SHARED:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if manager := _manager_of_bitsandbytes():
        manager.get_instance().initialize()


@contextmanager
def python_evaluates() -> Iterator[None]:
    """Python itself evaluates frames, until something is compiled.

    A hack: after a compilation that failed, TorchDynamo stays where Python asks what evaluates a
    frame (PEP 523), for the rest of the process. Frames then keep their arguments, and with them
    tensors, alive longer than in a run that never compiled. Nothing public tells or mends it, so
    the interpreter is asked; where it has these functions no more, nothing is done. Compiled code
    of another thread is run by Python meanwhile: more slowly, with the same results.
    """
    try:
        api = ctypes.pythonapi
        ask, tell = (
            api._PyInterpreterState_GetEvalFrameFunc,
            api._PyInterpreterState_SetEvalFrameFunc,
        )
        here, usual = api.PyInterpreterState_Get, api._PyEval_EvalFrameDefault
    except AttributeError:
        yield
        return
    here.restype = ask.restype = ctypes.c_void_p
    ask.argtypes, tell.argtypes, tell.restype = [ctypes.c_void_p], [ctypes.c_void_p] * 2, None
    interpreter, usual = here(), ctypes.cast(usual, ctypes.c_void_p)
    found = ask(interpreter)
    if found == usual.value:
        yield
        return
    tell(interpreter, usual)
    try:
        yield
    finally:
        tell(interpreter, found)


@contextmanager
def undisturbed(here: Here) -> Iterator[None]:
    """Run a block with libraries that know nothing yet, and put random numbers back.

    A Trainer of the caller's own may be alive, or at work in another thread: what Accelerate and
    bitsandbytes know is another thing in the thread of the block. Random numbers and the default
    type are the whole process's, and go on afterwards where they were.
    """
    python, numpy, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(python_evaluates())
        for kind in SHARED:
            own = OwnHere(here, {}, kind._shared_state)
            stack.enter_context(patch.object(kind, "_shared_state", own))
        # TrainingArguments(torch_compile=True) tells Accelerate so by the environment.
        stack.enter_context(patch.dict(os.environ))
        if manager := _manager_of_bitsandbytes():
            new = object.__new__(manager)
            new.initialize()
            stack.enter_context(here.replaced((manager, "get_instance", lambda: new)))
        try:
            with torch.random.fork_rng(), torch.set_grad_enabled(torch.is_grad_enabled()):
                yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(python)
            np.random.set_state(numpy)
