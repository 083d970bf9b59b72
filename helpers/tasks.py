"""What models are trained for: their classes, and what one sample of each task is."""

import copy
import functools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from transformers import PreTrainedConfig

from fake_cuda.units import PICTURES, SAMPLES, SPEECH, TEXTS, TOKENS

from .hardware import suggest

MODELS = {
    TEXTS: transformers.AutoModelForSequenceClassification,
    TOKENS: transformers.AutoModelForCausalLM,
    PICTURES: transformers.AutoModelForImageClassification,
    SPEECH: transformers.AutoModelForSpeechSeq2Seq,
}
CONFIGS = {  # the descriptions that a task's class of models takes
    TEXTS: transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    TOKENS: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    PICTURES: transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    SPEECH: {transformers.WhisperConfig},  # others read sound of any length, or waves
}
A_MODEL = {PICTURES: "vit-large-patch16-224", SPEECH: "whisper-small"}
OWN_DATA = "{} of your own are not read here: the script of onegpu fit --code takes them"
MORE_THAN_TEXT = "{} has parts beside that for texts: give a script that trains it, by --script"
NO_CAST = "{} takes pictures in the type of its weights alone: give a script, by --script"
NO_TOKENS = (
    "{} does not read a picture as tokens of one width: give a script that trains it, by --script"
)

NO_LOSS = "{} has no loss of its own, but a teacher: give a script that trains it, by --script"


def refuse(task: str, size: str, data, length: int | None) -> None:
    """ValueError for a workload that cannot be, whatever the model is."""
    if task not in MODELS:
        raise ValueError(suggest(task, MODELS, "task"))
    if length is not None and length < 1:
        raise ValueError(f"a length of {length} tokens is impossible: it starts at 1")
    if task in A_MODEL and size in ("auto", "large", "tiny"):
        raise ValueError(f'{task} has no size "{size}": name a model, such as {A_MODEL[task]}')
    if task in A_MODEL and data is not None:
        raise ValueError(OWN_DATA.format(SAMPLES[task]))
    if size == "tiny" and data is not None:
        raise ValueError('"tiny" has data of its own: name another model to go with yours')


def refuse_model(name: str, task: str, config: PreTrainedConfig) -> None:
    """ValueError for a model that cannot be trained for a task."""
    fits = type(config) in CONFIGS[task]
    others = set(config.sub_configs) - {"text_config", "encoder", "decoder"}  # pictures, sound
    if config.sub_configs and not hasattr(config, "vocab_size") or others and not fits:
        raise ValueError(MORE_THAN_TEXT.format(name))
    if not fits:
        raise ValueError(f"{name} is not a model for {task.replace('_', ' ')}")
    if any(head.endswith("WithTeacher") for head in config.architectures or ()):
        raise ValueError(NO_LOSS.format(name))
    if config.model_type == "beit":
        raise ValueError(NO_CAST.format(name))


def one_sample(task: str, config, length: int, masked: bool) -> dict[str, torch.Tensor]:
    """A sample without data: one token many times, padded at the end if samples have a mask; or a
    picture of one colour; or silence with tokens."""
    if task == PICTURES:
        return {"pixel_values": torch.zeros(shape_of(config)), "labels": torch.tensor(0)}
    ids = torch.full((length,), 100)  # no special token of any tokenizer
    if task == SPEECH:
        return {"input_features": torch.zeros(sound_of(config)), "labels": ids}
    sample = {"input_ids": ids, "labels": ids if task == TOKENS else torch.tensor(0)}
    mask = (torch.arange(length) < max(1, length - 1)).long()
    return sample | ({"attention_mask": mask} if masked else {})


def shape_of(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Channels, height and width of the pictures that a model reads.

    >>> shape_of(transformers.ViTConfig())
    (3, 224, 224)
    """
    side = config.image_size
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return config.num_channels, height, width


def sound_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Bands of frequency and moments of the 30 seconds that Whisper reads, shorter or not.

    >>> sound_of(transformers.WhisperConfig())
    (80, 3000)
    """
    return config.num_mel_bins, 2 * config.max_source_positions  # its second layer halves them


def picture_tokens(config: PreTrainedConfig, name: str) -> int:
    """As how many tokens a vision transformer reads a picture: one a patch, and those of its own.

    >>> picture_tokens(transformers.ViTConfig(), "vit-base-patch16-224")
    197

    Raises:
        ValueError: a model of another kind, such as a ResNet or a Swin.
    """
    with torch.device("meta"):
        try:  # there may be no such model without its head, or it may need another library
            model = transformers.AutoModel.from_config(copy.deepcopy(config))
            found = model.embeddings(torch.zeros(1, *shape_of(config)))
        except (AttributeError, TypeError, ValueError, ImportError) as error:
            raise ValueError(NO_TOKENS.format(name)) from error
    found = found[0] if isinstance(found, tuple) else found
    layers = getattr(config, "num_hidden_layers", None)
    if found.dim() != 3 or not isinstance(layers, int) or hasattr(config, "depths"):
        raise ValueError(NO_TOKENS.format(name))
    return found.shape[1]


class Drawn(torch.utils.data.Dataset):
    """Samples drawn by chance, each the same at each look.

    Args:
        draw: makes a sample, a dict of tensors, of a generator of random numbers.
        split: "train" has 512 samples, "test" others, 64.
    """

    SIZES = {"train": 512, "test": 64}

    def __init__(self, draw: Callable[[torch.Generator], dict], split: str):
        self.draw, self.size = draw, self.SIZES[split]
        self.first = 0 if split == "train" else self.SIZES["train"]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if not 0 <= i < self.size:
            raise IndexError(i)
        return self.draw(torch.Generator().manual_seed(self.first + i))


def picture(config: PreTrainedConfig, random: torch.Generator) -> dict[str, torch.Tensor]:
    """A random picture [channels, height, width] with a random class."""
    label = torch.randint(config.num_labels, (), generator=random)
    return {"pixel_values": torch.randn(shape_of(config), generator=random), "labels": label}


def recording(config: PreTrainedConfig, length: int, random: torch.Generator) -> dict:
    """Random sound [bands, moments] with a text of random tokens."""
    low = min(100, config.vocab_size // 2)
    ids = torch.randint(low, config.vocab_size, (length,), generator=random)
    return {"input_features": torch.randn(sound_of(config), generator=random), "labels": ids}


def beside_texts(name: str, task: str, config: PreTrainedConfig, length: int | None) -> tuple:
    """Tokens of a sample of pictures or sound, and what makes the data of a split."""
    if task == SPEECH:
        most = config.max_target_positions
        if (length or 0) > most:
            raise ValueError(f"{name} reads {most} tokens at most")
        return length or most, partial(Drawn, partial(recording, config, length or most))
    tokens = picture_tokens(config, name)
    if length not in (None, tokens):
        raise ValueError(f"{name} reads each picture as {tokens} tokens: leave the length out")
    return tokens, partial(Drawn, partial(picture, config))


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
