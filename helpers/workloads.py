"""What the lessons train: a model, its data and a collator, as one frozen value."""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import datasets
import torch
import transformers
from safetensors import SafetensorError

from fake_cuda.units import PICTURES, SPEECH, titled

from .hardware import own_file
from .models import find_model, picked, reachable, usual_task
from .own_data import with_data
from .tasks import MODELS, beside_texts, loss_of_step, one_sample, refuse, refuse_model
from .tiny import CACHE, pretrain, random_tokens, standard_library, tiny_config
from .trainers import new_trainer

LARGE = {  # name in data/configs, where the weights are, tokens in a sample
    "text_classification": ("bert-large-uncased", "google-bert/bert-large-uncased", 512),
    "language_modelling": ("tinyllama-1.1b", "TinyLlama/TinyLlama_v1.1", 2048),
}
OFFLINE = "random weights, because the hub cannot be reached: memory and speed are the same"


@dataclass(frozen=True)
class Workload:
    """A seeded model and its data.

    `config` describes the model, `weights` is where pretrained ones come from (None: random),
    `data` returns the data set of a split, "train" or "test", in training order: samples are
    `input_ids` of `length` tokens and `labels` (a class, or the tokens themselves). Or they are
    `pixel_values`, which the model reads as `length` tokens, and their class; or `input_features`,
    30 seconds of sound, and `labels` of `length` tokens.
    """

    name: str
    task: str
    config: object
    length: int
    data: Callable[[str], datasets.Dataset]
    weights: str | Path | None = None
    note: str = ""
    learning_rate: float = 5e-5
    masked: bool = False  # samples carry an attention mask, because their lengths differ
    changes: tuple[Callable, ...] = ()
    seed: int = 0

    @property
    def title(self) -> str:
        return titled(self.name, self.task, self.length)

    @property
    def changed(self) -> tuple[str, ...]:
        return tuple(getattr(change, "__name__", "changed") for change in self.changes)

    def __str__(self) -> str:
        return self.title + (f" ({self.note})" if self.note else "")

    def with_model(self, change: Callable) -> "Workload":
        """The same workload with `change(model)` applied to each new model: peft, quantization."""
        return replace(self, changes=(*self.changes, change))

    def model(self, pretrained: bool = True) -> torch.nn.Module:
        """A new model in float32, in training mode; the same weights each time."""
        transformers.set_seed(self.seed)
        auto, config = MODELS[self.task], copy.deepcopy(self.config)
        if pretrained and self.weights is not None:
            # Since transformers 5 a checkpoint's own precision is kept unless told otherwise.
            options = {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True}
            try:
                model = auto.from_pretrained(self.weights, **options)
            except SafetensorError as error:
                ours = own_file(folder=CACHE) in Path(self.weights).parents
                remedy = "delete that folder, it is made anew" if ours else "save or fetch it again"
                raise ValueError(f"{self.weights} holds damaged weights: {remedy}") from error
        else:
            model = auto.from_config(config, dtype=torch.float32)
        if self.task == SPEECH:
            model = loss_of_step(model)
        model.loss_type = model.loss_type or "ForCausalLM"  # which GPT-2's class name does not tell
        # PEFT asks for it by the old name, and a reader can do nothing about that.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        for change in self.changes:
            model = change(model)
            if not isinstance(model, torch.nn.Module):
                raise ValueError("a function given to with_model must return the model")
        return model.train()

    def parameters(self) -> int:
        """How many parameters the model has, before `with_model` changes it; nothing is built."""
        with torch.device("meta"):
            return MODELS[self.task].from_config(copy.deepcopy(self.config)).num_parameters()

    # Samples as one batch: tensors of [batch, length], [batch] for class labels, and
    # [batch, channels, height, width] for pictures.
    collate = staticmethod(transformers.default_data_collator)

    def dataloader(self, n: int) -> torch.utils.data.DataLoader:
        """Batches of n samples in the order in which `train` sees them, for a loop of your own."""
        return torch.utils.data.DataLoader(
            self.data("train"), batch_size=n, collate_fn=self.collate, drop_last=True
        )

    def sample(self) -> dict[str, torch.Tensor]:
        """What stands for each sample where only its shape counts: made without the data."""
        return one_sample(self.task, self.config, self.length, self.masked)

    def trainer(
        self,
        optimizer: Callable | None = None,
        pretrained: bool = True,
        data: Iterable | None = None,
        evaluation: Iterable | None = None,
        **arguments,
    ) -> transformers.Trainer:
        """The `Trainer` that `train` runs and `predict` runs on fake tensors.

        Args:
            optimizer: a function (model, args) that returns an optimizer.
            pretrained: whether the model's weights are loaded, where it has any.
            data: samples to train on instead of the workload's own.
            evaluation: samples to evaluate on instead of the workload's own.
            arguments: keywords of `TrainingArguments`.
        """
        train = self.data("train") if data is None else data
        test = self.data("test") if evaluation is None else evaluation
        return new_trainer(self, optimizer, pretrained, train, test, arguments)


