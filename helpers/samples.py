"""What one sample of each task is: made of nothing where its shape counts, or by chance."""

import copy
from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from fake_cuda.units import PICTURES, SPEECH, TEXTS_AND_PICTURES, TOKENS

IMAGE_SIZE = 512  # pixels of a side, where a model reads pictures of any size
NO_TOKENS = (
    "{} does not read a picture as tokens of one width: give a script that trains it, by --script"
)
# Of a side of a square. Smaller pictures Qwen3-VL's processor enlarges, and larger ones it shrinks:
# to the 65,536 to 16,777,216 pixels in preprocessor_config.json of its checkpoints.
LEAST_SIZE, MOST_SIZE = 256, 4096
USUAL = 1024  # tokens of a sample with a picture
A_TOKEN = 100  # any one


def one_sample(
    task: str, config, length: int, masked: bool, image_size: int | None
) -> dict[str, torch.Tensor]:
    """A sample without data: one token many times, padded at the end if samples have a mask; with
    a picture of one colour in front, or such a picture alone; or silence with tokens."""
    if task == PICTURES:
        return {"pixel_values": torch.zeros(shape_of(config)), "labels": torch.tensor(0)}
    ids = torch.full((length,), A_TOKEN)
    if task == SPEECH:
        return {"input_features": torch.zeros(sound_of(config)), "labels": ids}
    if task == TEXTS_AND_PICTURES:
        return after_picture(config, image_size, ids, torch.zeros(patches_of(config, image_size)))
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


def patches_of(config: PreTrainedConfig, image_size: int) -> tuple[int, int]:
    """The patches of a square picture as Qwen's processors cut it, and the numbers of one: a
    picture stands for a film that stands still for `temporal_patch_size` moments.

    >>> patches_of(transformers.Qwen3VLConfig(), 512)
    (1024, 1536)
    """
    vision = config.vision_config
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return (image_size // vision.patch_size) ** 2, numbers


def tokens_of_picture(config: PreTrainedConfig, image_size: int) -> list[int]:
    """The tokens of a square picture in a text: one for some patches, a first and a last one.

    >>> len(tokens_of_picture(transformers.Qwen3VLConfig(), 512))
    258
    """
    patches, _ = patches_of(config, image_size)
    inside = [config.image_token_id] * (patches // config.vision_config.spatial_merge_size**2)
    return [config.vision_start_token_id, *inside, config.vision_end_token_id]


def after_picture(
    config: PreTrainedConfig, image_size: int, ids: torch.Tensor, pixels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A text whose first tokens are those of a picture, which nothing is to predict.

    Args:
        config: of a Qwen3-VL.
        image_size: pixels of a side of the picture, a square.
        ids: [length] of the text; the picture takes the place of its first tokens.
        pixels: [patches, numbers of a patch] of the picture.
    """
    seen = torch.tensor(tokens_of_picture(config, image_size))
    ids, labels, kinds = ids.clone(), ids.clone(), torch.zeros_like(ids)
    ids[: len(seen)], labels[: len(seen)] = seen, -100
    kinds[1 : len(seen) - 1] = 1  # 0 for text, 1 for pictures
    rows = image_size // config.vision_config.patch_size
    return {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, rows, rows]]),  # a moment, so many rows and columns
        "labels": labels,
    }


def together(samples):
    """A batch: all pictures one after another, and texts filled up to the longest. No token looks
    at what stands behind it: a mask would take memory and time for nothing."""
    filling = {"input_ids": 0, "mm_token_type_ids": 0, "labels": -100}
    batch = {}
    for name in ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw", "labels"):
        found = [torch.as_tensor(sample[name]) for sample in samples if name in sample]
        if name in filling:
            batch[name] = pad_sequence(found, batch_first=True, padding_value=filling[name])
        elif found:  # a text may have no picture
            batch[name] = torch.cat(found)
    return batch


def pictured(
    config: PreTrainedConfig, length: int, image_size: int, random: torch.Generator
) -> dict[str, torch.Tensor]:
    """A random picture with a text of random tokens."""
    few = config.text_config.vocab_size // 2  # special tokens come last
    ids = torch.randint(min(A_TOKEN, few // 2), few, (length,), generator=random)
    pixels = torch.randn(patches_of(config, image_size), generator=random)
    return after_picture(config, image_size, ids, pixels)


def beside_texts(
    name: str, task: str, config: PreTrainedConfig, length: int | None, image_size: int | None
) -> tuple[int, Callable]:
    """Tokens of a sample of pictures or sound, and what makes the data of a split."""
    if task == SPEECH:
        most = config.max_target_positions
        if (length or 0) > most:
            raise ValueError(f"{name} reads {most} tokens at most")
        return length or most, partial(Drawn, partial(recording, config, length or most))
    if task == TEXTS_AND_PICTURES:
        refuse_size(name, config, image_size)
        tokens = len(tokens_of_picture(config, image_size))
        length = length or max(USUAL, 2 * tokens)
        refuse_length(name, config, length, image_size, tokens)
        return length, partial(Drawn, partial(pictured, config, length, image_size))
    tokens = picture_tokens(config, name)
    if length not in (None, tokens):
        raise ValueError(f"{name} reads each picture as {tokens} tokens: leave the length out")
    return tokens, partial(Drawn, partial(picture, config))


def refuse_size(name: str, config: PreTrainedConfig, image_size: int) -> None:
    """ValueError for a size of pictures that no processor makes."""
    if type(image_size) is not int or not LEAST_SIZE <= image_size <= MOST_SIZE:
        raise ValueError(
            f"{name} reads pictures of {LEAST_SIZE} to {MOST_SIZE:,} pixels a side, and not of "
            f"{image_size!r}: its processor makes others of that size"
        )
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    if image_size % side:
        near = round(image_size / side) * side
        raise ValueError(f"{name} cuts pictures into {side} x {side} pixels: take {near} of a side")


def refuse_length(
    name: str, config: PreTrainedConfig, length: int, image_size: int, tokens: int
) -> None:
    """ValueError for a text that has no room beside the tokens of its picture, or is too long."""
    if length <= tokens:
        raise ValueError(
            f"{name} reads a picture of {image_size} x {image_size} as {tokens:,} tokens, so that "
            f"{length:,} leave none for a text: choose more, or a smaller picture"
        )
    most = config.text_config.max_position_embeddings
    if length > most:
        raise ValueError(f"{name} reads {most} tokens at most")
