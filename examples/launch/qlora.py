"""QLoRA from load to save: yours to copy. Lesson 13 runs it on one card, a test holds it.

    adapter = fine_tune("meta-llama/Llama-3.1-8B", data, "adapter", num_train_epochs=1)
    merge("meta-llama/Llama-3.1-8B", "adapter").save_pretrained("merged")

`data` are rows of `input_ids` and `labels` (-100: no loss). With texts of 1,024 tokens, one in a
batch, the 8B model is predicted to fit a T4. Over two cards, as in lesson 18: under `torchrun` each
has the whole base; `accelerate launch --config_file fsdp2.yaml` cuts it, once each has read it.
"""

import os

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from transformers.integrations import sdpa_attention

CUDA = torch.cuda.is_available()
OLD = CUDA and torch.cuda.get_device_capability() < (8, 0)  # a T4: no bf16, no flash attention
if OLD:  # before torch 2.14 its other kernel does not read grouped heads: repeat them (lesson 11)
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
PLACE = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if CUDA else "cpu"  # each rank has its own card
HALF = torch.float16 if OLD else torch.bfloat16
CUT = os.environ.get("ACCELERATE_USE_FSDP") == "true"  # by FSDP2, which cuts floats alone


def in_4_bits(name, place=PLACE):
    rounded = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    rounded |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": HALF}
    rounded |= {"bnb_4bit_quant_storage": HALF} if CUT else {}
    options = {"dtype": HALF, "device_map": {"": place}}
    options["quantization_config"] = BitsAndBytesConfig(**rounded)
    return AutoModelForCausalLM.from_pretrained(name, **options)


def fine_tune(name, data, folder, collator=None, **settings):
    """Train adapters on all linear layers and save them, and nothing else, in the folder."""
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(in_4_bits(name), lora)  # adapters are float32: fp16=True can unscale
    usual = {"per_device_train_batch_size": 1, "optim": "paged_adamw_8bit"}
    usual |= {"optim": "adamw_torch"} if CUT else {}
    usual |= {"activation_checkpointing": True, "fp16": OLD, "bf16": not OLD, "use_cpu": not CUDA}
    arguments = TrainingArguments(folder, **usual | settings)
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=data)
    trainer.train()
    trainer.save_model()
    return model


def merge(name, folder):
    """The model with its adapters in 16 bits, made on the CPU: two bytes of its memory a weight."""
    base = in_4_bits(name, "cpu").dequantize()  # the rounded weights: those that were trained on
    return PeftModel.from_pretrained(base, folder).merge_and_unload()
