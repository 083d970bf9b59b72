"""Cards of `data/gpus.csv` as the simulation takes them, and what stands on one at some moment."""

from typing import NamedTuple

from fake_cuda import Allocator, Card, Simulation
from helpers.hardware import gpu


def card(name: str, tf32: bool = False) -> Card:
    """A card by its name; with `tf32` its products of 32-bit floats are taken in tf32."""
    found = gpu(name)
    return Card.of(found.name, found.capability, found.facts, tf32)


class Reading(NamedTuple):
    """Bytes as torch's counters have them at one moment."""

    allocated: int
    reserved: int
    peak_reserved: int  # at most until then


def reading(allocator: Allocator) -> Reading:
    """What stands now. torch counts whole blocks, with what was too little to split off."""
    blocks = sum(block for block, _, is_free in allocator.blocks.values() if not is_free)
    return Reading(blocks, allocator.reserved, allocator.peak)


def readings_before_emptying(found: Simulation) -> list[Reading]:
    """What stood each time just before a run emptied the cache."""
    allocator, seen = Allocator(), []
    for i, size in found.log:
        if not size:
            seen.append(reading(allocator))
        allocator.step(i, size)
    return seen


def readings_after_emptying(found: Simulation) -> list[Reading]:
    """What stood each time just after a run had emptied the cache."""
    allocator, seen = Allocator(), []
    for i, size in found.log:
        allocator.step(i, size)
        if not size:
            seen.append(reading(allocator))
    return seen
