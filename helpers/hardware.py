"""What this machine can do, and the facts of a card from `data/gpus.csv`."""

import difflib
import importlib.metadata
import platform
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pandas as pd
import psutil
import torch
from accelerate.state import AcceleratorState, GradientState

GIB = 2**30
# Lowest compute capability with hardware for each feature (CUDA C++ Programming Guide, "Compute
# Capabilities"). A T4 (7.5) computes bf16 by emulation, which is slow: that is not support.
FEATURES = {
    "cuda": (0, 0),
    "fp16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
    "flash_attention": (8, 0),
}


def gib(n: float | None) -> str:
    """Bytes as text in GiB (2**30): two decimals, or three digits below 1 GiB; "-" for None."""
    if n is None:
        return "-"
    n = n / GIB
    return f"{n:,.2f} GiB" if abs(n) >= 1 or n == 0 else f"{n:.3g} GiB"


def suggest(word, choices, what: str) -> str:
    """One sentence for an unknown `word`: the nearest of `choices`, or all of them."""
    near = difflib.get_close_matches(str(word).lower(), {str(c).lower(): c for c in choices}, n=1)
    name = next((c for c in choices if near and str(c).lower() == near[0]), None)
    hint = f"did you mean {name!r}?" if name else "choose from " + ", ".join(map(str, choices))
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
    """A card. Memory in bytes as the driver reports it, rates from its data sheet, None if unknown.

    `context` is what the CUDA context takes before the first tensor, where somebody measured it.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    bandwidth: float | None = None  # bytes per second
    flops: dict[str, float] = field(default_factory=dict)  # dense operations per second by dtype
    multiprocessors: int | None = None
    context: int | None = None
    source: str = ""


@cache
def _gpu_table(path: Path) -> dict[str, GPU]:
    table = pd.read_csv(path).set_index("name", drop=False)

    def card(row) -> GPU:
        def number(column: str, scale: float = 1) -> float | None:
            return None if pd.isna(row[column]) else row[column] * scale

        rates = {d: number(f"{d}_tflops", 1e12) for d in ("fp32", "tf32", "fp16", "bf16")}
        context, sms = number("cuda_context_mib", 2**20), number("sms")
        return GPU(
            name=row["name"],
            memory=int(row["memory_mib"] * 2**20),
            capability=tuple(int(n) for n in str(row["compute_capability"]).split(".")),
            bandwidth=number("bandwidth_gb_s", 1e9),
            flops={dtype: rate for dtype, rate in rates.items() if rate},
            multiprocessors=int(sms) if sms else None,
            context=int(context) if context else None,
            source=row["source"],
        )

    return {name: card(row) for name, row in table.iterrows()}


def gpu(name: str) -> GPU:
    """The facts of a card in `data/gpus.csv`, such as `gpu("T4")`; ValueError for an unknown one."""
    table = _gpu_table(data_file("gpus.csv"))
    found = next((n for n in table if n.lower() == str(name).lower()), None)
    if found is None:
        raise ValueError(suggest(name, table, "GPU"))
    return table[found]


def this_gpu() -> GPU:
    """The CUDA card in this machine, with its data-sheet facts where `data/gpus.csv` knows it."""
    found = torch.cuda.get_device_properties(0)
    words = found.name.upper().replace("-", " ").split()
    known = [
        card
        for card in _gpu_table(data_file("gpus.csv")).values()
        if set(card.name.upper().replace("-", " ").split()[:2]) - {"SXM", "PCIE"} <= set(words)
        and abs(card.memory / found.total_memory - 1) < 0.15
    ]
    facts = known[0] if known else GPU(found.name, 0, (0, 0))
    return GPU(
        name=facts.name if known else found.name,
        memory=found.total_memory,
        capability=(found.major, found.minor),
        bandwidth=facts.bandwidth,
        flops=facts.flops,
        multiprocessors=found.multi_processor_count,
        source=facts.source,
    )


def device() -> torch.device:
    """The device the lessons train on: this machine's accelerator, else its CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def supports(feature: str, card: GPU | None = None) -> bool:
    """Whether this machine, or `card`, has hardware for a feature: see `FEATURES`.

    Of these a CPU counts as supporting bf16 alone: it trains in it, at whatever speed, while
    `fp16=True` would silently train in fp32.
    """
    if feature not in FEATURES:
        raise ValueError(suggest(feature, FEATURES, "feature"))
    if card is None and not torch.cuda.is_available():
        return feature == "bf16" and device().type == "cpu"
    capability = card.capability if card else torch.cuda.get_device_capability()
    return capability >= FEATURES[feature]


def forget_accelerate() -> None:
    """Clear the device and precision that Accelerate keeps for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a run needs."""
    names = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
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

    def __str__(self) -> str:
        cap = (
            f", compute capability {'.'.join(map(str, self.capability))}" if self.capability else ""
        )
        libraries = ", ".join(f"{n} {self.versions[n]}" for n in ("torch", "transformers"))
        return (
            f"{self.device}: {self.name}, {self.memory / GIB:.1f} GiB ({self.free / GIB:.1f} free)"
            f"{cap}; 16-bit and other formats: {', '.join(self.features) or 'none'}; {libraries}"
        )


def describe() -> Hardware:
    """This machine: printed it is one line, and every part of it is an attribute."""
    kind, capability = device().type, None
    ram = psutil.virtual_memory()
    name, memory, free = f"{torch.get_num_threads()} threads", ram.total, ram.available
    if kind == "cuda":
        name, capability = (
            torch.cuda.get_device_name(),
            torch.cuda.get_device_capability(),
        )
        free, memory = torch.cuda.mem_get_info()
    features = tuple(f for f in FEATURES if f != "cuda" and supports(f))
    return Hardware(kind, name, memory, free, capability, features, versions())
