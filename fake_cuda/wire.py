"""What one card sends to others, or passes on."""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed import distributed_c10d as c10d

from .products import size

# How often a ring of n cards carries each byte over the link of one (NVIDIA, nccl-tests,
# doc/PERFORMANCE.md).
SHARES = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


class Wire:
    """The bytes that a card's link carries, by the phase of the run in which it does."""

    def __init__(self):
        self.sent: list[tuple[int, float]] = []  # a phase's number, bytes

    def see(self, name: str, args, leaves: list, phase: int) -> None:
        """A functional collective of torch.distributed, whose last argument is its group's name."""
        if name.startswith("wait"):
            return
        kind = next((kind for kind in SHARES if name.startswith(kind)), "all_to_all")
        ranks = c10d._resolve_process_group(args[-1]).size()
        self.send(kind, leaves if kind == "all_gather" else args[:1], ranks, phase)

    def send(self, kind: str, tensors: Iterable[torch.Tensor], ranks: int, phase: int) -> None:
        """A collective on these tensors: the whole ones, where each rank has a part."""
        count = sum(map(size, tensors))
        if ranks > 1 and count:
            self.sent.append((phase, SHARES[kind](ranks) * count))

    def between(self, first: int, last: int) -> float:
        """Bytes from one phase on until another begins."""
        return sum(count for phase, count in self.sent if first <= phase < last)

    def of_a_step(self, ends: Sequence[int]) -> float:
        """Bytes of the last step, if steps end with these phases; none if no step ended."""
        first, last = [0, 0, *ends][-2:]
        return self.between(first, last)
