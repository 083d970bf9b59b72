"""Lesson 15: BERT-large on a T4, by the Trainer and by a loop of one's own, line by line."""

import itertools
from collections.abc import Iterator

import bitsandbytes as bnb
import torch
from accelerate import Accelerator

from helpers import predict, text_classification

# What each recipe adds to the one before: the loop's words, and the keywords of the Trainer.
RECIPES = {
    "plain": ({}, {}),
    "+ 1 x 4": (
        {"micro": 1, "accumulation": 4},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    ),
    "+ mixed precision": ({"precision": "fp16"}, {"fp16": True}),
    "+ checkpointing": ({"checkpointing": True}, {"activation_checkpointing": True}),
    "+ 8-bit AdamW": ({"bits": 8}, {"optimizer": lambda model, args: adamw(model, 8)}),
}


def adamw(model, bits):
    if bits == 8:
        return bnb.optim.AdamW8bit(model.parameters(), lr=5e-5, weight_decay=0.0)
    return torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)


def loop(workload, micro=4, accumulation=1, precision="no", checkpointing=False, bits=32):
    """Two steps, on fake tensors."""
    options = {"mixed_precision": precision, "gradient_accumulation_steps": accumulation}
    accelerator = Accelerator(cpu=True, **options)
    model = workload.model(pretrained=False)
    if checkpointing:
        model.activation_checkpointing_enable()
    model, optimizer = accelerator.prepare(model, adamw(model, bits))
    batch = workload.collate([workload.sample()] * micro)
    for _ in range(2 * accumulation):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def accelerate_loop() -> Iterator[tuple]:
    classic = text_classification("large")
    steps = list(itertools.accumulate(RECIPES.values(), lambda a, b: (a[0] | b[0], a[1] | b[1])))
    for name, (ours, theirs) in zip(RECIPES, steps, strict=True):
        theirs = {"per_device_train_batch_size": 4} | theirs

        def own_loop(settings=ours):
            loop(classic, **settings)

        yield name, "loop", lambda function=own_loop: predict(function, gpu="T4")
        yield name, "Trainer", lambda s=theirs: predict(classic, gpu="T4", **s)


SETS = (accelerate_loop,)
