"""What a lesson trains: a model, its data and a collator, as one frozen value."""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch
import transformers
from safetensors import SafetensorError

from fake_cuda.units import SPEECH, TEXTS_AND_PICTURES, titled

from .hardware import own_file
from .samples import one_sample, together
from .tasks import MODELS, loss_of_step
from .tiny import CACHE
from .trainers import new_trainer


@dataclass(frozen=True)
class Workload:
    """A seeded model and its data.

    `config` describes the model, `weights` is where pretrained ones come from (None: random),
    `data` returns the data set of a split, "train" or "test", in training order: samples are
    `input_ids` of `length` tokens and `labels` (a class, or the tokens themselves). Or they are
    `pixel_values`, which the model reads as `length` tokens, and their class; or `input_features`,
    30 seconds of sound, and `labels` of `length` tokens; or a text that begins with a picture of
    `image_size` pixels a side.
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
    image_size: int | None = None

    @property
    def title(self) -> str:
        return titled(self.name, self.task, self.length, self.image_size)

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

    @property
    def collate(self) -> Callable[[list[dict]], dict[str, torch.Tensor]]:
        """Makes a batch of samples: tensors of [batch, length], [batch] for class labels, and
        [batch, channels, height, width] for pictures; those in texts are [patches, numbers]."""
        if self.task == TEXTS_AND_PICTURES:
            return together
        return transformers.default_data_collator

    def dataloader(self, n: int) -> torch.utils.data.DataLoader:
        """Batches of n samples in the order in which `train` sees them, for a loop of your own."""
        return torch.utils.data.DataLoader(
            self.data("train"), batch_size=n, collate_fn=self.collate, drop_last=True
        )

    def sample(self) -> dict[str, torch.Tensor]:
        """What stands for each sample where only its shape counts: made without the data."""
        return one_sample(self.task, self.config, self.length, self.masked, self.image_size)

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
