"""Lesson 20: BERT-large with layers frozen from the bottom or the top, averaged, and clipped."""

from collections.abc import Callable, Iterator

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from helpers import predict, text_classification

COUNTS = (0, 6, 12, 18, 24)


def freeze(first: int, last: int, embeddings: bool) -> Callable:
    """Layers from `first` up to `last`, without it, do not train."""

    def change(model):
        model.bert.embeddings.requires_grad_(not embeddings)
        for layer in model.bert.encoder.layer[first:last]:
            layer.requires_grad_(False)
        return model

    return change


def adamw(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)


def averaged(model, args):
    optimizer = adamw(model, args)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    optimizer.average = average
    return optimizer


def freezing() -> Iterator[tuple]:
    for count in COUNTS:
        yield "from the bottom", count, _run(freeze(0, count, embeddings=count > 0))
        yield "layers alone", count, _run(freeze(0, count, False))
        yield "from the top", count, _run(freeze(24 - count, 24, False))


def dynamics() -> Iterator[tuple]:
    for name, optimizer in {"adamw": adamw, "averaged": averaged}.items():
        yield name, "", _run(optimizer=optimizer)
    for norm in (0.0, 1.0):
        yield "clipped at", norm, _run(max_grad_norm=norm)


def _run(change: Callable | None = None, **options) -> Callable:
    workload = text_classification("large")
    workload = workload.with_model(change) if change else workload
    return lambda: predict(workload, gpu="T4", per_device_train_batch_size=8, **options)


SETS = (freezing, dynamics)
