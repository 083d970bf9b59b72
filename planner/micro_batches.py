"""Which micro-batches of a rank are worth a prediction, from what was predicted of others."""

from collections.abc import Sequence

from .several import Recipe, Way

# Of what a way of sharing tells of another, which keeps something of its own, and of a line: needs
# are the largest of several, so that it lies above them. Our choice.
SLACK = 0.95
COPY = 2  # bytes of each trained weight that autocast keeps until the backward pass ends


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
        """What weights take at least, with their gradients and states."""
        return way.least(self.ranks, self.bf16) * self.parameters

    def least(self, way: Way, samples: int) -> float:
        """What so many samples take at least, but for less than `SLACK` leaves: what was allocated
        for fewer, and what activations add, or what lies on a line between fewer and more. What is
        reserved beyond that follows from how full the card is."""
        found = [self.weights(way)]
        for one in self._same(way):
            if one.micro_batch <= samples:
                more = self._activations(one) * (samples - one.micro_batch)
                allocated = sum(one.facts.by_category.values()) + self._otherwise(one, way, samples)
                exact = one.way == way and way.adapters
                found.append((allocated + more) * (1 if exact else SLACK))
        own = self._own(way)
        if len(own) > 1 and own[0].micro_batch < samples < own[-1].micro_batch:
            found.append(SLACK * self._on_line(own, samples))
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
        """Predictions of what computes the same, however it is shared. Where all weights are
        trained, those that are cut are gathered in 16 bits, and others are copied by autocast."""
        return [one for one in self.seen if _computed(one.way) == _computed(way)]

    def _own(self, way: Way) -> list[Recipe]:
        found = {one.micro_batch: one for one in self.seen if one.way == way}
        return [found[n] for n in sorted(found)]

    def _otherwise(self, one: Recipe, way: Way, samples: int) -> float:
        """Bytes more, if weights were shared in this way, and without what is accumulated if
        nothing is."""
        accumulated = one.micro_batch < self.share == samples
        gradients = one.facts.by_category.get("gradients", 0)
        return self.weights(way) - self.weights(one.way) - accumulated * gradients

    def _activations(self, one: Recipe) -> float:
        """Those of a sample at the peak, without copies of trained weights among them."""
        cut = one.way.parallel == "fsdp2"
        trained = 0 if cut else self.parameters
        if one.way.adapters:  # of each value two numbers are kept
            states = one.facts.by_category.get("optimizer states", 0)
            trained = states * (self.ranks if cut else 1) / 8
        copies = COPY * trained if self.bf16 else 0
        return max(0.0, one.facts.by_category.get("activations", 0) - copies) / one.micro_batch

    def _on_line(self, points: list[Recipe], samples: int) -> float:
        return points[0].facts.peak_reserved + _slope(points) * (samples - points[0].micro_batch)


def _computed(way: Way) -> tuple[bool, ...]:
    """What differs between ways that do not compute the same."""
    return way.adapters, way.checkpointing, way.parallel == "fsdp2" and not way.adapters


def _slope(points: list[Recipe]) -> float:
    """Bytes of a sample, from the fewest samples to the most."""
    first, last = points[0], points[-1]
    more = last.facts.peak_reserved - first.facts.peak_reserved
    return more / (last.micro_batch - first.micro_batch)
