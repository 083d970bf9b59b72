"""What models are trained for: their classes, and what one sample of each task is."""

import copy

import torch
import transformers
from transformers import PreTrainedConfig

from .hardware import suggest

TEXTS, TOKENS = "text_classification", "language_modelling"
PICTURES = "image_classification"
CLASSIFY = (TEXTS, PICTURES)
MODELS = {
    TEXTS: transformers.AutoModelForSequenceClassification,
    TOKENS: transformers.AutoModelForCausalLM,
    PICTURES: transformers.AutoModelForImageClassification,
}
CONFIGS = {  # the descriptions that a task's class of models takes
    TEXTS: transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    TOKENS: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    PICTURES: transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
}
A_MODEL = "vit-large-patch16-224"
OWN_PICTURES = "pictures of your own are not read here: the script of onegpu fit --code takes them"
NO_TOKENS = (
    "{} does not read a picture as tokens of one width: give a script that trains it, by --script"
)


def refuse(task: str, size: str, data, length: int | None) -> None:
    """ValueError for a workload that cannot be, whatever the model is."""
    if task not in MODELS:
        raise ValueError(suggest(task, MODELS, "task"))
    if length is not None and length < 1:
        raise ValueError(f"a length of {length} tokens is impossible: it starts at 1")
    if task == PICTURES and size in ("auto", "large", "tiny"):
        raise ValueError(f'{task} has no size "{size}": name a model, such as {A_MODEL}')
    if task == PICTURES and data is not None:
        raise ValueError(OWN_PICTURES)
    if size == "tiny" and data is not None:
        raise ValueError('"tiny" has data of its own: name another model to go with yours')


def one_sample(task: str, config, length: int, masked: bool) -> dict[str, torch.Tensor]:
    """A sample without data: one token many times, padded at the end if samples have a mask; or a
    picture of one colour."""
    if task == PICTURES:
        return {"pixel_values": torch.zeros(shape_of(config)), "labels": torch.tensor(0)}
    ids = torch.full((length,), 100)  # no special token of any tokenizer
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


def picture_tokens(config: PreTrainedConfig, name: str) -> int:
    """As how many tokens a vision transformer reads a picture: one a patch, and those of its own.

    >>> picture_tokens(transformers.ViTConfig(), "vit-base-patch16-224")
    197

    Raises:
        ValueError: a model of another kind, such as a ResNet or a Swin.
    """
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(copy.deepcopy(config))
        try:
            found = model.embeddings(torch.zeros(1, *shape_of(config)))
        except (AttributeError, TypeError) as error:
            raise ValueError(NO_TOKENS.format(name)) from error
    found = found[0] if isinstance(found, tuple) else found
    layers = getattr(config, "num_hidden_layers", None)
    if found.dim() != 3 or not isinstance(layers, int) or hasattr(config, "depths"):
        raise ValueError(NO_TOKENS.format(name))
    return found.shape[1]


class Pictures(torch.utils.data.Dataset):
    """Random pictures [channels, height, width] with random classes, each the same at each look.

    Args:
        config: of a model that reads them.
        split: "train" has 512 pictures, "test" others, 64.
    """

    SIZES = {"train": 512, "test": 64}

    def __init__(self, config: PreTrainedConfig, split: str):
        self.shape, self.classes = shape_of(config), config.num_labels
        self.first = 0 if split == "train" else self.SIZES["train"]
        self.size = self.SIZES[split]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if not 0 <= i < self.size:
            raise IndexError(i)
        random = torch.Generator().manual_seed(self.first + i)
        label = torch.randint(self.classes, (), generator=random)
        return {"pixel_values": torch.randn(self.shape, generator=random), "labels": label}
