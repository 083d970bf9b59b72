"""What lessons and published sources share: weights in 16, 8 and 4 bits, attention, plain loops."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import bitsandbytes as bnb
import torch
from transformers.masking_utils import AttentionMaskInterface


def half(model):
    return model.to(torch.bfloat16)


def quantized(kind: type, **options) -> Callable:
    """Every linear layer but the last in 8 or 4 bits, the rest in 16."""

    def change(model):
        model = half(model)
        for name, old in list(model.named_modules()):
            if type(old) is torch.nn.Linear and old is not model.get_output_embeddings():
                new = kind(old.in_features, old.out_features, old.bias is not None, **options)
                new.load_state_dict(old.state_dict())
                model.set_submodule(name, new.to("cpu"))
        return model

    return change


FOUR = {"quant_type": "nf4", "compute_dtype": torch.bfloat16}
# Without the threshold for outliers: how many there are depends on values, which fakes do not have.
INT8 = quantized(bnb.nn.Linear8bitLt, has_fp16_weights=False)
NF4 = quantized(bnb.nn.Linear4bit, **FOUR, compress_statistics=False)
NF4_TWICE = quantized(bnb.nn.Linear4bit, **FOUR)


def padded(ids: torch.Tensor) -> torch.Tensor:
    """A mask that stays: today's transformers drops one of ones alone, older ones added it."""
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return mask


def image_steps(
    model,
    batch: int,
    optimizer: torch.optim.Optimizer,
    autocast: bool = False,
    scale: bool = False,
    last: bool = False,
    waits: bool = True,
) -> None:
    """Two steps of a classifier on pictures of 224 pixels.

    Args:
        model: returns logits, or an object that has them.
        autocast: to float16.
        scale: the loss, by a gradient scaler.
        last: pictures lie with channels last, as the model then must.
        waits: the host waits for the loss of each step.
    """
    pictures, classes = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
    if last:
        pictures = pictures.contiguous(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler("cpu", enabled=scale)
    for _ in range(2):
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            out = model(pictures)
            loss = torch.nn.functional.cross_entropy(getattr(out, "logits", out), classes)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if waits:
            loss.item()
        optimizer.zero_grad()


def sgd(model, **options) -> torch.optim.SGD:
    """SGD as the sources of image models have it."""
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    return torch.optim.SGD(model.parameters(), **settings | options)


@contextmanager
def flash_attn() -> Iterator[None]:
    """The package flash-attn, for which torch's flash kernel stands in: it gets no mask for texts
    without padding, and a window as wide as the text is none (`_flash_attention_forward` in
    modeling_flash_attention_utils.py of transformers 4.48.1, and of today's)."""
    masks = AttentionMaskInterface._global_mapping
    with mock.patch.dict(masks, sdpa=lambda *_, **__: None):
        yield
