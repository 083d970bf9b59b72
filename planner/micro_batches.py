"""Which micro-batches of a rank are worth a prediction, from what was predicted of others."""

from collections.abc import Sequence

from .several import Recipe, Way

# Of what one micro-batch tells of a larger one, which may need no gradients of an earlier one, and
# of what a way of sharing tells of another, which keeps something of its own. Our choice.
SLACK = 0.95
COPY = 2  # bytes of each weight that autocast keeps in 16 bits, until the backward pass is done


class Known:
    """What predictions of ranks tell of others, in bytes that are reserved.

    Args:
        seen: what was predicted, of the same question.
        ranks: over how many cards.
        parameters: how many weights the model has.
        bf16: whether ranks compute in it.
    """

    def __init__(self, seen: Sequence[Recipe], ranks: int, parameters: int, bf16: bool):
        self.seen, self.ranks, self.parameters, self.bf16 = seen, ranks, parameters, bf16

    def weights(self, way: Way) -> float:
        """What weights take at least, with their gradients and states."""
        return way.least(self.ranks, self.bf16) * self.parameters

    def least(self, way: Way, samples: int) -> float:
        """What so many samples take at least: by two predictions of the way the line through them,
        else what was allocated for fewer samples, and what activations add. What is reserved
        beyond that follows from how full the card is."""
        same, own = self._same(way), self._own(way)
        if len(own) > 1:
            return self._on_line(own, samples)
        found = [self.weights(way)]
        for one in same:
            if one.micro_batch <= samples:
                more = self._activations(one) * (samples - one.micro_batch)
                exact = one.way == way and way.adapters
                allocated = sum(one.facts.by_category.values()) + self._moved(one, way)
                found.append((allocated + more) * (1 if exact else SLACK))
        return max(found)

    def about(self, way: Way, samples: int) -> float | None:
        """What so many samples may take; None if nothing of the kind was predicted."""
        same, own = self._same(way), self._own(way)
        if len(own) > 1:
            return self._on_line(own, samples)
        if not same:
            return None
        near = min(own or same, key=lambda one: abs(one.micro_batch - samples))
        lines = (self._own(one.way) for one in same)
        slopes = [_slope(points) for points in lines if len(points) > 1]
        slope = slopes[0] if slopes else self._activations(near)
        reserved = near.facts.peak_reserved + self._moved(near, way)
        return reserved + slope * (samples - near.micro_batch)

    def _same(self, way: Way) -> list[Recipe]:
        """Predictions of what computes the same, however it is shared. Where all weights are
        trained, those that are cut are gathered in 16 bits, and others are copied by autocast."""
        return [one for one in self.seen if _computed(one.way) == _computed(way)]

    def _own(self, way: Way) -> list[Recipe]:
        found = {one.micro_batch: one for one in self.seen if one.way == way}
        return [found[n] for n in sorted(found)]

    def _moved(self, one: Recipe, way: Way) -> float:
        """Bytes more, if weights were shared in this way."""
        return self.weights(way) - self.weights(one.way)

    def _activations(self, one: Recipe) -> float:
        """Those of a sample at the peak, without copies of weights among them."""
        copied = self.bf16 and not one.way.adapters and one.way.parallel != "fsdp2"
        kept = one.facts.by_category.get("activations", 0) - copied * COPY * self.parameters
        return max(0.0, kept) / one.micro_batch

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
