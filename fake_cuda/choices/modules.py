"""What libraries do with real tensors only: move modules, copy them, guess at packed sequences."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..refusals import NO_VALUES, NotSimulated
from ..trace import Trace
from ..values import known

try:
    import transformers
    from transformers import masking_utils
    from transformers.integrations import moe
except ModuleNotFoundError:  # a loop of one's own does without it
    transformers = None


def _apply(self, fn: Callable, recurse: bool = True):
    """`nn.Module._apply` (.to, .half, .cuda) for fake parameters, which torch's own would swap.

    All else is as torch's: each child is asked, since some have an `_apply` of their own; whoever
    holds a parameter, such as an optimizer, goes on holding it; gradients are changed, too; and a
    buffer of two modules becomes two.
    """
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, old in self._parameters.items():
        if old is None:
            continue
        gradient = old.grad
        with torch.no_grad():
            new = _in_place(old, fn(old))
            if new is not old:
                new = self._parameters[name] = torch.nn.Parameter(new, old.requires_grad)
            if gradient is not None:
                new.grad = _in_place(gradient, fn(gradient))
    for name, old in self._buffers.items():
        self._buffers[name] = old if old is None else fn(old)
    return self


def _in_place(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`old` with the memory of `new`; `new` where one has none (meta) or is not fake."""
    both = isinstance(old, FakeTensor) and isinstance(new, FakeTensor)
    if not both or (old.fake_device.type == "meta") != (new.fake_device.type == "meta"):
        return new
    old.data, old.fake_device = new, new.fake_device
    return old


def _deepcopy(tensor, memo: dict):
    """As torch's own, which trips over a fake tensor's known values (`Tensor.__deepcopy__`).

    A parameter is copied without its gradient, which a fake one would keep. Anything else is copied
    as its storage lies, once for all its views, and what is known of its values is copied, too.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    elif not tensor.is_leaf or tensor.layout is not torch.strided:
        return torch.Tensor.__deepcopy__(tensor, memo)  # refuses the first, clones the second
    else:
        new = _copied(tensor.detach(), memo).requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = new
    return new


def _copied(tensor, memo: dict):
    storage, size = tensor.untyped_storage(), tensor.element_size()
    place = ("storage", storage._cdata, tensor.dtype)
    if place not in memo:
        memo[place] = tensor.as_strided((storage.nbytes() // size,), (1,), 0).clone()
    new = memo[place].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    with _disable_current_modes():  # the values are real
        new._known = copy.deepcopy(known(tensor), memo)
    return new


def _generate(*_, **__):
    """No text of fake tensors ever ends."""
    raise NotSimulated(NO_VALUES) from DataDependentOutputException("generate")


def _loader(begin: Callable) -> Callable:
    """`DataLoader.__init__`: workers are other processes, without fake tensors."""

    def loader(self, *args, **options):
        options |= dict(num_workers=0, prefetch_factor=None, persistent_workers=False)
        begin(self, *args, **options | dict(multiprocessing_context=None, pin_memory=False))

    return loader


def _tensor(make: Callable) -> Callable:
    """`torch.tensor` of a list in which there are fake tensors of one number."""
    # `with torch.device("meta")` knows by its own list what it places, which torch makes once: of
    # the function that it sees, not of this one.
    _device_constructors()

    def number(tensor):
        return tensor if tensor.dim() else tensor.item()

    return lambda data, **options: make(tree_map_only(FakeTensor, number, data), **options)


def _of_transformers() -> Iterator[tuple[object, str, Callable]]:
    packed = masking_utils.find_packed_sequence_indices
    yield transformers.GenerationMixin, "generate", _generate
    # The shape function of grouped products asks for bf16; without them experts run in turn.
    yield moe, "_can_use_grouped_mm", lambda *_, **__: False
    # Position ids without values look like several sequences packed in one, with a mask.
    yield (
        masking_utils,
        "find_packed_sequence_indices",
        lambda ids: None if known(ids) is None else packed(ids),
    )
    yield masking_utils, "is_tracing", lambda tensor: known(tensor) is None


@contextmanager
def modules(trace: Trace) -> Iterator[None]:
    """Modules, loaders and models take fake tensors."""
    with trace.here.replaced(
        (torch.nn.Module, "_apply", _apply),
        (FakeTensor, "__deepcopy__", _deepcopy),
        (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        (torch.utils.data.DataLoader, "__init__", _loader(torch.utils.data.DataLoader.__init__)),
        (torch, "tensor", _tensor(torch.tensor)),
        *(_of_transformers() if transformers else ()),
    ):
        yield
