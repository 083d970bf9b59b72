"""Lesson 22: what pictures cost when a vision-language model is fine-tuned."""

from collections.abc import Iterator
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from helpers import predict
from helpers.models import find_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]  # only the language model has these names


def pictures_and_words(config: PreTrainedConfig, pictures: int, side: int, words: int) -> dict:
    """A batch for Qwen3-VL: square pictures of `side` pixels one after another, then the words."""
    vision = config.vision_config
    rows = side // vision.patch_size
    tokens = (rows // vision.spatial_merge_size) ** 2
    picture = [config.image_token_id] * tokens
    picture = [config.vision_start_token_id, *picture, config.vision_end_token_id]
    ids = torch.tensor([picture * pictures + [1] * words])
    numbers = 3 * vision.temporal_patch_size * vision.patch_size**2  # of a patch
    return {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": torch.tensor([[0, *[1] * tokens, 0] * pictures + [0] * words]),
        "pixel_values": torch.zeros(pictures * rows**2, numbers, dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, rows, rows]] * pictures),
    }


def loss_of_words(model: nn.Module, batch: dict, words: int) -> torch.Tensor:
    """The loss of the last `words` tokens, without logits of the others."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.model(**given).last_hidden_state[:, -words:]
    size = model.config.text_config.vocab_size
    return model.loss_function(model.lm_head(hidden), batch["labels"][:, -words:], size)


def tuning(
    name: str,
    pictures: int,
    side: int,
    words: int,
    *,
    targets: str | list[str] = ATTENTION,
    answer_only: bool = False,
    checkpoint: bool = False,
    dropout: float = 0.0,
):
    """Two steps of LoRA in 16 bits, adapters included."""

    def run():
        config = find_model(name).config
        config.text_config.use_cache = False
        model = AutoModelForImageTextToText.from_config(config)
        if checkpoint:
            model.activation_checkpointing_enable()
        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, target_modules=targets)
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        trained = (p for p in model.parameters() if p.requires_grad)
        optimizer = torch.optim.AdamW(trained, fused=True)
        batch = pictures_and_words(config, pictures, side, words)
        for _ in range(2):
            if answer_only:
                loss = loss_of_words(model.get_base_model(), batch, words)
            else:
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def vision_language() -> Iterator[tuple]:
    """One picture and 256 words for Qwen3-VL-4B, by the picture's size and what is trained.

    "and lean" is with checkpointing, and with logits of the words alone.
    """
    variants = {"adapters in all linear layers": {"targets": "all-linear"}}
    variants["adapters in the language model"] = {}
    variants["and lean"] = {"answer_only": True, "checkpoint": True}
    for side in (512, 1024, 2048):
        for variant, how in variants.items():
            run = tuning("qwen3-vl-4b", 1, side, 256, **how)
            yield f"{side} pixels", variant, partial(predict, run, gpu="RTX 4090")


def qwen3_vl_a40() -> Iterator[tuple]:
    """The first and last published run of that name, on a card of the A40's generation.

    A picture of 224 x 224 is less than the processor's least, 256 x 256. The printed lengths are
    12 tokens of text and 66 a picture. Their DeepSpeed engine holds the adapters in 16 bits too.
    """
    for pictures in (4, 24):
        run = tuning("qwen3-vl-8b", pictures, 256, 12, dropout=0.05)
        yield f"{pictures} pictures", "", partial(predict, run, gpu="A10")


SETS = (vision_language, qwen3_vl_a40)
