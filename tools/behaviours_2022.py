"""What the libraries of January 2022 (torch 1.10, transformers 4.15) did with memory, switched on.

The classic table was measured with them. Each behaviour below is documented and has no number to
tune; with all of them on, `predict` must reproduce the table, and switching them off one by one
shows what four years of library work changed. Used by the tests and by the recorded predictions,
never by the helpers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from transformers.optimization import Adafactor

from fake_cuda import trace
from helpers import Prediction, Workload, predict, text_classification

aten = torch.ops.aten
BEHAVIOURS = ("softmax keeps its input", "gradients zeroed, not freed", "eager attention")


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
    return _SoftmaxKeepsItsInput.apply(x, dim)


def _zero_grad(module, set_to_none=False):
    """Until torch 2.0 the default was to fill gradients with zeros, so they stood in forward."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


@contextmanager
def behaving(behaviours: tuple[str, ...]) -> Iterator[None]:
    """Switch behaviours of 2022 on for a block."""
    with ExitStack() as stack:
        if behaviours:
            # cuBLAS's workspace came into the caching allocator with torch 1.11 (pytorch #61632).
            patch = mock.patch.object(trace, "workspace", lambda capability: 0)
            stack.enter_context(patch)
        if "softmax keeps its input" in behaviours:
            stack.enter_context(mock.patch.object(torch.nn.functional, "softmax", _softmax))
        if "gradients zeroed, not freed" in behaviours:
            stack.enter_context(mock.patch.object(torch.nn.Module, "zero_grad", _zero_grad))
        yield


def _eager(model):
    model.set_attn_implementation("eager")
    return model


def adam(model, args):
    """AdamW parameter by parameter: foreach became the default with torch 2.0."""
    return torch.optim.AdamW(model.parameters(), foreach=False)


def adam_8bit(model, args):
    """As the guide built it by hand: every tensor in 8 bits, embeddings too."""
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(model.parameters())


def adafactor(model, args):
    return Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)


OPTIMIZERS: dict[str, Callable] = {"adam": adam, "8-bit Adam": adam_8bit, "Adafactor": adafactor}
ALL = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
ALL |= {"activation_checkpointing": True, "fp16": True}
# The nine runs of the classic table: (optimizer, keywords of TrainingArguments in today's words).
CLASSIC: dict[str, tuple[str, dict]] = {
    "vanilla": ("adam", {"per_device_train_batch_size": 4}),
    "accumulation": ("adam", {k: ALL[k] for k in list(ALL)[:2]}),
    "accumulation + checkpointing": ("adam", {k: ALL[k] for k in list(ALL)[:3]}),
    "fp16": ("adam", {"per_device_train_batch_size": 4, "fp16": True}),
    "fp16 + accumulation + checkpointing": ("adam", ALL),
    "Adafactor": ("Adafactor", {"per_device_train_batch_size": 4}),
    "Adafactor + fp16 + accumulation + checkpointing": ("Adafactor", ALL),
    "8-bit Adam": ("8-bit Adam", {"per_device_train_batch_size": 4}),
    "8-bit Adam + fp16 + accumulation + checkpointing": ("8-bit Adam", ALL),
}
TODAY = {"adam": "adamw_torch_fused", "8-bit Adam": "adamw_bnb_8bit", "Adafactor": "adafactor"}


def classic(run: str, behaviours: tuple[str, ...] = BEHAVIOURS, gpu: str = "V100") -> Prediction:
    """Predict a run of the classic table with some behaviours of 2022; with none, today's defaults.

    KeyError for a run that is not in `CLASSIC`.
    """
    optimizer, settings = CLASSIC[run]
    workload: Workload = text_classification("large")
    if not behaviours:
        return predict(workload, run, gpu=gpu, optim=TODAY[optimizer], **settings)
    if "eager attention" in behaviours:
        workload = workload.with_model(_eager)
    with behaving(behaviours):
        options = {"gpu": gpu, "optimizer": OPTIMIZERS[optimizer]}
        return predict(workload, run, **options, **settings)
