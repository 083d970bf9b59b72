"""The techniques that the planner tries, one value each, and their combinations.

A new technique is one `Technique` below, named in a `Kind` (training changes) or a `Way` (the
result stays). If more is to be pasted than settings and functions, its lines are in
`examples/recipe.jinja`, which asks for a technique by its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import changes


@dataclass(frozen=True, eq=False)
class Technique:
    """One thing that training can do otherwise; two are equal only if they are the same object.

    Args:
        name: how the template asks for it.
        price: what it costs in quality or trouble, in words.
        settings: keywords of TrainingArguments.
        model: a function of the plain model that returns the model to train.
        optimizer: a function `f(model, args)` for the optimizer that Trainer is given.
        half: whether the model is loaded in the 16 bits of the card.
        precisions: of 16 bits, those that it can be used with; the card decides between them.
        no_autocast: the precisions of 16 bits for which Trainer must not autocast.
        accumulates: whether a step may have several micro-batches.
        adapters: whether only they learn, so that the weights need no gradients.
        mixture: the same for a mixture whose experts are one parameter, which `model` passes by.
        mixture_price: what is to be said of such experts.
        functions: pasted in front of the script, as they stand in the source.
        mixture_functions: pasted for a mixture, too.
        packages: that the script needs beside transformers and accelerate.
    """

    name: str
    price: str
    settings: Mapping[str, object] = field(default_factory=dict)
    model: Callable | None = None
    mixture: Callable | None = None
    mixture_price: str = ""
    optimizer: Callable | None = None
    half: bool = False
    precisions: tuple[str, ...] = ("bf16", "fp16")
    no_autocast: tuple[str, ...] = ()
    accumulates: bool = True
    adapters: bool = False
    functions: tuple[Callable, ...] = ()
    mixture_functions: tuple[Callable, ...] = ()
    packages: tuple[str, ...] = ()


BF16_WEIGHTS = Technique(
    name="bf16 weights",
    price="weights in bf16: small updates are rounded away",
    half=True,
    precisions=("bf16",),
    no_autocast=("bf16", "fp16"),  # the weights have their type already
)
ADAMW_8BIT = Technique(
    name="8-bit AdamW",
    price="optimizer states of 8 bits",
    settings={"optim": "adamw_8bit"},
    packages=("bitsandbytes",),
)
ADAFACTOR = Technique(
    name="Adafactor",
    price="another optimizer, with a learning rate of its own",
    settings={"optim": "adafactor"},
)
IN_BACKWARD = Technique(
    name="updates in backward",
    price="gradients are not clipped, and checkpoints hold no optimizer states",
    settings={"max_grad_norm": 0},
    optimizer=changes.in_backward,
    no_autocast=("fp16",),  # its scaled gradients would be used before they are unscaled
    accumulates=False,
    functions=(changes.in_backward,),
)
LORA = Technique(
    name="LoRA",
    price="only adapters learn",
    model=changes.adapters,
    mixture=changes.adapters_beside_experts,
    mixture_price="experts and their router stay as they are",
    half=True,
    adapters=True,
    packages=("peft",),
)
FOUR_BITS = Technique(
    name="4-bit weights",
    price="the weights beside them are rounded to 4 bits",
    model=changes.in_4_bits,
    mixture=changes.all_in_4_bits,
    mixture_price="experts too, from 16 bits in the host's memory, and each pass unpacks them",
    half=True,  # what is not quantized
    mixture_functions=(
        changes.linear_layers,
        changes.head_name,
        changes.in_4_bits,
        changes.experts_in_4_bits,
    ),
    packages=("bitsandbytes",),
)
CHUNKED_LOSS = Technique(
    name="chunked loss",
    price="logits are computed twice, and the model returns none",
    model=changes.chunked_loss,
    functions=(changes.part, changes.chunked_loss),
)
# Liger computes the loss in pieces inside its kernels, and the gradient with it, and has kernels of
# norms, of the gated product and of rotations beside it. Triton's list of cards (README of
# triton-lang/triton) begins with compute capability 8.0, as bf16 does.
LIGER = Technique(
    name="Liger kernels",
    price="another package, for Linux alone, and the model returns no logits while it trains",
    settings={"use_liger_kernel": True},
    precisions=("bf16",),
    packages=("liger-kernel",),
)
CHECKPOINTING = Technique(
    name="checkpointing",
    price="each layer is computed twice",
    settings={"activation_checkpointing": True},
)
ON_THE_HOST = Technique(
    name="checkpoints on the host",
    price="two journeys over the bus, and memory of the host",
    settings={"activation_checkpointing_kwargs": {"offload": True}},
)
# Those that change the model, in the order in which they do: adapters wrap what the others made.
CHANGE_THE_MODEL = (CHUNKED_LOSS, FOUR_BITS, LORA)


@dataclass(frozen=True, eq=False)
class Kind:
    """What training changes; `least` are the bytes that a weight takes at least.

    Weight, gradient and optimizer states: 16 bytes for AdamW in float32, 10 with states of 8 bits.
    Adafactor's states are small, and in backward a gradient is gone before the next one is made.
    """

    name: str
    least: float
    techniques: tuple[Technique, ...] = ()

    @property
    def adapters(self) -> bool:
        """Whether only adapters learn."""
        return any(technique.adapters for technique in self.techniques)

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several micro-batches."""
        return all(technique.accumulates for technique in self.techniques)

    @property
    def with_adamw(self) -> "Kind | None":
        """Another kind that trains the same weights, by AdamW; None where there is none."""
        rest = tuple(t for t in self.techniques if t not in (ADAMW_8BIT, ADAFACTOR, IN_BACKWARD))
        alike = (kind for kind in KINDS if kind is not self and kind.techniques == rest)
        return next(alike, None)

    @property
    def plainer(self) -> "Kind | None":
        """The kind that differs by its optimizer alone, which is AdamW; None where there is none.

        Updates in backward are more than another optimizer.
        """
        return None if IN_BACKWARD in self.techniques else self.with_adamw

    def possible(self, precision: str) -> bool:
        """Whether a card can do it that computes in `precision`, "bf16" or "fp16"."""
        return all(precision in technique.precisions for technique in self.techniques)


