"""What a script's libraries do otherwise than on a card, are spared, or may not do."""

import builtins
import getpass
import inspect
import multiprocessing.context
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.utils.cpp_extension
import transformers.modeling_utils
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes

from ..refusals import GPU, what_it_uses
from ..trace import FakeTensor
from . import bounds, closures, extensions, generation, guesses
from .graphs import graphs, profilers
from .host import Where
from .misspelt import misspelt
from .moves import ENGINE, Moves
from .names import names
from .ranks import ranks
from .repeats import repeats
from .saved import files
from .words import NoAnswer, Stop, stood
from .workers import workers

OFFLOADED = (
    "loads a model of which a part goes to {}, because device_map leaves it no room on the card: "
    "such a model is not predicted"
)
SCRIPTED = "torch.jit.script was run as eager code: scripted code may fuse, and take less time."
PACKED = (
    "packs sequences with pack_padded_sequence in {}, and what cuDNN keeps of packed ones is not "
    "known here: leave the packing out"
)
EXTENSION = "compiles an extension for CUDA, whose kernels have nothing to work on here"
STREAM = (
    "takes the address of the card's stream, as Unsloth does to call kernels by addresses: without "
    "a card there is none"
)
PASSES = 1000  # backward passes; without an update so many are enough
NEW_FAKE = FakeTensor.__new__
TIED = transformers.modeling_utils._tied_params_are_equal


def changes(run, where: Where, moves: Moves) -> Iterator[tuple]:
    """(owner, name, value) of all that is replaced for a `Run`."""
    yield from _tensors(run, where, moves)
    yield from _ctc(where, moves)
    yield from files(run, where, moves)
    yield from names(where, moves)
    yield from misspelt()
    yield from graphs(run)
    yield from profilers(run)
    yield from workers()
    yield from repeats(run, where)
    yield from _processes()
    yield from _nobody(run)
    yield transformers.modeling_utils, "accelerate_dispatch", _placed
    yield transformers.modeling_utils, "_tied_params_are_equal", _tied
    yield from ranks(run, where, moves)
    yield from generation.changes(run, where)
    yield from closures.changes(run, where)
    yield from extensions.found(run.note)
    yield from bounds.launches(where)
    yield torch.utils.cpp_extension, "_join_cuda_home", _no_compiler
    yield torch.cuda, "_compile_kernel", _no_compiler  # of CUDA's source, at run time
    yield torch._C, "_cuda_getCurrentRawStream", _no_address


def made(changes: Iterator[tuple]) -> list[tuple]:
    """Make changes of (owner, name, value); (owner, name, what stood there) of each."""
    before = []
    for owner, name, value in changes:
        before.append((owner, name, inspect.getattr_static(owner, name, None)))
        setattr(owner, name, value)
    return before


def _no_compiler(*_, **__):
    raise Stop(EXTENSION)


def _no_address(*_):
    raise Stop(STREAM)


def _tied(source, target) -> bool:
    """Whether a file that has a tied weight twice has it alike: of fake ones it is taken so."""
    try:
        return TIED(source, target)
    except DataDependentOutputException:
        return source.shape == target.shape


def _tensors(run, where: Where, moves: Moves) -> Iterator[tuple]:
    parameter, deepcopy = torch.nn.Parameter.__new__, torch.Tensor.__deepcopy__

    def scripted(what, *_, **__):
        run.note(SCRIPTED)
        return what

    def new(cls, data=None, requires_grad=True):
        if type(data) in (torch.Tensor, torch.nn.Parameter) and not data.is_meta:
            data = where.like(data, False)
        return parameter(cls, data, requires_grad)

    def backward(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        run.passed()
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def engine(*args, **options):
        """Hooks and backward passes in Python: torch has left the mode, in which they say "cuda"
        (`backward` in torch/autograd/__init__.py)."""
        with nullcontext() if torch._C._len_torch_function_stack() else moves:
            return ENGINE(*args, **options)

    def copied(tensor, memo):
        """A copy of a real tensor, which under modes would become a fake one."""
        with _disable_current_modes():
            return deepcopy(tensor, memo)

    def packed(given, *args, **options):
        if where.on_card(given):
            raise Stop(PACKED.format(stood(traceback.extract_stack())))
        return pack(given, *args, **options)

    pack = torch.nn.utils.rnn.pack_padded_sequence
    yield torch.nn.utils.rnn, "pack_padded_sequence", packed
    yield torch.compiler, "cudagraph_mark_step_begin", lambda: None  # of compiled code
    yield torch.jit, "script", scripted
    yield torch, "_amp_update_scale_", guesses.scaled
    yield torch.autograd, "_engine_run_backward", engine
    # A checkpoint is packed within an operation, and unpacked without: its device reads otherwise.
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    alike = checks | dict(default=lambda tensor: (tensor.shape, tensor.dtype))
    yield torch.utils.checkpoint, "_allowed_determinism_checks_to_fns", alike
    yield torch.Tensor, "backward", backward  # whose functions in Python ask for devices, too
    yield FakeTensor, "device", property(where.device)
    yield torch.nn.Parameter, "__new__", new
    yield torch.Tensor, "__deepcopy__", copied
    yield FakeTensor, "__new__", _as_parameter


def _ctc(where: Where, moves: Moves) -> Iterator[tuple]:
    """A loss whose kernels do not look at labels."""
    ctc = torch.ctc_loss

    def ctc_loss(scores, labels, *given):
        """Lengths lie where the scores do: of lists, torch's C++ would read the labels' values, and
        it brings tensors of the host there by itself."""
        lengths, options = given[:2], given[2:]
        if where.on_card(scores):
            with _disable_current_modes():
                lengths = [torch.as_tensor(of) for of in lengths]
            lengths = map(moves.upload, lengths)
        elif where.unsure or where.trace.guessed:
            bounds.check(where, torch.ops.aten.ctc_loss, (scores, labels, *lengths), {}, False)
        return ctc(scores, labels, *lengths, *options)

    yield torch, "ctc_loss", ctc_loss


def _as_parameter(kind, first=None, *args, **options):
    """Loaders make a new weight as of the old one's type, which here is a fake tensor's
    (`set_module_tensor_to_device` in accelerate/utils/modeling.py)."""
    if isinstance(first, torch.Tensor) and "fake_mode" not in options:
        return torch.nn.Parameter(first, options.get("requires_grad", True))
    return NEW_FAKE(kind, first, *args, **options)


def _placed(model, quantizer, device_map: dict, *rest):
    """A `device_map` over several places; one that is the card alone does not come here
    (`from_pretrained` in transformers/modeling_utils.py)."""
    away = {str(place) for place in device_map.values()} & {"cpu", "disk"}
    raise Stop(OFFLOADED.format(" and ".join(sorted(away)) or "other cards"))


def _nobody(run) -> Iterator[tuple]:
    """There is nobody to type; and the modes of a run are those of its first thread."""

    def asked(*_, **__):
        raise NoAnswer("EOF when reading a line")

    def ended(about) -> None:
        if what_it_uses(about.exc_value) == GPU:
            run.lost = about.exc_value
        say(about)

    say = threading.excepthook
    yield builtins, "input", asked
    yield getpass, "getpass", asked
    yield sys, "breakpointhook", asked
    yield threading, "excepthook", ended


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
