"""What the tests of the planner share: tiny models, questions about them, samples to train on."""

import torch
import transformers

from helpers.hardware import GIB
from helpers.samples import pictured, together
from helpers.workloads import (
    image_classification,
    image_text_to_text,
    language_modelling,
    speech_recognition,
)
from planner.facts import Facts
from planner.predictions import Predictions
from planner.question import Question, find_card
from planner.techniques import CHECKPOINTING, CHUNKED_LOSS, LIGER, ON_THE_HOST

SHAPE = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
PROMPT = 20  # tokens without a label before them
BASE = {"full": 12, "full, 8-bit AdamW": 10, "full, Adafactor": 8, "LoRA": 2, "QLoRA": 1}  # GiB
LABELS = (40, 20, 8, 2)  # of four samples, two in a micro-batch: however drawn, no two halves match


def saved(folder, config_kind, model_kind) -> str:
    quiet = {} if config_kind is transformers.LlamaConfig else {"hidden_dropout_prob": 0.0}
    quiet |= {"attention_probs_dropout_prob": 0.0} if quiet else {"pad_token_id": 0}
    config = config_kind(vocab_size=257, max_position_embeddings=64, **SHAPE, **quiet)
    config.initializer_range = 0.2  # attention looks at some tokens more than at others
    model_kind(config).save_pretrained(folder)
    return str(folder)


def saved_decoder(folder) -> str:
    return saved(folder, transformers.LlamaConfig, transformers.LlamaForCausalLM)


def saved_encoder(folder) -> str:
    return saved(folder, transformers.BertConfig, transformers.BertForSequenceClassification)


def saved_vision(folder, **options) -> str:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    size = {"image_size": 32, "patch_size": 8, "num_labels": 3} | SHAPE | quiet | options
    config = transformers.ViTConfig(**size, initializer_range=0.2)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return str(folder)


def saved_speech(folder) -> str:
    size = {"d_model": 64, "vocab_size": 257, "num_mel_bins": 8, "init_std": 0.2}
    for part in ("encoder", "decoder"):
        size |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 128}
    most = {"max_source_positions": 16, "max_target_positions": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2}
    config = transformers.WhisperConfig(**size, **most, **special, begin_suppress_tokens=None)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def saved_seeing(folder, patch=64) -> str:
    """A Qwen3-VL to whose first layer a deeper feature is added; two patches a side are a token."""
    quiet = {"initializer_range": 0.2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = SHAPE | {"vocab_size": 257, "head_dim": 16, "num_key_value_heads": 2} | quiet
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}
    vision |= {"patch_size": patch, "out_hidden_size": 64, "num_position_embeddings": 64} | quiet
    special = {"image_token_id": 250, "video_token_id": 251}
    special |= {"vision_start_token_id": 252, "vision_end_token_id": 253}
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope, "max_position_embeddings": 4096},
        vision_config=vision | {"deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
        **special,
    )
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def question(model, task=language_modelling, gpu="RTX 4090", length=16, **options) -> Question:
    options = {"batch": 2, "margin": 0.03, "hub_id": model} | options
    about = {} if task in (image_classification, speech_recognition) else {"length": length}
    about |= {"image_size": 256} if task is image_text_to_text else {}
    return Question(task(model, **about), find_card(gpu), **options)


def predictions(model, keep=True, **options) -> Predictions:
    return Predictions(question(model, **options), keep=keep)


def formula(predictions, plan, micro_batch, *, layers=(), length=0):
    """GiB and seconds that are linear in the micro-batch and the length."""
    asked, techniques = predictions.question, plan.techniques
    tokens = (length or asked.workload.length) / 32
    each = 1 if CHECKPOINTING in techniques else 4
    each -= 0.5 * bool({CHUNKED_LOSS, LIGER} & set(techniques)) + 0.2 * (ON_THE_HOST in techniques)
    size = int((BASE.get(plan.kind.name, 6) + micro_batch * tokens * each) * GIB)
    speed = 1.0 - 0.3 * plan.kind.adapters
    speed += 0.3 * (CHECKPOINTING in techniques) + 0.2 * (ON_THE_HOST in techniques)
    seconds = asked.batch * (speed + 0.1 / micro_batch)
    times = {"step_seconds": seconds, "low": seconds, "high": seconds}
    sizes = {"by_category": {"parameters": size}, "phases": {"forward": size}}
    return Facts(size, size, **sizes, **times, limited_by="the formula")


def samples(asked: Question) -> list[dict]:
    """Four samples of unlike lengths and numbers of labels; half of one is a text of its own. Or
    four pictures; or texts with pictures of unlike sizes, and one without; or sound with texts that
    are filled up."""
    if asked.workload.task == "image_classification":
        return [asked.workload.data("train")[k] | {"labels": torch.tensor(k % 2)} for k in range(4)]
    if asked.workload.task == "speech_recognition":
        found = [asked.workload.data("train")[k] for k in range(4)]
        for sample, counted in zip(found, LABELS, strict=True):
            sample["labels"][counted:] = -100
        return found
    random, found = torch.Generator().manual_seed(0), []
    if asked.workload.task == "image_text_to_text":  # pictures of unlike sizes
        for side, counted in zip((256, 512, 0, 256), LABELS, strict=True):
            sample = pictured(asked.workload.config, PROMPT + counted, side or 256, random)
            sample["labels"][:-counted] = -100
            if not side:  # a text alone
                ids = torch.randint(3, 128, sample["input_ids"].shape, generator=random)
                sample = {"input_ids": ids, "labels": sample["labels"]}
                sample["mm_token_type_ids"] = torch.zeros_like(ids)
            found.append(sample)
        return found
    for n, counted in enumerate(LABELS):
        length = PROMPT + counted + n
        ids = torch.randint(3, 257, (length,), generator=random)
        sample = {"input_ids": ids, "labels": torch.tensor(n % 2)}
        if asked.workload.task == "language_modelling":
            labels = ids.clone()
            labels[: length - counted] = -100
            at = torch.arange(length)
            sample |= {"labels": labels, "position_ids": torch.where(at < 10, at, at - 10)}
        found.append(sample)
    return found


def padded(rows: list[dict]) -> dict:
    """A batch with its mask, padded on the left; without positions of its own on the right."""
    if {"input_ids", "pixel_values"} <= rows[0].keys():
        return together(rows)
    if "input_ids" not in rows[0]:
        return transformers.default_data_collator(rows)
    side = "left" if "position_ids" in rows[0] else "right"
    batch, columns = {}, {"input_ids": 0, "labels": -100, "position_ids": 0, "attention_mask": 0}
    for row in rows:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    for key in columns.keys() & rows[0].keys():
        found = [row[key] for row in rows]
        if found[0].dim():
            options = {"padding_value": columns[key], "padding_side": side}
            found = torch.nn.utils.rnn.pad_sequence(found, True, **options)
        batch[key] = found if torch.is_tensor(found) else torch.stack(found)
    return batch
