"""The fine-tuning of `fms.py` over two cards, of which rank 0 is run: FSDP1 by accelerate 1.0.1.

This module is also the script of a rank. What is behind its choices, in the versions measured:

- Each layer is a unit, each matrix of an adapter another (`fsdp_auto_wrap_policy` in
  peft/utils/other.py, which `_fsdp_qlora_plugin_updates` in trainer.py sets), the rest the root.
  The options are those of scripts/benchmarks/accelerate.yaml; what it leaves out has the defaults
  of accelerate/commands/launch.py: `use_orig_params`, say.
- Weights are loaded to the host, and a layer comes to the card when it is wrapped
  (`_load_state_dict_into_meta_model` in modeling_utils.py). What bitsandbytes knows of a quantized
  weight, its scales, is no parameter: each card has all of it.
- Quantized weights are stored as bfloat16 numbers, or FSDP could not join them with others. "QLoRA,
  prepared" is not prepared over several cards: TRL leaves it out where quantized weights are on the
  host (`is_sharded_qlora` in sft_trainer.py), and adapters stay in 16 bits.
- With mixed precision the model runs under autocast, hands out 32 bits, and trained weights in 16
  bits become 32 (`prepare_model` in accelerator.py).
- A checkpoint is around a unit, which therefore runs anew in backward, gathered twice
  (`_gradient_checkpointing_func` in the models of transformers 4.48). Today's is inside.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from accelerate.utils import convert_outputs_to_fp32
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from evidence.cards import card
from evidence.several import as_they_ran
from evidence.sources.fms import ATTENTION, MODELS, quantities
from evidence.techniques import FOUR
from fake_cuda import simulate
from fake_cuda.scripts import Script

CARDS, LENGTH = 2, 4096
BF16 = torch.bfloat16
SECONDS = 1800.0  # for 70 billion weights


def quantized(model) -> None:
    """Every linear layer but the last in 4 bits, on the host, what is known of them on the card."""
    for name, old in list(model.named_modules()):
        if type(old) is torch.nn.Linear and old is not model.get_output_embeddings():
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, old.bias is not None, **FOUR, quant_storage=BF16
            )
            new.load_state_dict(old.state_dict())
            new.to("cpu").quant_state.to("cuda")
            del new.weight.to  # the stand-in of a quantized weight takes these for 16-bit weights
            if old.bias is not None:
                new.bias.data = new.bias.data.to(BF16)
            new.weight.requires_grad_(False)
            model.set_submodule(name, new)


def adapted(model, in_16_bits: bool):
    """LoRA, its input hooked as the trainer or the plugin does it before."""
    model.enable_input_require_grads()
    config = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=ATTENTION)
    return get_peft_model(model, config, autocast_adapter_dtype=not in_16_bits)


def made(name: str, method: str):
    """The model on the host, as the trainer is given it."""
    config = MODELS[name][0].config
    model = AutoModelForCausalLM.from_config(
        config, dtype=BF16, attn_implementation="flash_attention_2"
    )
    model.config.use_cache = False
    if "QLoRA" in method:
        quantized(model)
    if "LoRA" in method:
        model = adapted(model, in_16_bits=method == "QLoRA, prepared")
    return model.train()


def units(layer: type, adapters: bool) -> Callable:
    """The policy by which modules become units: layers, and the matrices of adapters."""

    def unit(module, recurse: bool, nonwrapped_numel: int) -> bool:
        weight = None if list(module.children()) else getattr(module, "weight", None)
        alone = adapters and weight is not None and weight.requires_grad
        return recurse or type(module) is layer or alone

    return unit


def sharded(model, adapters: bool, mixed: bool):
    """The model as accelerate hands it back, with a checkpoint around each layer."""
    base = model.get_base_model() if adapters else model
    if mixed:
        model.forward = convert_outputs_to_fp32(torch.autocast("cuda", BF16)(model.forward))
    model = FSDP(
        model,
        auto_wrap_policy=units(type(base.model.layers[0]), adapters),
        mixed_precision=MixedPrecision(BF16, BF16, BF16) if mixed else None,
        sync_module_states=True,
        use_orig_params=True,
        device_id=torch.cuda.current_device(),
    )
    for unit in FSDP.fsdp_modules(model):
        flat = unit._flat_param if unit._has_params else None
        if mixed and flat is not None and flat.requires_grad and flat.dtype != torch.float32:
            flat.data = flat.data.to(torch.float32)
            unit._handle._orig_param_dtype = torch.float32
    for layer in base.model.layers:
        layer.forward = partial(checkpointed, layer.forward)
    return model


def checkpointed(forward: Callable, hidden, **options):
    return checkpoint(partial(forward, **options), hidden, use_reentrant=True)


def loss_of(model, batch: int):
    """What a model returned lives no longer than this."""
    tokens = torch.ones(batch, LENGTH, dtype=torch.long).to("cuda")
    return model(input_ids=tokens, labels=tokens.clone()).loss


def train(name: str, method: str, batch: int) -> None:
    """Steps of rank 0."""
    dist.init_process_group("nccl")
    model = sharded(made(name, method), "LoRA" in method, "QLoRA" in method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01, eps=1e-4)
    for _ in range(3):
        loss_of(model, batch).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()


def run(name: str, method: str, batch: int) -> dict[str, int]:
    """Predict a run, with so many texts a card."""
    script = Script(__file__, [name, method, str(batch)], ranks=CARDS, seconds=SECONDS)
    return quantities(simulate(script, card=card("A100-80GB")))


def measured() -> Iterator[tuple[str, Callable]]:
    """Both batches of `fms.py`, half of each on a card."""
    methods_of = {name: methods for name, (_, methods) in MODELS.items()}
    # Prepared, it was measured on two cards alone.
    methods_of["Llama-2-70B"] = {"QLoRA, prepared": (4,), "QLoRA": (4,)}
    for name, methods in methods_of.items():
        for method, batches in methods.items():
            for batch in (n // CARDS for n in batches):
                yield f"{name} {method}, batch {batch}, 2 cards", partial(run, name, method, batch)


PEAKS = {"fms-fsdp": lambda: as_they_ran("fms-fsdp", measured())}

if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