def text_classification(size: str = "auto", **options) -> Workload:
    """Classify texts.

    Args:
        size: "tiny" asks which package of Python's standard library a function comes from (8
            classes); "large" is the classic experiment, bert-large-uncased on 512 samples of 512
            random tokens; "auto" is one of the two, by this machine's memory. Otherwise a hub id,
            a local folder or a name in `data/configs`.
        options: `length` in tokens; `seed`; `data`, a CSV, JSON or Parquet file, a folder of them
            or a hub id, with the columns `text` and `label`; `pretrained=True` trains the tiny
            model on first use and keeps its weights.

    Raises:
        ValueError: an option, a model or a table that will not do, and what to change.
        OSError: a file, the network or a folder that is not there.
    """
    return workload(size, "text_classification", **options)


def language_modelling(size: str = "auto", **options) -> Workload:
    """Predict the next token.

    Args:
        size: "tiny" is a byte-level Llama on the source of Python's standard library, without a
            tokenizer; "large" is TinyLlama, 1.1 billion parameters, on 512 samples of 2,048 random
            tokens. The rest is as in `text_classification`.
        options: as in `text_classification`; `data` needs only the column `text`.
    """
    return workload(size, "language_modelling", **options)


def image_classification(size: str, **options) -> Workload:
    """Classify pictures with a vision transformer.

    Args:
        size: a hub id, a local folder or a name in `data/configs`, such as vit-large-patch16-224;
            it trains on random pictures, of the one size that it reads.
        options: `seed`.

    Raises:
        ValueError: a model of another kind, or an option for texts.
    """
    return workload(size, PICTURES, **options)


def speech_recognition(size: str, **options) -> Workload:
    """Write down what is said, with a Whisper.

    Args:
        size: as in `image_classification`, such as whisper-small; it trains on random sound of the
            30 seconds that it reads.
        options: `length` of a text in tokens, 448 at most; `seed`.
    """
    return workload(size, SPEECH, **options)


def workload(
    size: str,
    task: str | None = None,
    data: str | Path | None = None,
    length: int | None = None,
    pretrained: bool = False,
    seed: int = 0,
) -> Workload:
    """The workload of a task, or of a model's usual one; the rest as in `text_classification`."""
    task = task or usual_task(size)
    note = ""
    if size == "auto" and task in LARGE:
        size, note = picked(task)
    refuse(task, size, data, length)
    if size != "tiny" and pretrained:
        raise ValueError('pretrained=True is for size "tiny"; other models bring their weights')
    if size == "tiny":
        made = replace(tiny(task, length or 128), note=note, seed=seed)
        return replace(made, weights=pretrain(made)) if pretrained else made
    made = large(task, length) if size == "large" else named(task, size, length)
    made = made if data is None else with_data(made, str(data))
    return replace(made, note="; ".join(filter(None, (note, made.note))), seed=seed)


def tiny(task: str, length: int) -> Workload:
    """A model that two CPU cores train in seconds, on Python's own source."""
    classify = task == "text_classification"
    read = partial(standard_library, classify, length)
    name, rate = ("tiny BERT", 1e-3) if classify else ("tiny Llama", 3e-3)
    return Workload(name, task, tiny_config(classify, length), length, read, learning_rate=rate)


def large(task: str, length: int | None) -> Workload:
    """The model of the classic experiments, with its weights where the hub can be reached."""
    known, hub_id, usual = LARGE[task]
    made = named(task, known, length, usual)
    if reachable(hub_id):
        return replace(made, weights=hub_id)
    return replace(made, note=OFFLINE)


def named(task: str, name: str, length: int | None, usual: int | None = None) -> Workload:
    """A model by its name, on random tokens: as many as asked for, or as it usually reads."""
    config, weights, name = find_model(name)
    refuse_model(name, task, config)
    if task in (PICTURES, SPEECH):
        return Workload(name, task, config, *beside_texts(name, task, config, length), weights)
    usual = usual or LARGE[task][2]
    classify = task == "text_classification"
    if classify and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # decoders classify by the last token that is not padding
    config.use_cache = False  # keys and values are cached for generation only
    most = getattr(config, "max_position_embeddings", None) or 0
    most = most if most > 0 else length or usual  # XLNet's is -1: as long as you like
    length = length or min(usual, most)
    if length > most:
        raise ValueError(f"{name} reads {most} tokens at most")
    read = partial(random_tokens, classify, length, config.vocab_size)
    return Workload(name, task, config, length, read, weights)
