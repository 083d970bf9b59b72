"""Llama on a B200 under Hugging Face's code, timed by stas00/ml-engineering (training/performance).

One text in bfloat16 with torch's attention: a forward pass without gradients, one with backward,
layers recomputed, and a step of AdamW. What a step leaves lives until the end.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evidence.cards import card
from fake_cuda import Simulation, simulate
from helpers.hardware import data_file

MODELS = {"llama-3.2-1b": 512, "llama-3.1-8b": 8192}  # of data/configs: tokens of the text
STAGES = ("forward", "forward and backward", "step")


def train(config: str, length: int, stage: str) -> Simulation:
    def run():
        shape = AutoConfig.from_pretrained(data_file("configs", f"{config}.json"), use_cache=False)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        ids = torch.zeros(1, length, dtype=torch.long)
        if stage == "forward":
            with torch.no_grad():
                return model.eval(), model(input_ids=ids)
        model.train().gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters()) if stage == "step" else None
        for _ in range(2 if optimizer else 1):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if optimizer:
                optimizer.step()
            model.zero_grad(set_to_none=True)
        return model, optimizer

    return simulate(run, card=card("B200"))


def runs() -> Iterator[tuple[str, Callable]]:
    for config, length in MODELS.items():
        name = config.replace("llama", "Llama").replace("b", "B")
        for stage in STAGES:
            yield f"{name}, {stage}", partial(train, config, length, stage)


STEPS = {"book-b200": runs}
