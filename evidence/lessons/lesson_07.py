"""Lesson 07: a step on a T4, samples of 512 tokens, under each optimizer and by batch size."""

import itertools
from collections.abc import Iterator

import torch
from torch.optim import AdamW, Muon

from helpers import language_modelling, predict, text_classification

MODELS = {"bert-large-uncased": text_classification, "tinyllama-1.1b": language_modelling}
LOW_RANK = {"optim_target_modules": "all-linear", "optim_args": "rank=128"}
OPTIMIZERS = {
    name: {}
    for name in (
        "adamw_torch_fused adamw_torch ademamix schedule_free_adamw rmsprop lion_32bit sgd "
        "adamw_bnb_8bit paged_adamw_8bit lion_8bit adafactor lomo"
    ).split()
} | {"galore_adamw": LOW_RANK, "apollo_adamw": LOW_RANK}


def optimizers() -> Iterator[tuple]:
    for model, name in itertools.product(MODELS, OPTIMIZERS):

        def run(model=model, name=name):
            workload = MODELS[model](model, length=512)
            settings = {"per_device_train_batch_size": 1, "optim": name, **OPTIMIZERS[name]}
            return predict(workload, gpu="T4", **settings)

        yield model, name, run


def foreach() -> Iterator[tuple]:
    """From which batch on the temporaries of foreach hide below the activations: exercise 7.1."""
    workload = text_classification("bert-large-uncased", length=512)
    for batch, name in itertools.product((1, 2, 4, 8, 16), ("adamw_torch_fused", "adamw_torch")):

        def run(batch=batch, name=name):
            return predict(workload, gpu="T4", per_device_train_batch_size=batch, optim=name)

        yield f"batch {batch}", name, run


def one_by_one(model, args):
    return AdamW(model.parameters(), lr=args.learning_rate, foreach=False)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the layers' matrices, AdamW for all other weights: the lesson's class."""

    def __init__(self, model, lr, weight_decay=0.0):
        matrices, others = [], []
        for name, weight in model.named_parameters():
            (matrices if weight.ndim == 2 and ".layer" in name else others).append(weight)
        muon = Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw")
        self.parts = muon, AdamW(others, lr, weight_decay=0.0, fused=True)
        super().__init__([part.param_groups[0] for part in self.parts], {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def muon(model, args):
    return MuonAdamW(model, args.learning_rate)


UPDATES = {
    "for-loop": {"optimizer": one_by_one},
    "foreach": {"optim": "adamw_torch"},
    "fused": {"optim": "adamw_torch_fused"},
    "8-bit": {"optim": "adamw_bnb_8bit"},
    "Adafactor": {"optim": "adafactor"},
    "Muon": {"optimizer": muon},
}


def updates() -> Iterator[tuple]:
    """What the update costs on a fast card, in a small step and in a large one."""
    workload = text_classification("bert-large-uncased", length=128)
    for batch, name in itertools.product((1, 32), UPDATES):

        def run(batch=batch, name=name):
            size = {"per_device_train_batch_size": batch, "fp16": True}
            return predict(workload, gpu="H100", **size, **UPDATES[name])

        yield f"batch {batch}", name, run


SETS = (optimizers, foreach, updates)
