"""A CUDA card that is not there: torch answers as on one, and its tensors stay on the CPU.

    with pretended("T4"): ...          # helpers.device() is cuda, helpers.describe() a Tesla T4

What is real: the values, which the CPU computes; which tensor is on the card and which is not
(`.to("cuda")` and `device="cuda"` put it there, results follow their inputs, `.device` says so, and
an operation on tensors of both places fails as on a card, as does `.numpy()`); allocated bytes and
their peak; what the caching allocator holds for them, by the model in `fake_cuda`; a limit, and the
error of running out of memory; which flags, dtypes and features the libraries choose for the card.

What is not: time; CUDA's own kernels, their memory and their rounding (the CPU's run, which need
other scratch space); pinned memory, streams and graphs; compiled code, which is the CPU's and whose
tensors are counted only once they come out of it.

What torch.cuda says of the card stands in `fake_cuda.scripts.answers`, where scripts have it, too.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pynvml
import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from fake_cuda.scripts import answers
from fake_cuda.scripts.queues import done

from .card import Card
from .modes import Follow, Pretend, tensors_in

__all__ = ["pretended"]
CONTEXT = 400 * 2**20  # bytes that a CUDA context takes of the card
DRIVER = "580.65.06"


@contextmanager
def pretended(name: str, free: float = 6.0) -> Iterator[Card]:
    """This machine with a card of that name, of which `free` GiB are free, in this thread."""
    import bitsandbytes  # noqa: F401  which would look for CUDA's libraries

    card = Card(name, free)
    with ExitStack() as stack:
        for owner, attribute, answer in _patches(card):
            stack.enter_context(patch.object(owner, attribute, answer, create=owner is torch._C))
        answers.forget_machine()
        stack.callback(answers.forget_machine)
        stack.enter_context(Follow(card))
        stack.enter_context(Pretend(card))
        yield card


def _patches(card: Card) -> Iterator[tuple]:
    """(owner, name, what stands there) of all that would ask for a card or its driver."""
    told = answers.answers(card.facts, card.memory) | dict(empty_cache=card.empty_cache)
    told["device_memory_used"] = lambda *_, **__: card.memory.reserved + CONTEXT
    yield from answers.patches(told)
    yield torch._C, "_cuda_clearCublasWorkspaces", lambda: card.workspaces.clear()
    yield pynvml, "nvmlInit", done
    yield pynvml, "nvmlDeviceGetCount", lambda: 1
    yield pynvml, "nvmlSystemGetDriverVersion", lambda: DRIVER
    yield from _pages()
    yield from _loading()
    yield from _autocast()
    yield from _hooks(card)
    yield from _predictions()
    yield from _compiled(card)


def _pages() -> Iterator[tuple]:
    """bitsandbytes' managed memory is the host's, and CUDA's to ask."""
    import bitsandbytes.functional as pages

    def paged(*shape, dtype=torch.float32, **_):
        page = torch.empty(shape, dtype=dtype)
        page.is_paged = True
        return page

    yield pages, "get_paged", paged
    yield pages, "fill", lambda page, value, **_: page.fill_(value)
    yield pages, "prefetch_tensor", done


def _loading() -> Iterator[tuple]:
    begin = torch.utils.data.DataLoader.__init__

    def loader(self, *args, **options):
        begin(self, *args, **options | {"pin_memory": False})

    yield torch.utils.data.DataLoader, "__init__", loader
    yield torch.Tensor, "pin_memory", lambda tensor, *_: tensor
    yield torch.Tensor, "record_stream", done


def _autocast() -> Iterator[tuple]:
    start = torch.autocast.__init__

    def autocast(self, device_type, dtype=None, *args, **options):
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        start(self, device_type, dtype, *args, **options)

    def of_cpu(ask):
        return lambda kind="cuda": ask("cpu" if kind == "cuda" else kind)

    yield torch.autocast, "__init__", autocast
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, of_cpu(getattr(torch, name))


def _hooks(card: Card) -> Iterator[tuple]:
    """A backward pass runs hooks, and with them recomputed layers, without any mode of torch."""

    def pretending(hook):
        if card.compiles:  # what compiled code keeps is made again as it was made
            return hook

        @functools.wraps(hook)
        def run(*args):
            if torch._C._len_torch_function_stack() or not Pretend.on:
                return hook(*args)
            with Pretend(card):
                return hook(*args)

        return run

    def registered(register):
        return lambda tensor, hook: register(tensor, pretending(hook))

    saved = torch.autograd.graph.saved_tensors_hooks
    keep = saved.__init__
    yield saved, "__init__", lambda self, *two: keep(self, *map(pretending, two))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield torch.Tensor, name, registered(getattr(torch.Tensor, name))


def _predictions() -> Iterator[tuple]:
    """Inside of a prediction nothing is pretended."""
    import fake_cuda
    from fake_cuda import simulation
    from helpers import prediction

    simulate = simulation.simulate

    def nowhere(*args, **options):
        before, Pretend.on = Pretend.on, False
        try:
            return simulate(*args, **options)
        finally:
            Pretend.on = before

    for module in (simulation, prediction, fake_cuda):
        yield module, "simulate", nowhere


def _compiled(card: Card) -> Iterator[tuple]:
    """Compiled code goes by no mode: what comes out of it is on the card if what went in was."""
    from torch._dynamo import eval_frame

    compiled = eval_frame._TorchDynamoContext.__call__

    def call(self, fn):
        made = compiled(self, fn)
        if isinstance(fn, torch.nn.Module) or isinstance(fn, type):
            return made

        @functools.wraps(made)
        def outside(*args, **options):
            if not Pretend.on:  # inside of a prediction
                return made(*args, **options)
            with torch._C.DisableTorchFunction():
                here = any(card.holds(t) for t in tensors_in((args, options)))
            with _no_modes(), patch.object(card, "compiles", True):
                out = made(*args, **options)
            for tensor in tensors_in((out,)):
                card.place(tensor, here)
            return out

        return outside

    yield eval_frame._TorchDynamoContext, "__call__", call


@contextmanager
def _no_modes() -> Iterator[None]:
    """Compiled code is traced without the modes that pretend."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(_pop_mode())
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