@dataclass(frozen=True, eq=False)
class Way:
    """What saves memory and leaves the result as it is."""

    name: str = ""
    techniques: tuple[Technique, ...] = ()


PLAIN = Way()
# Least change first. In a tuple of techniques stands first what is said and set first.
KINDS = (
    Kind("full", 16),
    Kind("full, 8-bit AdamW", 10, (ADAMW_8BIT,)),
    Kind("full, Adafactor", 8, (ADAFACTOR,)),
    Kind("full, Adafactor in backward", 4, (ADAFACTOR, IN_BACKWARD)),
    Kind("full in bf16", 8, (BF16_WEIGHTS,)),
    Kind("full in bf16, 8-bit AdamW", 6, (BF16_WEIGHTS, ADAMW_8BIT)),
    Kind("full in bf16, Adafactor in backward", 2, (BF16_WEIGHTS, ADAFACTOR, IN_BACKWARD)),
    Kind("LoRA", 2, (LORA,)),
    Kind("QLoRA", 0.5, (LORA, FOUR_BITS)),
)
SMALLEST = KINDS[-1]  # what needs least
# Least trouble first, the slowest last. A question has either Liger's kernels or the chunked loss.
WAYS = (
    PLAIN,
    Way("Liger kernels", (LIGER,)),
    Way("chunked loss", (CHUNKED_LOSS,)),
    Way("checkpointing", (CHECKPOINTING,)),
    Way("checkpointing, Liger kernels", (LIGER, CHECKPOINTING)),
    Way("checkpointing, chunked loss", (CHUNKED_LOSS, CHECKPOINTING)),
    Way("checkpoints on the host", (CHECKPOINTING, ON_THE_HOST)),
    Way("checkpoints on the host, Liger kernels", (LIGER, CHECKPOINTING, ON_THE_HOST)),
    Way("checkpoints on the host, chunked loss", (CHUNKED_LOSS, CHECKPOINTING, ON_THE_HOST)),
)


@dataclass(frozen=True)
class Plan:
    """A combination: what training changes, and how it saves memory."""

    kind: Kind
    way: Way = PLAIN

    @classmethod
    def named(cls, name: str) -> "Plan":
        """The combination of this name, such as "LoRA, checkpointing"; KeyError for another."""
        return {plan.name: plan for plan in every_plan()}[name]

    @property
    def name(self) -> str:
        """As it is shown, and kept in tables."""
        return ", ".join(filter(None, (self.kind.name, self.way.name)))

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """In the order in which their prices are said and their settings written."""
        return self.kind.techniques + self.way.techniques

    def price(self, mixture: bool = False) -> str:
        """What it costs in quality or trouble, in words; of a mixture's experts, too."""
        said = [[t.price] + [t.mixture_price] * mixture for t in self.techniques]
        return "; ".join(filter(None, sum(said, []))) or "nothing"

    @property
    def half(self) -> bool:
        """Whether the model is loaded in 16 bits."""
        return any(technique.half for technique in self.techniques)

    @property
    def optimizer(self) -> Callable | None:
        """Makes the optimizer that Trainer is given; None where its settings name one."""
        made = [technique.optimizer for technique in self.techniques if technique.optimizer]
        return made[0] if made else None

    def autocasts(self, precision: str) -> bool:
        """Whether Trainer autocasts on a card that computes in `precision`."""
        return not any(precision in technique.no_autocast for technique in self.techniques)

    def settings(self) -> dict[str, object]:
        """Keywords of TrainingArguments."""
        found = {}
        for technique in self.techniques:
            found |= technique.settings
        return found

    def model_changes(self, mixture: bool = False) -> list[Callable]:
        """The functions that make the model to train from the plain one, first to last."""
        first = [changes.in_16_bits] if self.half else []
        made = [t for t in CHANGE_THE_MODEL if t in self.techniques]
        return first + [t.mixture if mixture and t.mixture else t.model for t in made]


def every_plan() -> list[Plan]:
    """All combinations that there are."""
    return [Plan(kind, way) for kind in KINDS for way in WAYS]
