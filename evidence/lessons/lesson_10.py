"""Lesson 10: what fusing could save at most, and adapters on 4 bits under the compiler."""

import itertools
from collections.abc import Iterator

import torch

from evidence.compiled_steps import lora
from evidence.techniques import NF4
from helpers import language_modelling, predict, text_classification


def fusing() -> Iterator[tuple]:
    for card, batch in itertools.product(("T4", "A100-40GB", "H100"), (1, 4, 16, 64)):

        def run(card=card, batch=batch):
            workload = text_classification("bert-large-uncased", length=128)
            return predict(workload, gpu=card, per_device_train_batch_size=batch, fp16=True)

        yield f"batch {batch}", card, run


def to_bf16(model):
    return model.to(torch.bfloat16)


def compiled_bits() -> Iterator[tuple]:
    """Two layers at their true width: the compiler needs minutes for all of them."""
    bases = {"16 bits": to_bf16, "4 bits": NF4}
    for (bits, base), compiled in itertools.product(bases.items(), (False, True)):

        def run(base=base, compiled=compiled):
            workload = language_modelling("llama-3.2-1b", length=512)
            workload.config.num_hidden_layers = 2
            workload = workload.with_model(base).with_model(lora)
            settings = {"per_device_train_batch_size": 4, "bf16": True, "torch_compile": compiled}
            return predict(workload, gpu="A100-40GB", **settings)

        yield bits, "compiled" if compiled else "eager", run


SETS = (fusing, compiled_bits)
