"""A workload's `Trainer`, with the arguments that a short measured run needs."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from transformers import Trainer, TrainingArguments

from fake_cuda.units import CLASSIFY, TEXTS_AND_PICTURES

from .hardware import device


def usual_arguments(workload) -> dict:
    """What a run's `TrainingArguments` are unless told otherwise: nothing is saved or sent."""
    return {
        "output_dir": str(Path(tempfile.gettempdir()) / "one-gpu-measured"),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "dataloader_drop_last": True,
        "train_sampling_strategy": "sequential",
        "learning_rate": workload.learning_rate,
        "use_cpu": device().type == "cpu",
        "dataloader_pin_memory": device().type != "cpu",
        "seed": workload.seed,
    }


def new_trainer(
    workload,
    optimizer: Callable | None,
    pretrained: bool,
    train_data: Iterable,
    test_data: Iterable,
    arguments: dict,
) -> Trainer:
    """The `Trainer` of a `Workload`; the rest as in `Workload.trainer`.

    Raises:
        ValueError: the function given as optimizer returned none.
    """
    args = TrainingArguments(**usual_arguments(workload) | arguments)
    on_one_card(args)
    model = workload.model(pretrained)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    classify = workload.task in CLASSIFY
    if classify:
        # These heads ignore the number of items that the Trainer hands them, so it would
        # multiply the gradient by the accumulation steps (transformers issue 47688, lesson 04).
        base.accepts_loss_kwargs = False
    elif workload.task == TEXTS_AND_PICTURES:
        with_pictures(base, args)
    trainer = Trainer(
        model,
        args,
        train_dataset=train_data,
        eval_dataset=test_data,
        data_collator=workload.collate,
        compute_metrics=accuracy if classify else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if not args.use_cpu:  # Accelerate and transformers turn tf32 on for compiled code, for good
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    if optimizer is not None:
        trainer.optimizer = optimizer(trainer.model, args)
        if trainer.optimizer is None:  # for the Trainer that would mean AdamW
            raise ValueError("a function given as optimizer must return the optimizer")
    return trainer


def with_pictures(model: torch.nn.Module, args: TrainingArguments) -> None:
    """What a Qwen3-VL needs, for the loss of all labels of a step and for whole batches.

    Raises:
        ValueError: labels are to be smoothed, which Trainer does to each token's own label and not
            to the next one's: it does not know the class (`compute_loss`).
    """
    if args.label_smoothing_factor:
        raise ValueError(
            "label_smoothing_factor compares tokens with themselves here: leave it out"
        )
    # Its class says no, and its loss takes the number of labels all the same: without it each
    # micro-batch would weigh alike, however many it has.
    model.accepts_loss_kwargs = True
    # Of a stream Accelerate takes as many rows of each tensor as a batch has samples, so that it
    # would cut off patches (accelerate/data_loader.py: DataLoaderDispatcher).
    args.accelerator_config.dispatch_batches = False


def on_one_card(args: TrainingArguments) -> None:
    """Train on the first card where several are visible, and say so.

    The Trainer would copy the model to each (DataParallel), while memory is read on one. torchrun
    gives each process a card of its own. This is a hack: `_n_gpu` is a private name, which the
    Trainer sets itself to keep to one card. If it moves, nothing fails but the test of this.
    """
    if args.n_gpu > 1:
        print(f"{args.n_gpu} cards are visible: training on the first, {args.device}.")
        args._n_gpu = 1


def accuracy(prediction) -> dict[str, float]:
    """Share of right answers, from the logits [samples, classes] of an evaluation."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
