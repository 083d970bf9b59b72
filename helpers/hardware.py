"""What this machine can do, and the facts of a card from `data/gpus.csv`."""

import difflib
import importlib.metadata
import platform
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pandas as pd
import psutil
import pynvml
import torch

GIB = 2**30
# Lowest compute capability with hardware for each feature (CUDA C++ Programming Guide, "Compute
# Capabilities"). A T4 (7.5) computes bf16 by emulation, which is slow: that is not support.
FEATURES = dict(fp16=(7, 0), bf16=(8, 0), tf32=(8, 0), fp8=(8, 9), flash_attention=(8, 0))
# The driver keeps some of a card's memory for itself, so a card tells a few percent less than its
# data sheet; the sizes in which one card is sold (40 and 80 GiB, say) are far further apart.
MEMORY_TOLERANCE = 0.05


def gib(n: float | None) -> str:
    """Bytes as text: GiB (2**30), MiB (2**20) below a tenth of a GiB, KiB below a tenth of a MiB.

    Two decimals from 1 GiB on, three digits below; "-" for None.
    """
    if n is None:
        return "-"
    if round(abs(n) / GIB, 3) >= 1:
        return f"{n / GIB:,.2f} GiB"
    units = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
    unit = next((unit for unit, size in units.items() if abs(n) >= size / 10), "MiB")
    return f"{n / units[unit]:#.3g}".rstrip(".") + f" {unit}" if n else "0 MiB"


def suggest(word, choices, what: str) -> str:
    """One sentence for an unknown `word`: the nearest of `choices`, or all of them."""
    names = {str(choice).lower(): choice for choice in choices}
    word_ = str(word).lower()
    near = [n for n in names if n.startswith(word_)] or difflib.get_close_matches(word_, names, n=1)
    hint = f"did you mean {names[near[0]]!r}?" if near else f"choose from {', '.join(choices)}"
    return f"{word!r} is not a known {what}: {hint}"


def data_file(*parts: str) -> Path:
    """A path below the course's `data/` folder, found by looking upward from the working folder."""
    folders = [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[1]]
    root = next((f / "data" for f in folders if (f / "data" / "gpus.csv").is_file()), None)
    if root is None:
        raise FileNotFoundError(
            "data/gpus.csv was not found in this folder or any above it: "
            "start from inside a clone of the course repository."
        )
    return root.joinpath(*parts)


@dataclass(frozen=True)
class GPU:
    """A card. Memory in bytes as the driver reports it; what `data/gpus.csv` leaves open is None.

    `context` is what the CUDA context takes before the first tensor, where somebody measured it.
    `facts` holds the other columns: rates in TFLOPS without sparsity, bandwidth in GB/s, a source.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    context: int | None = None
    facts: dict = field(default_factory=dict)


def cards() -> dict[str, GPU]:
    """The cards of `data/gpus.csv`, by name."""
    table, cards = pd.read_csv(data_file("gpus.csv"), dtype={"compute_capability": str}), {}
    for row in table.to_dict("records"):
        row = {key: None if pd.isna(value) else value for key, value in row.items()}
        name, memory = row.pop("name"), int(row.pop("memory_mib") * 2**20)
        context = row.pop("cuda_context_mib")
        capability = tuple(int(n) for n in row.pop("compute_capability").split("."))
        cards[name] = GPU(name, memory, capability, context and int(context * 2**20), row)
    return cards


def gpu(name: str) -> GPU:
    """The facts of a card in `data/gpus.csv`.

    Raises:
        ValueError: no card has this name; the message has the nearest one, or all of them.

    Example:
        >>> gib(gpu("T4").memory)
        '15.00 GiB'
    """
    known = cards()
    for card in known.values():
        if card.name.lower() == str(name).lower():
            return card
    message, listed, _ = suggest(name, known, "GPU").partition("choose from ")
    if listed:
        names = (n if card.facts["fp16_tflops"] else f"{n}*" for n, card in known.items())
        listed += f"{', '.join(names)} (* rates unknown: bytes, but no times)"
    raise ValueError(message + listed)


def this_gpu() -> GPU:
    """The CUDA card in this machine, as the driver describes it.

    It has the rates of a row of `data/gpus.csv` only if it is that card: by name, capability,
    multiprocessors and memory, and with the same socket.
    """
    card = torch.cuda.get_device_properties(0)
    found, words = (card.major, card.minor), set(re.split("[ -]", card.name.upper()))
    facts = {"sms": card.multi_processor_count}
    for row in cards().values():
        name = set(re.split("[ -]", row.name.upper()))
        same = (row.capability, row.facts["sms"]) == (found, facts["sms"]) and name <= words
        size = abs(row.memory / card.total_memory - 1) < MEMORY_TOLERANCE
        if same and size and ("PCIE" in name) == ("PCIE" in words):
            facts = row.facts
    return GPU(card.name, card.total_memory, found, None, facts)


def device() -> torch.device:
    """The device the lessons train on: this machine's accelerator, else its CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def supports(feature: str, card: GPU | None = None) -> bool:
    """Whether this machine has hardware for a feature.

    Of these a CPU counts as supporting bf16 alone: it trains in it, at whatever speed, while
    `fp16=True` would silently train in fp32.

    Args:
        feature: one of `FEATURES`, such as "bf16".
        card: a card to ask of instead of this machine.

    Raises:
        ValueError: another feature.
    """
    if feature not in FEATURES:
        raise ValueError(suggest(feature, FEATURES, "feature"))
    if card is None and not torch.cuda.is_available():
        return feature == "bf16" and device().type == "cpu"
    capability = card.capability if card else torch.cuda.get_device_capability()
    return capability >= FEATURES[feature]


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a run needs."""
    found = {"python": platform.python_version()}
    for name in ("accelerate", "bitsandbytes", "liger-kernel", "peft", "torch", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@dataclass(frozen=True)
class Hardware:
    """What `describe()` found. Memory in bytes: the card's, or else the machine's."""

    device: str
    name: str
    memory: int
    free: int
    capability: tuple[int, int] | None
    features: tuple[str, ...]
    versions: dict[str, str]
    cards: int = 1  # in the machine; the course uses the first

    def __str__(self) -> str:
        dotted = ".".join(map(str, self.capability or ()))
        parts = [
            f"{self.name}, {gib(self.memory)} ({gib(self.free)} free)",
            f"the first of {self.cards} cards" if self.cards > 1 else "",
            f"compute capability {dotted}" if dotted else "",
            f"hardware for {', '.join(self.features) or 'none of ' + ', '.join(FEATURES)}",
            *(f"{library} {self.versions[library]}" for library in ("torch", "transformers")),
        ]
        return f"{self.device}: " + ", ".join(filter(None, parts))


def describe() -> Hardware:
    """This machine: printed it is one line, and every part of it is an attribute."""
    kind, capability, ram = device().type, None, psutil.virtual_memory()
    name, memory, free, cards = f"{torch.get_num_threads()} threads", ram.total, ram.available, 1
    if kind == "cuda":
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        free, memory = torch.cuda.mem_get_info()
        with suppress(pynvml.NVMLError):  # counts the hidden ones too
            pynvml.nvmlInit()
            cards = pynvml.nvmlDeviceGetCount()
    features = tuple(feature for feature in FEATURES if supports(feature))
    return Hardware(kind, name, memory, free, capability, features, versions(), cards)
