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


def loop(clips: bool, batch: int = 8) -> Callable:
    """Two steps of BERT-large in a loop of one's own, with or without clipping."""
    workload = text_classification("large")

    def run():
        model = workload.model().train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        shape = (batch, workload.length)
        for _ in range(2):
            ids, labels = torch.ones(shape, dtype=torch.long), torch.ones(batch, dtype=torch.long)
            model(input_ids=ids, labels=labels).loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def freezing() -> Iterator[tuple]:
    for count in COUNTS:
        yield "from the bottom", count, _run(freeze(0, count, embeddings=count > 0))
        yield "layers alone", count, _run(freeze(0, count, False))
        yield "from the top", count, _run(freeze(24 - count, 24, False))


def dynamics() -> Iterator[tuple]:
    for name, optimizer in {"adamw": adamw, "averaged": averaged}.items():
        yield name, "", _run(optimizer=optimizer)
    # Trainer computes the norm of all gradients also where it does not clip: a loop need not.
    for name, clips in {"a loop that clips": True, "a loop that does not": False}.items():
        yield name, "", lambda clips=clips: predict(loop(clips), gpu="T4")


def _run(change: Callable | None = None, **options) -> Callable:
    workload = text_classification("large")
    workload = workload.with_model(change) if change else workload
    return lambda: predict(workload, gpu="T4", per_device_train_batch_size=8, **options)


SETS = (freezing, dynamics)
