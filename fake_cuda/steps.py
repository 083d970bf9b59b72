"""Two steps of the plain loop, of a model, a batch, a loss and an optimizer that somebody has."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .card import Card
from .rebuilt import (
    Refused,
    batch_of,
    first_line,
    leaves_of,
    optimizer_of,
    samples_of,
    tensors_of,
    twin,
)
from .refusals import OUTSIDE, NotSimulated
from .replay import Simulation
from .simulation import simulate

TARGETS = "the loss uses a tensor made outside: give (inputs, targets) as the batch, and a loss of"
TARGETS += " the output and the targets"
REFUSES = {  # by what was being done, when something raised an error
    "model": "the model cannot be built: {}; a class takes its arguments by functools.partial",
    "forward": "the model refuses a batch of {batch}: {}",
    "loss": "the loss cannot be made of what the model returns: {}",
    "optimizer": "the optimizer cannot be made of the model's parameters: {}",
    "optimizer step": "the optimizer makes no plain step: {}",
}


def takes_targets(loss: Callable | None) -> bool:
    """Whether a loss has two arguments that have to be told: the output, and targets."""
    try:
        asked = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)
    except (TypeError, ValueError):  # None; a function of C, of which nothing is known
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in asked.parameters.values() if p.kind in places and p.default is p.empty]
    return len(needed) > 1


def scalar(found) -> torch.Tensor:
    """A loss to go backward from.

    Raises:
        Refused: it is not one number, or no parameter has a part in it.
    """
    hint = "pass loss=, a function of what the model returns"
    if not isinstance(found, torch.Tensor):
        raise Refused(f"the loss is of the type {type(found).__name__} and no tensor: {hint}")
    if found.numel() != 1:
        shape = " x ".join(map(str, found.shape))
        raise Refused(f"the loss has {shape} values and is no scalar: {hint}")
    if not found.requires_grad:
        raise Refused("no parameter that is trained has a part in the loss")
    return found


def own_loss(output):
    """What stands for the loss in what a model returns: `.loss`, itself, or the first of it."""
    if isinstance(output, torch.Tensor):
        return output
    if "loss" in getattr(output, "__dataclass_fields__", ()) and output.loss is None:
        raise Refused("the model returns no loss: put labels into the batch, or pass loss=")
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, Mapping) and output:
        return output.get("loss", next(iter(output.values())))
    return output[0] if isinstance(output, list | tuple) and output else output


@dataclass
class Steps:
    """Two steps of the plain loop, to be simulated.

    Args:
        model: a module on the CPU or the meta device, or a function that builds one.
        batch: what the model is given: a tensor, a tuple, or a dictionary by name; with a loss of
            two arguments a pair, of what the model and what the loss is given.
        optimizer: a class or a function of the parameters, or an instance made for this model.
        loss: a function of the output, or of the output and the targets; None: the model's own.
        dimension: of the batch's tensors, in which its samples are counted.
    """

    model: torch.nn.Module | Callable
    batch: object
    optimizer: Callable | torch.optim.Optimizer
    loss: Callable | None
    dimension: int

    def __post_init__(self):
        self.doing, self.pair = "", takes_targets(self.loss)
        if isinstance(self.model, torch.nn.Module):
            tensors_of(self.model)  # before anything is simulated
        elif not callable(self.model):
            kind = type(self.model).__name__
            raise Refused(
                f"the model is of the type {kind}: a module, or a function that builds it"
            )
        if not (callable(self.optimizer) or isinstance(self.optimizer, torch.optim.Optimizer)):
            kind = type(self.optimizer).__name__
            raise Refused(
                f"the optimizer is of the type {kind}: a class, such as torch.optim.AdamW"
            )
        if self.pair and not (isinstance(self.batch, list | tuple) and len(self.batch) == 2):
            raise Refused("a loss of two arguments needs a batch of two parts: (inputs, targets)")
        self.samples = samples_of(self.batch, self.dimension)
        if not self.samples:
            raise Refused(f"the batch has no tensor with samples in dimension {self.dimension}")

    def simulated(self, samples: int, card: Card | None) -> Simulation:
        """A simulation of two steps with so many samples on a card, or on a CPU.

        Raises:
            Refused: the model, the batch, the loss and the optimizer do not go together.
            NotSimulated: the run needs what no simulation has.
        """
        try:
            return simulate(lambda: self.run(samples), card)
        except Refused:
            raise
        except NotSimulated as error:
            if self.doing == "loss" and error.what == OUTSIDE:
                raise Refused(TARGETS) from error
            raise
        except Exception as error:
            if self.doing not in REFUSES:
                raise
            said = REFUSES[self.doing].format(first_line(error), batch=self.shapes(samples))
            raise Refused(said) from error

    def run(self, samples: int) -> tuple:
        """The loop. What it returns lives on."""
        self.doing = "model"
        model, parameters = self.built()
        self.doing = "optimizer"
        optimizer = optimizer_of(self.optimizer, model, parameters)
        batch = batch_of(self.batch, samples, self.dimension)
        for _ in range(2):
            self.loss_of(model, batch).backward()
            self.doing = "optimizer step"
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, batch

    def built(self) -> tuple[torch.nn.Module, dict]:
        if isinstance(self.model, torch.nn.Module):
            model, parameters = twin(self.model)
        else:
            model, parameters = self.model(), {}
            if not isinstance(model, torch.nn.Module):
                kind = type(model).__name__
                raise Refused(f"the function that builds the model returns {kind} and no module")
        return (model if model.training else model.train()), parameters

    def loss_of(self, model: torch.nn.Module, batch) -> torch.Tensor:
        inputs, targets = batch if self.pair else (batch, None)
        self.doing = "forward"
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)
        self.doing = "loss"
        if self.loss is None:
            found = own_loss(output)
        else:
            found = self.loss(output, targets) if self.pair else self.loss(output)
        found = scalar(found)
        self.doing = "backward"
        return found

    def shapes(self, samples: int) -> str:
        """The batch in words."""
        leaves = [list(leaf.shape) for leaf in leaves_of(self.batch)]
        for shape in leaves:
            if len(shape) > self.dimension and shape[self.dimension] == self.samples:
                shape[self.dimension] = samples
        return ", ".join(str(shape) for shape in leaves)
