"""Lesson 13: LoRA on a base of 16, 8 and 4 bits."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import LlamaConfig, Qwen3Config
from transformers.integrations import sdpa_attention

from evidence.techniques import INT8, NF4, NF4_TWICE, half
from fake_cuda import rules_of
from helpers import Prediction, Workload, language_modelling, predict


def prepared(model):
    return prepare_model_for_kbit_training(NF4_TWICE(model), use_gradient_checkpointing=False)


def lora(model, **options):
    return get_peft_model(model, LoraConfig(**{"r": 16, "target_modules": "all-linear"} | options))


def adapted(workload: Workload, base: Callable) -> Workload:
    return workload.with_model(base).with_model(lora)


ONE = {"per_device_train_batch_size": 1}
CHECKPOINTED = ONE | {"activation_checkpointing": True}
PAGED = CHECKPOINTED | {"optim": "paged_adamw_8bit"}
QWEN3_14B = Qwen3Config(  # the shape of Qwen/Qwen3-14B
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=17408,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    use_cache=False,
)
LLAMA2_13B = LlamaConfig(  # the shape of meta-llama/Llama-2-13b-hf
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=40,
    intermediate_size=13824,
    vocab_size=32000,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    use_cache=False,
)


@contextmanager
def heads(repeated: bool) -> Iterator[None]:
    """Keys and values repeated before attention, or left in groups as torch before 2.14 had it,
    whose memory-efficient kernel did not read them (lesson 11): the same bytes with any torch."""
    left = rules_of(torch="2.13.0")
    first = patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False)
    with first if repeated else left:
        yield


def on_a_t4(base: Callable, settings: dict, repeated: bool) -> Prediction:
    workload = adapted(language_modelling("llama-3.1-8b", length=1024), base)
    with heads(repeated):
        return predict(workload, gpu="T4", fp16=True, **settings)


IN_GROUPS = "4 bits, heads in groups"  # as transformers loads the model


def quantized_steps() -> Iterator[tuple]:
    """Llama-3.1-8B on a T4, one thing added after another; then two traps."""
    steps = {
        "LoRA on 16 bits": (half, ONE),
        "8 bits": (INT8, ONE),
        "nf4": (NF4, ONE),
        "nf4, scales in 8 bits": (NF4_TWICE, ONE),
        "+ checkpointing": (NF4_TWICE, CHECKPOINTED),
        "+ paged_adamw_8bit": (NF4_TWICE, PAGED),
        "prepared by peft": (prepared, PAGED),
        IN_GROUPS: (NF4_TWICE, ONE),
    }
    for variant, (base, settings) in steps.items():
        yield "llama-3.1-8b", variant, partial(on_a_t4, base, settings, variant != IN_GROUPS)


def quantized_times() -> Iterator[tuple]:
    """What expanding costs, by the tokens of a step."""
    for batch, length in ((1, 256), (4, 4096)):
        size = {"per_device_train_batch_size": batch}
        for variant, base in {"16 bits": half, "4 bits": NF4_TWICE}.items():
            workload = adapted(language_modelling("llama-3.1-8b", length=length), base)
            run = partial(predict, workload, gpu="A100-80GB", bf16=True, **size)
            yield f"{batch} x {length}", variant, run


def quantized_lengths() -> Iterator[tuple]:
    for length in (1024, 2048, 4096, 8192, 16384):
        workload = adapted(language_modelling("llama-3.1-8b", length=length), NF4_TWICE)
        run = partial(predict, workload, gpu="RTX 4090", bf16=True, **PAGED)
        yield "llama-3.1-8b", length, run


def quantized_longest() -> Iterator[tuple]:
    """How long a text a small card holds (exercise 13.2)."""
    for length in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        workload = adapted(language_modelling("llama-3.2-1b", length=length), NF4_TWICE)
        run = partial(predict, workload, gpu="RTX 3060", bf16=True, **PAGED)
        yield "llama-3.2-1b", length, run


def adapted_in_16_bits(base: Callable, **options) -> Callable:
    """LoRA as LitGPT does it: adapters in bfloat16 as well."""

    def change(model):
        config = LoraConfig(**options)
        model = get_peft_model(base(model), config, autocast_adapter_dtype=False)
        for name, module in model.named_modules():
            if name.endswith(("lora_A", "lora_B")):
                module.to(torch.bfloat16)
        return model

    return change


def quantized_published() -> Iterator[tuple]:
    """LitGPT's rows, all in bfloat16."""
    options = {"r": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05}
    seven = language_modelling("llama-2-7b", length=1304)
    sizes = {"7B": seven, "13B": replace(seven, config=LLAMA2_13B, name="llama-2-13b")}
    bases = {"LoRA": half, "LoRA nf4": NF4, "LoRA nf4-dq": NF4_TWICE}
    for (size, workload), (name, base) in itertools.product(sizes.items(), bases.items()):
        changed = workload.with_model(adapted_in_16_bits(base, **options))
        run = partial(predict, changed, gpu="A100-40GB", **ONE)
        yield "litgpt-llama2", f"{size} {name}, micro-batch 1", run


def quantized_cards() -> Iterator[tuple]:
    """The whole recipe for four sizes of model."""
    names = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-14b", "llama-3.1-70b")
    bases = {"16 bits": half, "8 bits": INT8, "4 bits": NF4_TWICE, "4 bits, prepared": prepared}
    for name, (variant, base) in itertools.product(names, bases.items()):
        if name == "qwen3-14b":
            workload = language_modelling("qwen3-8b", length=1024)
            workload = replace(workload, config=QWEN3_14B, name=name)
        else:
            workload = language_modelling(name, length=1024)
        run = partial(predict, adapted(workload, base), gpu="A100-80GB", bf16=True, **PAGED)
        yield name, variant, run


def context(length: int) -> Prediction:
    """A text of so many tokens, in what Unsloth's benchmark calls the usual stack.

    QLoRA of rank 32 on all linear layers and one text in a batch are stated there, 8-bit Adam on
    an earlier page of theirs. Double quantization, bf16 and peft's preparation are our assumptions.
    """
    workload = language_modelling("llama-3.1-8b", length=length).with_model(prepared)
    workload = workload.with_model(partial(lora, r=32))
    settings = CHECKPOINTED | {"optim": "adamw_8bit", "bf16": True}
    return predict(workload, gpu="A100-80GB", **settings)


def quantized_contexts() -> Iterator[tuple]:
    """What a text takes of a card, for the longest text that it holds."""
    for length in (512, 2048, 8192, 32768):
        yield "llama-3.1-8b", length, partial(context, length)


SETS = (
    quantized_steps,
    quantized_times,
    quantized_lengths,
    quantized_longest,
    quantized_published,
    quantized_cards,
    quantized_contexts,
)
