"""Lesson 19: a mixture of experts, dense models beside it, and blocks that some tokens skip."""

import dataclasses
import functools
from collections.abc import Iterator

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

from helpers import language_modelling, predict

CARD, BATCH, EXPERTS, CHOSEN, WIDTH = "A100-40GB", 4, 8, 2, 3072
SHAPE = dict(vocab_size=32000, hidden_size=1024, num_hidden_layers=12, use_cache=False)
SHAPE |= dict(num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096)


def workload(config):
    large = language_modelling("tinyllama-1.1b", length=1024)
    return dataclasses.replace(large, name=config.model_type, config=config, weights=None)


def predicted(config, *changes):
    found = workload(config)
    for change in changes:
        found = found.with_model(change)
    settings = {"per_device_train_batch_size": BATCH, "bf16": True}
    return functools.partial(predict, found, gpu=CARD, **settings)


def experts() -> Iterator[tuple]:
    """Eight experts in each layer or every other one, and dense models of their cost and size."""
    few = dict(num_experts_per_tok=CHOSEN, output_router_logits=True)
    mixture = MixtralConfig(**SHAPE, **few, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    yield "experts", "each layer", predicted(mixture)
    for name, width in {"same cost": CHOSEN * WIDTH, "same size": EXPERTS * WIDTH}.items():
        yield "dense", name, predicted(LlamaConfig(**SHAPE, intermediate_size=width))
    widths = dict(moe_intermediate_size=WIDTH, intermediate_size=CHOSEN * WIDTH, head_dim=64)
    sparse = Qwen3MoeConfig(**SHAPE, **few, **widths, num_experts=EXPERTS, decoder_sparse_step=2)
    yield "experts", "every other layer", predicted(sparse)


def in_half(model):
    return model.to(torch.bfloat16)


def experts_in_half() -> Iterator[tuple]:
    """The same with weights in 16 bits, which autocast does not make of experts."""
    for run, variant, job in experts():
        if variant != "every other layer":
            yield (
                run,
                variant,
                functools.partial(job.func, job.args[0].with_model(in_half), **job.keywords),
            )


def experts_tf32() -> Iterator[tuple]:
    """The same with `tf32=True`: what stays in 32 bits runs on the Tensor Cores all the same."""
    for run, variant, job in experts():
        if variant != "every other layer":
            yield run, variant, functools.partial(job.func, *job.args, tf32=True, **job.keywords)


def adapted(targets, model):
    return get_peft_model(in_half(model), LoraConfig(r=8, target_modules=targets))


def experts_adapters() -> Iterator[tuple]:
    """LoRA on the attention alone and on all that PEFT finds, the weights in 16 bits."""
    _, _, job = next(experts())
    names = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "all-linear": "all-linear"}
    for again in (False, True):
        for name, targets in names.items():
            mixture = job.args[0].with_model(functools.partial(adapted, targets))
            settings = job.keywords | {"activation_checkpointing": again}
            variant = f"{name}, checkpointing" if again else name
            yield "LoRA", variant, functools.partial(job.func, mixture, **settings)


class Depths(nn.Module):
    """A block that only the tokens with the highest scores enter."""

    def __init__(self, block, width: int, capacity: float):
        super().__init__()
        self.block, self.score, self.capacity = block, nn.Linear(width, 1, bias=False), capacity

    def forward(self, x, position_embeddings, **rest):
        score = self.score(x)
        at = score.topk(int(self.capacity * x.shape[1]), dim=1).indices.sort(dim=1).values
        places = at.expand(-1, -1, x.shape[-1])
        turns = [t.expand(len(x), -1, -1) for t in position_embeddings]
        turns = [t.gather(1, at.expand(-1, -1, t.shape[-1])) for t in turns]
        entered = x.gather(1, places)
        change = self.block(entered, position_embeddings=turns, **rest) - entered
        return x.scatter_add(1, places, change * torch.sigmoid(score.gather(1, at)))


def skipping(capacity: float, model):
    """Every other block."""
    for i in range(1, len(model.model.layers), 2):
        model.model.layers[i] = Depths(model.model.layers[i], model.config.hidden_size, capacity)
    return model


def depths() -> Iterator[tuple]:
    dense = LlamaConfig(**SHAPE, intermediate_size=CHOSEN * WIDTH)
    yield "depths", "all tokens", predicted(dense)
    for capacity in (0.5, 0.125):
        run = predicted(dense, functools.partial(skipping, capacity))
        yield "depths", f"capacity {capacity}", run


SETS = (experts, experts_in_half, experts_tf32, experts_adapters, depths)
