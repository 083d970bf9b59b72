"""What torch did until 1.10 (2021), with which the classic table was measured."""

from contextlib import AbstractContextManager
from unittest import mock

import torch

from evidence.libraries.behaviour import Behaviour

aten = torch.ops.aten


class _SoftmaxKeepsItsInput(torch.autograd.Function):
    """Until torch 1.11 softmax kept its input as well as its output (pytorch #64000, #65242)."""

    @staticmethod
    def forward(ctx, x, dim):
        out = aten._softmax(x, dim, False)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return aten._softmax_backward_data(grad, out, ctx.dim, x.dtype), None


def _softmax(x, dim=None, _stacklevel=3, dtype=None):
    if torch.is_autocast_enabled("cpu"):
        x = x.float()
    elif dtype is not None:
        x = x.to(dtype)
    return _SoftmaxKeepsItsInput.apply(x, dim)


def _softmax_keeps_its_input() -> AbstractContextManager:
    return mock.patch.object(torch.nn.functional, "softmax", _softmax)


BEHAVIOURS = (Behaviour("softmax keeps its input", "1.11", _softmax_keeps_its_input),)
