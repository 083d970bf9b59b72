"""What one step of training needs on a card, asked of a model and a batch.

    found = fake_cuda.estimate(model, batch, torch.optim.AdamW, gpu="T4")
    print(found)  # bytes by category, whether it fits, seconds, the largest batch

The README.md beside this file has an example, and what is counted and what is not.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from .card import Card
from .cards import CONTEXT, GIB, gib, gpu
from .cost import Time
from .rebuilt import Refused
from .replay import CONVOLUTIONS, Simulation
from .steps import Steps

MB = 2**20
MOST_SAMPLES = 2**20  # of a batch, up to which the largest is looked for
TRIES = 8  # with a straight line; after them the middle is tried
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB)\s*", re.IGNORECASE)


class Verdict(int):
    """Whether a step fits the card that was asked about, True or False; called, whether another.

    The request to PyTorch calls it (`fits(device=0)`), and who writes `if found.fits:` must not be
    told yes because a method is always true. A bool cannot be inherited from: it is an int.
    """

    def __new__(cls, reserved: int, card: Card):
        self = super().__new__(cls, reserved + _context(card) <= card.memory)
        self.reserved, self.card = reserved, card
        return self

    def __call__(self, device: int | str | Card | None = None) -> bool:
        """Whether these bytes fit another card.

        Args:
            device: a name, a size such as "24GiB", or a number: of the cards in this machine, and
                where there is none, 0 for the card that was asked about.

        Raises:
            ValueError: there is no such card.
        """
        card = self.card if device is None else device
        if isinstance(device, int):
            card = _numbered(device) or self.card
        card = target(card)
        if card is None or not card.memory:
            raise ValueError("to fit, a card must have a memory: name one, such as 'T4' or '24GiB'")
        return self.reserved + _context(card) <= card.memory

    def __repr__(self) -> str:
        return str(bool(self))


@dataclass
class StepEstimate:
    """What a step of training needs. All sizes in bytes.

    `by_category` splits the moment of `peak_allocated`, and `peak_by_category` has each category's
    own maximum. `peak_reserved` is what the caching allocator takes, and with `context` all that
    the card must have. `largest_batch` is the most samples that fit. `time` has a step's seconds
    with their range, or in `note` why there are none. On a CPU there are the allocated bytes alone.
    """

    card: Card | None
    optimizer: str
    samples: int
    peak_allocated: int
    by_category: dict[str, int]
    peak_by_category: dict[str, int]
    peak_reserved: int | None
    context: int | None
    time: Time | None
    largest_batch: int | None = None
    note: str = ""
    simulation: Simulation | None = field(default=None, repr=False)

    @property
    def fits(self) -> Verdict | None:
        """Whether it fits the card, with its CUDA context; `fits("A100-80GB")` asks of another.

        None where the card's memory is not known, and on a CPU.
        """
        known = self.card and self.card.memory
        return Verdict(self.peak_reserved, self.card) if known else None

    @property
    def headroom(self) -> int | None:
        """What the card has left; below 0 what it lacks."""
        if not (self.card and self.card.memory):
            return None
        return self.card.memory - self.peak_reserved - self.context

    # The names of the request to PyTorch, in its unit. They add up to less than the total, which
    # also has gradients and temporaries.
    total_mb = property(lambda self: self.peak_allocated / MB)
    params_mb = property(lambda self: self.by_category["parameters"] / MB)
    optimizer_mb = property(lambda self: self.by_category["optimizer states"] / MB)
    activations_mb = property(lambda self: self.by_category["activations"] / MB)

    def __str__(self) -> str:
        """The ledger of the peak, whether it fits, how long a step takes, and the largest batch."""
        where = self.card.name if self.card else "a CPU"
        lines = [f"A step of {self.samples} samples with {self.optimizer} on {where}"]
        lines += [f"  {category:17}{gib(n):>11}" for category, n in self.by_category.items()]
        lines.append(f"{'peak allocated':19}{gib(self.peak_allocated):>11}")
        if self.card:
            with_context = f", with a CUDA context {gib(self.peak_reserved + self.context)}"
            lines.append(f"{'peak reserved':19}{gib(self.peak_reserved):>11}{with_context}")
        if self.fits is not None:
            left = f"{gib(abs(self.headroom))} {'are left' if self.fits else 'are missing'}"
            verdict = "It fits" if self.fits else "It does not fit"
            lines.append(f"{verdict} the card's {gib(self.card.memory)}: {left}.")
        if self.time:
            lines.append(str(self.time))
        if self.largest_batch is not None:
            most = " or more" if self.largest_batch == MOST_SAMPLES else ""
            lines.append(f"The largest batch that fits: {self.largest_batch:,}{most}")
        return "\n".join(lines + ([self.note] if self.note else []))


def estimate(
    model: torch.nn.Module | Callable,
    batch: torch.Tensor | tuple | Mapping,
    optimizer: Callable | torch.optim.Optimizer = torch.optim.AdamW,
    loss: Callable | None = None,
    gpu: str | Card = "T4",
    *,
    batch_dimension: int = 0,
    largest: bool = True,
) -> StepEstimate:
    """What a step of training this model on this batch needs on a card, without one.

    Args:
        model: on the CPU or the meta device (it stays as it is), or a class or function that builds
            it, which then takes no memory here; `functools.partial` brings arguments.
        batch: of real or fake tensors, of which the shapes count: one tensor, a tuple of what
            `forward` takes, or a dictionary by its names.
        optimizer: a class, a function of the parameters, or an instance made for this very model,
            of which the class and settings are used.
        loss: a function of what the model returns; one of two arguments gets the second part of the
            batch as targets, the model the first. None: `.loss`, the output if it is a scalar, or
            its first part.
        gpu: a card's name (data/gpus.csv), a `Card`, a size such as "24GiB", or "cpu".
        batch_dimension: in which samples are counted; those tensors of the batch that have as many
            there as the first one are made larger to find the largest batch.
        largest: whether to look for the largest batch, which takes some further simulations.

    Returns:
        The peak and what it is made of, whether it fits, seconds with their range, the largest
        batch; printed it is ten lines.

    Raises:
        ValueError: the parts do not go together, or there is no such card.
        NotSimulated: a ValueError. The model needs values of tensors, a GPU, or a kernel that no
            simulation has.
        FileNotFoundError: a card is named, and the table of cards is not there.
    """
    card = target(gpu)
    steps = Steps(model, batch, optimizer, loss, batch_dimension)
    found = steps.simulated(steps.samples, card)
    made = optimizer if not isinstance(optimizer, torch.optim.Optimizer) else type(optimizer)
    made = getattr(made, "func", made)
    result = StepEstimate(
        card=card,
        optimizer=getattr(made, "__name__", type(made).__name__),
        samples=steps.samples,
        peak_allocated=found.peak_allocated,
        by_category=found.by_category,
        peak_by_category=found.peak_by_category,
        peak_reserved=found.peak_reserved,
        context=card and _context(card),
        time=found.time,
        note=_note(found, card),
        simulation=found,
    )
    if largest and card and card.memory:
        try:
            result.largest_batch = _largest(steps, found, card)
        except Refused as error:
            note = f"Of the largest batch nothing is known: {error}."
            result.note = " ".join(filter(None, (result.note, note)))
    return result


def target(gpu_: str | Card) -> Card | None:
    """The card that is meant; None for a CPU."""
    if isinstance(gpu_, Card):
        return gpu_
    if str(gpu_).lower() == "cpu":
        return None
    if size := SIZE.fullmatch(str(gpu_)):
        unit = GIB if size[2].lower() == "gib" else 10**9
        return dataclasses.replace(Card.like((8, 0)), name=gpu_, memory=int(float(size[1]) * unit))
    try:
        row = gpu(gpu_)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "data/gpus.csv, which knows cards by their names, was not found: give a size such as "
            "gpu='24GiB', or a fake_cuda.Card"
        ) from error
    card = Card.of(row.name, row.capability, row.facts, memory=row.memory)
    return dataclasses.replace(card, context=row.context or 0)


def _note(found: Simulation, card: Card | None) -> str:
    """What is said beside the numbers; why there is no time is said in its place."""
    if card is None:
        return CONVOLUTIONS if found.convolves else ""
    return found.time.note if found.step_seconds else ""


def _context(card: Card) -> int:
    return card.context or CONTEXT


def _numbered(number: int) -> Card | None:
    """The card of that number in this machine; None stands for the one that was asked about."""
    if number < torch.cuda.device_count():
        there = torch.cuda.get_device_properties(number)
        card = Card.like((there.major, there.minor), there.multi_processor_count)
        return dataclasses.replace(card, name=there.name, memory=there.total_memory)
    if number or torch.cuda.device_count():
        raise ValueError(f"this machine has no card of the number {number}: name one, such as 'T4'")
    return None


def _largest(steps: Steps, found: Simulation, card: Card) -> int:
    """The most samples of which a step fits, and with one more it does not.

    Bytes grow nearly straight with the samples: a line through two counts leads to the next one.
    """
    room = card.memory - _context(card)
    fixed = sum(found.peak_by_category[k] for k in ("parameters", "gradients", "optimizer states"))
    known = {0: min(fixed, found.peak_reserved), steps.samples: found.peak_reserved}
    low, high = 0, MOST_SAMPLES + 1
    for tries in range(2 * MOST_SAMPLES.bit_length() + TRIES):
        low = max(n for n in known if not n or known[n] <= room)
        high = min([n for n in known if n and known[n] > room], default=MOST_SAMPLES + 1)
        if high - low <= 1:
            break
        (one, less), (other, more) = (
            sorted(known.items())[-2:]
            if high not in known
            else ((low, known[low]), (high, known[high]))
        )
        guess = (low + high) // 2
        if tries < TRIES and more > less:
            guess = int(one + (room - less) * (other - one) / (more - less))
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = steps.simulated(guess, card).peak_reserved
    return low
