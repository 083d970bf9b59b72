"""Which micro-batches of a rank are worth a prediction, from what was predicted of others."""

from collections.abc import Sequence

from .several import Recipe, Way

# What is left of a bound where a way of sharing tells of another, which keeps something of its own,
# and where all weights are trained, whose gradients and copies come and go. Our choice.
SLACK = 0.95
COPY = 2  # bytes of each trained weight that autocast keeps until the backward pass ends
FLOAT = 4  # bytes of a gradient


class Known:
    """What predictions of ranks tell of others, in bytes that are reserved.

    With so many samples on each card as a step has, nothing is accumulated: then no gradients of
    an earlier micro-batch are there.

    Args:
        seen: what was predicted, of the same question.
        ranks: over how many cards.
        share: samples of a step on each card.
        parameters: how many weights the model has.
        bf16: whether ranks compute in it.
    """

    def __init__(self, seen: Sequence[Recipe], ranks: int, share: int, parameters: int, bf16: bool):
        self.seen, self.ranks, self.share = seen, ranks, share
        self.parameters, self.bf16 = parameters, bf16

    def weights(self, way: Way) -> float:
        """What weights take; where all of them are trained, with their gradients and states."""
        return way.bytes_per_weight(self.ranks, self.bf16) * self.parameters

    def least(self, way: Way, samples: int) -> float:
        """What so many samples take at least: what was allocated for fewer, and what activations
        add. What is reserved beyond that depends on how full the card is, and does not count."""
        found = [self.weights(way)]
        for one in self._same(way):
            if one.micro_batch <= samples:
                more = self._activations(one) * (samples - one.micro_batch)
                allocated = sum(one.facts.by_category.values()) + self._otherwise(one, way, samples)
                same_adapters = one.way == way and way.adapters
                found.append((allocated + more) * (1 if same_adapters else SLACK))
        return max(found)

    def about(self, way: Way, samples: int) -> float | None:
        """What so many samples may take; None if nothing of the kind was predicted."""
        same, own = self._same(way), self._own(way)
        if not same:
            return None
        near = min(own or same, key=lambda one: abs(one.micro_batch - samples))
        lines = [points for one in same if len(points := self._own(one.way)) > 1]
        slope = _slope(lines[0]) if lines else self._activations(near)
        reserved = near.facts.peak_reserved + self._otherwise(near, way, samples)
        return reserved + slope * (samples - near.micro_batch)

    def _same(self, way: Way) -> list[Recipe]:
        """Predictions of what computes the same, however it is shared."""
        return [one for one in self.seen if self._computed(one.way) == self._computed(way)]

    def _computed(self, way: Way) -> tuple[bool, ...]:
        """What differs between ways that do not compute the same. FSDP2 gathers weights in 16 bits,
        of which autocast makes copies elsewhere: of all weights that are trained, and without
        checkpointing also of what adapters read."""
        cut = way.parallel == "fsdp2"
        copies = not way.adapters or (self.bf16 and not way.checkpointing)
        return way.adapters, way.checkpointing, cut and copies

    def _own(self, way: Way) -> list[Recipe]:
        found = {one.micro_batch: one for one in self.seen if one.way == way}
        return [found[n] for n in sorted(found)]

    def _otherwise(self, one: Recipe, way: Way, samples: int) -> float:
        """Bytes more than that prediction, if weights were shared in this way.

        Micro-batches before the last one keep gradients of their own, beside the buckets of a
        replica, which are as large, or whole until they are cut. Where all samples of a step are
        in one micro-batch, there are none.
        """
        more = self.weights(way) - self.weights(one.way)
        if one.way.adapters and one.way.parallel != way.parallel:  # whose states are cut as well
            own = (one.facts.by_category[name] for name in ("gradients", "optimizer states"))
            more -= (1 - 1 / self.ranks) * sum(own)
        if one.micro_batch < self.share and samples == self.share:
            whole = one.way.adapters and one.way.parallel == "fsdp2"
            kept = FLOAT * self._trained(one) if whole else one.facts.by_category["gradients"]
            return more - kept
        return more

    def _trained(self, one: Recipe) -> float:
        """How many values are trained; of each, AdamW keeps two numbers."""
        if not one.way.adapters:
            return self.parameters
        shards = self.ranks if one.way.parallel == "fsdp2" else 1
        return one.facts.by_category["optimizer states"] * shards / (2 * FLOAT)

    def _activations(self, one: Recipe) -> float:
        """Those of a sample at the peak, without copies of trained weights among them."""
        copied = self.bf16 and (one.way.adapters or one.way.parallel != "fsdp2")
        copies = COPY * self._trained(one) if copied else 0
        return max(0.0, one.facts.by_category["activations"] - copies) / one.micro_batch


def _slope(points: list[Recipe]) -> float:
    """Bytes of a sample, from the fewest samples to the most."""
    first, last = points[0], points[-1]
    more = last.facts.peak_reserved - first.facts.peak_reserved
    return more / (last.micro_batch - first.micro_batch)
