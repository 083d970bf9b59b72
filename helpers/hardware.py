"""What this machine can do, and the facts of a card from `data/gpus.csv`."""

import importlib.metadata
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import psutil
import pynvml
import torch

from fake_cuda.cards import GIB, GPU, cards, gib, gpu, suggest
from fake_cuda.files import data_file, own_file

__all__ = ["FEATURES", "GIB", "GPU", "Hardware", "cards", "data_file", "describe", "device", "gib"]
__all__ += ["gpu", "own_file", "suggest", "supports", "this_gpu", "versions"]
# Lowest compute capability with hardware for each feature (CUDA C++ Programming Guide, "Compute
# Capabilities"). A T4 (7.5) computes bf16 by emulation, which is slow: that is not support.
FEATURES = dict(fp16=(7, 0), bf16=(8, 0), tf32=(8, 0), fp8=(8, 9), flash_attention=(8, 0))
# The driver keeps some of a card's memory for itself, so a card tells a few percent less than its
# data sheet; the sizes in which one card is sold (40 and 80 GiB, say) are far further apart.
MEMORY_TOLERANCE = 0.05


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
