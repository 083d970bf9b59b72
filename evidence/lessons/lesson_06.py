"""Lesson 06: fp32, tf32, 16-bit autocast and pure bf16 over the micro-batch, on an A100."""

import itertools
from collections.abc import Iterator

import torch

from helpers import language_modelling, predict, text_classification

LENGTH = 128
BATCHES = (1, 4, 8, 16, 32)
MODELS = {"bert-large-uncased": text_classification, "tinyllama-1.1b": language_modelling}
PRECISIONS = {"fp32": {}, "bf16 autocast": {"bf16": True}, "pure bf16": {}, "tf32": {"tf32": True}}


def to_bf16(model):
    return model.to(torch.bfloat16)


def precision() -> Iterator[tuple]:
    """Gradients stand through the forward pass where there are two micro-batches a step."""
    jobs = [(2, *job) for job in itertools.product(MODELS, BATCHES, PRECISIONS)]
    jobs += [
        (1, "bert-large-uncased", *job) for job in itertools.product((1, 32), [*PRECISIONS][:2])
    ]
    for micro_batches, model, batch, name in jobs:

        def run(micro_batches=micro_batches, model=model, batch=batch, name=name):
            workload = MODELS[model](model, length=LENGTH)
            if name == "pure bf16":
                workload = workload.with_model(to_bf16)
            settings = {"per_device_train_batch_size": batch, "optim": "adamw_torch_fused"}
            settings |= {"gradient_accumulation_steps": micro_batches}
            return predict(workload, gpu="A100-40GB", **settings, **PRECISIONS[name])

        yield f"{model}, batch {batch}, micro-batches {micro_batches}", name, run


SETS = (precision,)
