"""LoRA and QLoRA of Llama 2 7B over two RTX 3090 or 4090, by Answer.AI's fsdp_qlora.

This module is also the script of a rank. What is behind its choices (train.py of the repository,
with the options of the first command of benchmarks_03_2024.md):

- Everything is in bfloat16, adapters too, as PEFT made them before 0.12 (`autocast_adapter_dtype`),
  and there is no autocast. Quantized weights are stored as bfloat16 numbers.
- Each layer is a unit of FSDP1, each matrix of an adapter another, and what a unit of a layer wraps
  is checkpointed, reentrant. "Whole" is FSDP's NO_SHARD: all weights on each card.
- Gradients are not clipped; what a model returned is let go before the next step.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from transformers import AutoModelForCausalLM

from evidence.cards import card
from evidence.several import as_they_ran
from evidence.sources.fms import text
from evidence.sources.fms_ranks import quantized, units
from fake_cuda import simulate
from fake_cuda.scripts import Script

CARDS = 2
ADAPTED = ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"]
# Of each card: method, length, batch, whether all weights are on each card.
RUNS = {
    "RTX 3090": (
        *(("QLoRA", 512, 1, False), ("QLoRA", 2048, 1, False)),
        *(("LoRA", 512, 1, False), ("LoRA", 2048, 1, False)),
        *(("QLoRA", 2048, 4, False), ("QLoRA", 2048, 10, False)),
        *(("LoRA", 2048, 4, False), ("LoRA", 2048, 6, False)),
        *(("QLoRA", 2048, 8, True), ("LoRA", 2048, 4, True)),
    ),
    "RTX 4090": (
        *(("LoRA", 2048, 4, True), ("LoRA", 2048, 6, False)),
        *(("QLoRA", 2048, 8, True), ("QLoRA", 2048, 10, False)),
    ),
}


def made(method: str):
    """The model with its adapters, on the host."""
    model = AutoModelForCausalLM.from_config(
        text("llama-2-7b").config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if method == "QLoRA":
        quantized(model)
    config = LoraConfig(r=64, lora_alpha=16, lora_dropout=0.1, target_modules=ADAPTED)
    return get_peft_model(model, config, autocast_adapter_dtype=False).train()


def sharded(model, whole: bool) -> FSDP:
    layer = type(model.get_base_model().model.layers[0])
    model = FSDP(
        model,
        sharding_strategy=ShardingStrategy.NO_SHARD if whole else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=units(layer, adapters=True),
        use_orig_params=False,
        sync_module_states=True,
        device_id=torch.cuda.current_device(),
    )
    model.enable_input_require_grads()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        check_fn=lambda module: isinstance(module, layer),
    )
    return model


def train(method: str, length: int, batch: int, whole: bool) -> None:
    """Steps of rank 0."""
    dist.init_process_group("nccl")
    model = sharded(made(method), whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, eps=1e-5)
    for _ in range(3):
        tokens = torch.ones(batch, length, dtype=torch.long)
        output = model(input_ids=tokens.to("cuda"), labels=tokens.to("cuda"))
        loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        output = loss = None


def run(name: str, method: str, length: int, batch: int, whole: bool) -> dict[str, int]:
    """Predict a run."""
    given = [method, str(length), str(batch), "whole" if whole else "cut"]
    return {
        "reserved": simulate(Script(__file__, given, ranks=CARDS), card=card(name)).peak_reserved
    }


def measured() -> Iterator[tuple[str, Callable]]:
    for name, lines in RUNS.items():
        for method, length, batch, whole in lines:
            said = f"Llama-2 7B {method}, length {length}, batch {batch}{', whole' * whole}"
            yield f"{said}, {CARDS} {name}", partial(run, name, method, length, batch, whole)


PEAKS = {"fsdp-qlora": lambda: as_they_ran("fsdp-qlora", measured())}

if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "whole")
