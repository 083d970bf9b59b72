"""What torch did until 1.13 (2022): two defaults that its 2.0 changed (its release notes; gradients
that are zeros: pull request 92731)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.optim import adam, sgd

from evidence.libraries.behaviour import Behaviour


def _zero(parameters: Iterable, set_to_none: bool) -> None:
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


@contextmanager
def _gradients_zeroed() -> Iterator[None]:
    """The default was to fill gradients with zeros, one after another, so they stood in forward
    (`zero_grad` in torch/nn/modules/module.py and torch/optim/optimizer.py of 1.13: set_to_none is
    False)."""

    def of_module(module, set_to_none=False):
        _zero(module.parameters(), set_to_none)

    def of_optimizer(optimizer, set_to_none=False):
        groups = optimizer.param_groups
        _zero((p for group in groups for p in group["params"]), set_to_none)

    with (
        mock.patch.object(torch.nn.Module, "zero_grad", of_module),
        mock.patch.object(torch.optim.Optimizer, "zero_grad", of_optimizer),
    ):
        yield


@contextmanager
def _without_lists() -> Iterator[None]:
    """An optimizer went from parameter to parameter unless it was told `foreach=True` (`foreach` in
    torch/optim/adam.py and sgd.py of 1.13: None is False)."""

    def neither(*_, **__):  # fused, foreach
        return False, False

    with (
        mock.patch.object(adam, "_default_to_fused_or_foreach", neither),
        mock.patch.object(sgd, "_default_to_fused_or_foreach", neither),
    ):
        yield


BEHAVIOURS = (
    Behaviour("gradients zeroed, not freed", "2.0", _gradients_zeroed),
    Behaviour("optimizers without lists", "2.0", _without_lists),
)
