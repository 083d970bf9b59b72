"""What models are trained for: their classes, and what cannot be."""

import functools

import torch
import torch.nn.functional as F
import transformers
from transformers import PreTrainedConfig

from fake_cuda.units import PICTURES, SAMPLES, SPEECH, TEXTS, TEXTS_AND_PICTURES, TOKENS

from .hardware import suggest

MODELS = {
    TEXTS: transformers.AutoModelForSequenceClassification,
    TOKENS: transformers.AutoModelForCausalLM,
    PICTURES: transformers.AutoModelForImageClassification,
    SPEECH: transformers.AutoModelForSpeechSeq2Seq,
    TEXTS_AND_PICTURES: transformers.AutoModelForImageTextToText,
}
CONFIGS = {  # the descriptions that a task's class of models takes
    TEXTS: transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    TOKENS: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    PICTURES: transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    SPEECH: {transformers.WhisperConfig},  # others read sound of any length, or waves
    TEXTS_AND_PICTURES: {transformers.Qwen3VLConfig},  # others are handed pictures in other tensors
}
A_MODEL = {
    PICTURES: "vit-large-patch16-224",
    SPEECH: "whisper-small",
    TEXTS_AND_PICTURES: "qwen3-vl-4b",
}
OWN_DATA = "{} of your own are not read here: the script of onegpu fit --code takes them"
MORE_THAN_TEXT = "{} has parts beside that for texts: give a script that trains it, by --script"
NO_CAST = "{} takes pictures in the type of its weights alone: give a script, by --script"
NO_LOSS = "{} has no loss of its own, but a teacher: give a script that trains it, by --script"


def refuse(task: str, size: str, data, length: int | None, image_size: int | None) -> None:
    """ValueError for a workload that cannot be, whatever the model is."""
    if task not in MODELS:
        raise ValueError(suggest(task, MODELS, "task"))
    if length is not None and length < 1:
        raise ValueError(f"a length of {length} tokens is impossible: it starts at 1")
    if task in A_MODEL and size in ("auto", "large", "tiny"):
        raise ValueError(f'{task} has no size "{size}": name a model, such as {A_MODEL[task]}')
    if task in A_MODEL and data is not None:
        raise ValueError(OWN_DATA.format(SAMPLES.get(task, "pictures")))
    if task != TEXTS_AND_PICTURES and image_size is not None:
        raise ValueError(f"image_size is for {TEXTS_AND_PICTURES} alone: leave it out")
    if size == "tiny" and data is not None:
        raise ValueError('"tiny" has data of its own: name another model to go with yours')


def refuse_model(name: str, task: str, config: PreTrainedConfig) -> None:
    """ValueError for a model that cannot be trained for a task."""
    fits = type(config) in CONFIGS[task]
    others = set(config.sub_configs) - {"text_config", "encoder", "decoder"}  # pictures, sound
    nested = config.sub_configs and not hasattr(config, "vocab_size")
    if (nested or others and not fits) and type(config) not in CONFIGS[TEXTS_AND_PICTURES]:
        raise ValueError(MORE_THAN_TEXT.format(name))
    if not fits:
        raise ValueError(f"{name} is not a model for {task.replace('_', ' ')}")
    if any(head.endswith("WithTeacher") for head in config.architectures or ()):
        raise ValueError(NO_LOSS.format(name))
    if config.model_type == "beit":
        raise ValueError(NO_CAST.format(name))


def loss_of_step(model):
    """Whisper with the mean loss over all labels of a step, in place of each micro-batch's own, and
    with sound in the type of its weights."""
    whole = model.forward

    @functools.wraps(whole)  # Trainer reads here which columns the model takes
    def forward(input_features=None, *, labels=None, num_items_in_batch=None, **others):
        if input_features is not None:
            input_features = input_features.to(model.dtype)
        if labels is None:  # the model answers
            return whole(input_features, **others)
        config, first = model.config, labels.new_full((len(labels), 1), 0)
        before = torch.cat([first + config.decoder_start_token_id, labels[:, :-1]], 1)
        before = before.masked_fill(before == -100, config.pad_token_id)
        out = whole(input_features, **({"decoder_input_ids": before} | others))
        logits = out.logits.flatten(0, 1).float()
        total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        if num_items_in_batch is None:  # Trainer counts the labels of all micro-batches of a step
            num_items_in_batch = (labels != -100).sum()
        out["loss"] = total / num_items_in_batch
        return out

    model.forward = forward
    return model
