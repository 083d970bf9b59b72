"""Fine-tuning under the Trainer and TRL on an A100 with 80 GB, as IBM's fms-acceleration ran it.

Text packed to 4,096 tokens, bfloat16 weights, checkpointing, FlashAttention 2, AdamW; transformers
4.48.1 (Mistral, Llama 2) and 4.45.2 (PowerLM). Settings: scripts/benchmarks/scenarios.yaml and
defaults.yaml of the repository; the rest is fms-hf-tuning 2.5.0 and TRL 0.13.0. Runs with the
repository's fused Triton kernels ("foak", "liger") and GPTQ are not here: no fake tensor runs them.

PowerLM's config.json was not at hand. Its shape in `data/configs` has no source, and that its
layers have biases was concluded from the bytes between steps: those rows calibrate.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import LlamaConfig

from evidence.cards import reading
from evidence.techniques import NF4_TWICE, flash_attn, half
from fake_cuda import Allocator
from helpers import Prediction, Workload, language_modelling, predict

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LLAMA2_70B = LlamaConfig(  # the shape of NousResearch/Llama-2-70b-hf
    hidden_size=8192,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    intermediate_size=28672,
    vocab_size=32000,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    use_cache=False,
)


def adapted(model):
    """LoRA as SFTTrainer puts it on (trl/trainer/sft_trainer.py): 32 bits, embeddings hooked."""
    model.enable_input_require_grads()
    config = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=ATTENTION)
    return get_peft_model(model, config)


def prepared(model):
    """`prepare_model_for_kbit_training`, then the matrices that it left in 32 bits back in 16
    (`peft_module_casting_to_bf16` in trl/trainer/utils.py)."""
    model = adapted(prepare_model_for_kbit_training(NF4_TWICE(model)))
    base = model.get_base_model()
    for matrix in (base.get_input_embeddings(), base.get_output_embeddings()):
        matrix.to(torch.bfloat16)
    base.tie_weights()  # on fake tensors a cast makes a new parameter
    return model


# The plugin "accelerated-peft-bnb" leaves the frozen weights in 16 bits, its baseline does not
# (plugins/accelerated-peft/src/fms_acceleration_peft/framework_plugin_bnb.py).
METHODS: dict[str, tuple[Callable, dict]] = {
    "full": (half, {}),
    "LoRA": (lambda model: adapted(half(model)), {}),
    "QLoRA, prepared": (prepared, {"bf16": True}),
    "QLoRA": (lambda model: adapted(NF4_TWICE(model)), {"bf16": True}),
}


def text(name: str, config=None) -> Workload:
    """A model of `data/configs`, or of another shape, and its batches of 4,096 tokens."""
    workload = language_modelling(name, length=4096)
    return replace(workload, config=config or workload.config, masked=True)


def padded(workload: Workload) -> Workload:
    """With a token for padding, which the tokenizers of Mistral and Llama 2 lack: the trainer adds
    it and enlarges the embedding (tuning/utils/tokenizer_data_utils.py). PowerLM's has one."""
    config = copy.deepcopy(workload.config)
    config.vocab_size += 1
    return replace(workload, config=config)


BOTH = dict.fromkeys(METHODS, (4, 8))
# A model, and the batch sizes of each method.
MODELS: dict[str, tuple[Workload, dict[str, tuple[int, ...]]]] = {
    "Mistral-7B": (padded(text("mistral-7b")), BOTH),
    "PowerLM-3B": (text("powerlm-3b"), BOTH),
    "Llama-2-70B": (padded(text("llama-2-7b", LLAMA2_70B)), {"QLoRA": (4,)}),
}


def run(workload: Workload, method: str, batch: int) -> Prediction:
    """Predict a run."""
    change, settings = METHODS[method]
    with flash_attn():
        return predict(
            workload.with_model(change),
            gpu="A100-80GB",
            per_device_train_batch_size=batch,
            optim="adamw_torch",
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": True},
            **settings,
        )


def quantities(found: Prediction) -> dict[str, int]:
    """Bytes: the peak, and what stands when a step begins, as the Trainer's own tracker counted."""
    allocator = Allocator()
    for entry in found.log[: len(found.log) - len(found.timeline)]:  # that is the last step
        allocator.step(*entry)
    between = reading(allocator).allocated
    return {"allocated": found.peak_allocated, "allocated between steps": between}


def timed() -> Iterator[tuple[str, Callable]]:
    for model, (workload, methods) in MODELS.items():
        for method, batches in methods.items():
            for batch in batches:
                yield f"{model} {method}, batch {batch}", partial(run, workload, method, batch)


def measured() -> Iterator[tuple[str, Callable]]:
    for name, predicted in timed():
        yield name, lambda predicted=predicted: quantities(predicted())


PEAKS = {"fms": measured}
STEPS = {"fms": timed}
