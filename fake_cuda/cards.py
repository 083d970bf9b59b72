"""Cards by name, with the facts of `data/gpus.csv`, and sizes as people write them.

It needs nothing but Python, so that a name can be looked up before any library is loaded.
"""

import csv
import difflib
from dataclasses import dataclass, field

from .files import data_file

__all__ = ["CONTEXT", "GIB", "GPU", "cards", "gib", "gpu", "suggest"]
GIB = 2**30
# Half a GiB stands in for a CUDA context that nobody measured: the low end of the 0.5 to 2 GiB in
# Bekman, Machine Learning Engineering, "Anatomy of model's memory usage".
CONTEXT = 2**29


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
    cards = {}
    with data_file("gpus.csv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            name, source = row.pop("name"), row.pop("source") or None
            capability = tuple(int(n) for n in row.pop("compute_capability").split("."))
            facts = {key: float(value) if value else None for key, value in row.items()}
            memory, context = facts.pop("memory_mib"), facts.pop("cuda_context_mib")
            memory, context = int(memory * 2**20), context and int(context * 2**20)
            cards[name] = GPU(name, memory, capability, context, facts | {"source": source})
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
