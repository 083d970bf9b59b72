"""Files of tensors: real values are written and read, of a fake tensor what there is of it.

A fake tensor is pickled as a few words (its shape, type, place and the storage it shares), so what
a script saves it can read again, wherever the file went. In a file of safetensors it is a hole of
its size: a sparse file, which is as long as on a card and takes no room.
"""

from collections.abc import Iterator
from unittest.mock import patch

import torch
import transformers
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ..trace import FakeTensor
from ..values import known
from . import moves as moving
from .holes import sparse_files
from .host import Where
from .moves import Moves, as_device, is_card, keep_known

SIMULATED = "What {} writes was left out: objects of the simulation cannot be written."
REBUILD = torch._utils._rebuild_tensor
PLAIN = torch.Tensor.__reduce_ex__  # how torch pickles a tensor


class Here:
    """The run of this process: functions named in a pickle have no other way to it."""

    where: Where
    asked = None  # `map_location` of the torch.load that is under way


class Bytes:
    """A storage without values, which several tensors may share."""

    def __init__(self, nbytes: int, card: bool):
        where = Here.where
        with where.to(card), torch.no_grad():
            self.flat = torch.empty(nbytes, dtype=torch.uint8)
        if card:
            where.trace.work.copy(self.flat, where.trace)

    def tensor(self, dtype, shape, stride, offset):
        with torch.no_grad():
            whole = self.flat[: len(self.flat) // dtype.itemsize * dtype.itemsize].view(dtype)
            return whole.as_strided(shape, stride, offset)


class Placed:
    """A storage, for a function that is given as `map_location` and says where to put it."""

    def __init__(self, device: str = "cpu"):
        self.device = torch.device(device)

    def cuda(self, device=None, *_, **__) -> "Placed":
        return Placed("cuda:0" if device is None else str(as_device(device)))

    def cpu(self) -> "Placed":
        return Placed()


def files(run, where: Where, moves: Moves) -> Iterator[tuple]:
    """(owner, name, value) of what writes and reads tensors."""
    Here.where = where
    torch.serialization.add_safe_globals([stored, restored])
    yield torch, "load", _load(moves)
    yield torch, "save", _save(run)
    yield torch._utils, "_rebuild_tensor", _rebuilt
    yield FakeTensor, "__reduce_ex__", _described
    yield FakeTensor, "__copy__", _shallow
    yield from sparse_files(where, moves)
    keep = transformers.PreTrainedModel.save_pretrained

    def save_pretrained(model, *args, **options):
        with patch.object(moving, "SHOWN", 0):  # nobody reads values that are moved to be saved
            return keep(model, *args, **options)

    yield transformers.PreTrainedModel, "save_pretrained", save_pretrained


def _rebuilt(storage, *place):
    """A tensor of real values is real, also if it is read when a function on the card asks for it
    (`_NotYetLoadedTensor` in lightning_fabric/utilities/load.py)."""
    if storage._untyped_storage.device.type != "cpu":
        return REBUILD(storage, *place)
    with _disable_current_modes():
        return REBUILD(storage, *place)


def stored(nbytes: int, card: bool) -> Bytes:
    """The storage of a fake tensor, as a pickle names it."""
    return Bytes(nbytes, is_card(_place(Here.asked, "cuda:0" if card else "cpu")))


def restored(storage: Bytes, dtype, shape, stride, offset, grad: bool, parameter: bool, values):
    """A fake tensor, as a pickle names it."""
    tensor = storage.tensor(dtype, shape, stride, offset)
    tensor._known = values
    return torch.nn.Parameter(tensor, grad) if parameter else tensor.requires_grad_(grad)


class Shared:
    """Names a storage; a pickle keeps what it has met once, and its tensors share it again."""

    about = (0, False)

    def __reduce__(self):
        return stored, self.about


def _described(tensor, protocol: int):
    if tensor.layout != torch.strided or tensor.fake_device.type == "meta":
        return PLAIN(tensor, protocol)
    storage = tensor.untyped_storage()
    if not hasattr(storage, "_shared"):  # torch keeps this object as long as the storage
        storage._shared = Shared()
    storage._shared.about = storage.nbytes(), Here.where.on_card(tensor)
    parameter = isinstance(tensor, torch.nn.Parameter)
    place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    grad = tensor.requires_grad
    return restored, (storage._shared, tensor.dtype, *place, grad, parameter, known(tensor))


def _shallow(tensor):
    """As copy.copy: another tensor on the same storage."""
    other, grad = tensor.detach(), tensor.requires_grad
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(other, grad) if is_parameter else other.requires_grad_(grad)


def _place(asked, tag: str) -> str:
    """Where `map_location` puts what was saved at the place `tag` (torch.serialization:
    _get_restore_location)."""
    if asked is None:
        return tag
    if isinstance(asked, dict):
        return str(asked.get(tag, tag))
    if isinstance(asked, str | torch.device):
        return str(asked)
    answer = asked(Placed(), tag)
    return tag if answer is None else str(answer.device)


def _load(moves: Moves):
    load, guards = torch.load, torch._guards

    def loaded(f, map_location=None, *args, **options):
        if str(map_location) == "meta" or str(f).endswith(".safetensors"):
            return load(f, map_location, *args, **options)
        on_card = set()

        def where_to(storage, tag):
            if is_card(_place(map_location, tag)):
                on_card.add(storage._cdata)
            return storage

        # A fake mode would make torch leave out real values.
        unknown = patch.object(guards, "detect_fake_mode", lambda *_: None)
        active = patch.object(guards, "active_fake_mode", lambda: None)
        with unknown, active, patch.object(Here, "asked", map_location):
            found = load(f, where_to, *args, **options)
        return _upload(found, on_card, moves) if on_card else found

    return loaded


def _upload(found, on_card: set, moves: Moves):
    """What was read, with the real tensors of these storages on the card."""
    storages = {}

    def moved(leaf):
        if isinstance(leaf, torch.nn.Module):
            return leaf.cuda()
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.layout != torch.strided:
            return moves.upload(leaf)
        storage = leaf.untyped_storage()
        if storage._cdata not in on_card:
            return leaf
        if storage._cdata not in storages:
            storages[storage._cdata] = Bytes(storage.nbytes(), True)
        whole, place = storages[storage._cdata], (leaf.stride(), leaf.storage_offset())
        out = whole.tensor(leaf.dtype, leaf.shape, *place).requires_grad_(leaf.requires_grad)
        keep_known(leaf, out)
        return out

    return tree_map(moved, found)


def _save(run):
    save = torch.save

    def saved(what, f, *args, **options):
        try:
            with _disable_current_modes():
                save(what, f, *args, **options)
        except Exception as error:
            if "fake_cuda" not in str(error):
                raise
            run.note(SIMULATED.format("torch.save"))

    return saved
