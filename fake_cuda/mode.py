"""Fake tensors as torch makes them, told apart in less time.

Torch remembers what an operation returns for tensors of one shape. Half of a simulation went by in
writing down the key under which it looks that up: seventeen fields of each tensor, most of which
follow from the others or are the same for every tensor of a training run. Half of the rest went by
on the way there, and in checking again what a new fake tensor is told.
"""

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    _CacheKeyState,
    _DispatchCacheKey,
    _DispatchCacheValidEntry,
)

from .refusals import OUTSIDE, NotSimulated

_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}
_PLAIN.add(torch.memory_format)


class OneMode(FakeTensorMode):
    """The fake tensors of one simulation."""

    def __init__(self, **options):
        super().__init__(**options)
        self.told: dict[torch.device, dict] = {}  # what a fake tensor knows of itself, by device
        self.state = _CacheKeyState(None)  # of sizes that are numbers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard of torch's stands around each dispatch: `compiled` keeps compilers out."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Torch's, after a look at what it remembers."""
        if self.cache_enabled and not self.cache_crosscheck_enabled:
            key = self._short_key(func, args, kwargs)
            entry = key and self.cache.get(key)
            if type(entry) is _DispatchCacheValidEntry:
                return self._output_from_cache_entry(self.state, entry, key, func, args)
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> "OneMode":
        """A copied tensor belongs to the same simulation, not to a copy of it (peft, averages)."""
        return self

    def validate_and_convert_non_fake_tensors(self, *args, **kwargs):
        """Torch's check, whose error says that a tensor is not of this simulation."""
        try:
            return super().validate_and_convert_non_fake_tensors(*args, **kwargs)
        except AssertionError as error:
            raise NotSimulated.uses(OUTSIDE) from error

    def _cache_key(self, state, func, args, kwargs):
        """Torch's key without what follows from the rest; torch's own for uncommon arguments."""
        return self._short_key(func, args, kwargs) or super()._cache_key(state, func, args, kwargs)

    def _short_key(self, func, args, kwargs) -> _DispatchCacheKey | None:
        """The key without what follows from the rest; None for uncommon arguments."""
        key = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        common = self.shape_env is None and self._describe(key, args)
        if common and kwargs:
            key += kwargs
            common = self._describe(key, kwargs.values())
        return _DispatchCacheKey(tuple(key)) if common else None

    def _get_output_tensor_from_cache_entry(self, state, entry, key, func, args):
        """Torch's, for what is neither a number, an argument, nor seen conjugated or negated."""
        known = entry.metadata
        if known is None or known.is_conj or known.is_neg or self.shape_env is not None:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        with torch._C._DisableTorchDispatch():
            found = torch.empty_strided(
                known.shape,
                known.stride,
                dtype=known.dtype,
                device="meta",
                requires_grad=known.requires_grad,
            )
            if func.is_view:
                storage = args[entry.view_idx].untyped_storage()
                found.set_(storage, known.storage_offset, known.shape, known.stride)
        return self._fake(found, known.device)

    def _fake(self, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
        """`FakeTensor(self, tensor, device)`: the first one's attributes are those of all."""
        told = self.told.get(device)
        if told is None or not self._allow_unsafe_data_ptr_access:
            found = FakeTensor(self, tensor, device)
            self.told[device] = dict(found.__dict__)
            return found
        found = torch.Tensor._make_subclass(
            FakeTensor,
            tensor,
            tensor.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(found)
        found.__dict__.update(told)
        return found

    def _describe(self, key: list, values) -> bool:
        """Append to `key` all of `values` that results may depend on; False if that is not known.

        A type goes before each number, for 1 and 1.0 are the same key. Strides tell the memory
        format, and a strided tensor is neither sparse nor coalesced.
        """
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if (
                    value.fake_mode is not self
                    or value.constant is not None
                    or value.layout is not torch.strided
                    or value._has_symbolic_sizes_strides
                ):
                    return False
                key += (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    value.fake_device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
                    value.is_quantized,
                )
            elif kind in _PLAIN:
                key += kind, value
            elif kind is list or kind is tuple:
                key += kind, len(value)
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True
