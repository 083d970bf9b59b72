"""Steps whose loss is computed in chunks of so many tokens: with more tokens there are more chunks.

What a chunk does in each pass is a piece that repeats, as a block's is. It is found between a step
of a twin and one with a chunk more, and put in as often as another micro-batch has chunks more. So
the step of each twin is told with any number of chunks, its sizes still those of its own
micro-batch, and from there on it grows as others do (`growth`, `laws`, `pace`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from evidence.atlas.growth import Growth, grown, tidy
from evidence.atlas.laws import Point, Seeds
from evidence.atlas.pace import mates, repeated
from evidence.atlas.pieces import NotAlike
from evidence.atlas.sums import Summed
from evidence.atlas.twins import Seen, Twins
from fake_cuda.replay import Events

FEWEST = 4  # of which two in the middle are alike in each pass


class Told(NamedTuple):
    """What a twin tells of a step with any number of chunks.

    Args:
        seen: the twin's step.
        sizes: bytes, by the storages of the step with one chunk more.
        sums: those that take memory of their own, by the same storages.
        operations: their numbers among those of `seen`, by the operations of that step.
    """

    seen: Seen
    sizes: list[int]
    sums: dict[int, Summed]
    operations: list[int]


class Chunks:
    """How the step of a twin grows with its chunks.

    Args:
        few: seen with some.
        more: seen with one more.

    Raises:
        NotAlike: they differ by more than a chunk and sizes.
    """

    def __init__(self, few: Seen, more: Seen):
        self.few, self.more = few, more
        self.growth = Growth(few.events, more.events, sized=False)
        self.storages = self.growth.storages()
        self.operations = mates(few, more, _kind, amid=True)

    def by_few(self) -> Told:
        """What the step with few chunks tells."""
        operations = [mate for mate, _ in self.operations]
        return self._told(self.few, self.storages, operations)

    def by(self, seen: Seen, chunks: int) -> Told:
        """What another step tells, which has so many chunks more than `more`.

        Raises:
            NotAlike: more happens there than that.
        """
        plan = self.growth.plan(chunks)
        born = [told for phase in plan for what, told in phase if what == "born"]
        log = self._log(plan, self._sizes({}))
        real, numbers = renumbered(seen.events)
        order = repeated(self.more.operations, self.operations, chunks)
        signs = [_kind(self.more.operations[k]) for k in order]
        if real != list(log.events) or signs != [_kind(op) for op in seen.operations]:
            raise NotAlike("with more tokens more happens than more chunks")
        storages = dict(zip(reversed(born), reversed(numbers), strict=True))
        operations = {k: at for at, k in reversed(list(enumerate(order)))}
        in_order = [operations[k] for k in range(len(self.more.operations))]
        return self._told(seen, storages, in_order)

    def grown(self, told: Told, chunks: int) -> Seen:
        """A step with so many chunks more than `more` (-1: as many as few), as a twin tells it."""
        if chunks < 0:
            few = self.few.events
            likes = {mate: i for i, mate in reversed(list(self.storages.items()))}
            sizes = [told.sizes[likes[k]] if k in likes else 0 for k in range(len(few.sizes))]
            events = few._replace(sizes=sizes)
        else:
            plan = self.growth.plan(chunks)
            likes = dict(enumerate(i for phase in plan for what, i in phase if what == "born"))
            events = self._log(plan, told.sizes)
        sums = {k: told.sums[i] for k, i in likes.items() if i in told.sums}
        numbers, seen = self.numbers(told, chunks), told.seen
        operations, programs = ([c[k] for k in numbers] for c in (seen.operations, seen.programs))
        return Seen(events, operations, seen.phases, programs, sums)

    def numbers(self, told: Told, chunks: int) -> list[int]:
        """Of the operations of a step with so many chunks more, those of the twin that tell."""
        order = repeated(self.more.operations, self.operations, chunks)
        return [told.operations[k] for k in order]

    def _told(self, seen: Seen, storages: dict[int, int], operations: list[int]) -> Told:
        """What a step tells, by its storages that are the like of those with one chunk more."""
        sizes = self._sizes({i: seen.events.sizes[number] for i, number in storages.items()})
        sums = {i: seen.sums[k] for i, k in storages.items() if k in seen.sums}
        return Told(seen, sizes, sums, operations)

    def _log(self, plan: list, sizes: Sequence[int]) -> Events:
        return grown(plan, self.more.events.kinds, sizes)

    def _sizes(self, known: dict[int, int]) -> list[int]:
        return [known.get(i, 0) for i in range(len(self.more.events.sizes))]


def renumbered(seen: Events) -> tuple[list, list[int]]:
    """The events of a log that count, its storages numbered as they are born; and their numbers."""
    numbers: dict[int, int] = {}
    events = []
    for event in (event for phase in tidy(seen) for event in phase):
        if isinstance(event, str):
            events.append(event)
        elif event >= 0:
            events.append(numbers.setdefault(event, len(numbers)))
        else:
            events.append(~numbers[~event])
    return events, list(numbers)


def _kind(op) -> tuple:
    """What is the same of an operation for any number of tokens."""
    return op.kind, op.issued, op.tensors, op.name, op.again


class Grouped(NamedTuple):
    """Micro-batches with the same number of chunks, and twins that have as many."""

    points: list[Point]
    twins: Twins


def by_chunks(twins: Twins, seeds: Seeds, points: Sequence[Point]) -> Iterator[Grouped]:
    """Twins for each number of chunks.

    Args:
        twins: of the seeds, and of micro-batches with one chunk more.
        seeds: of which a longer and a wider one may have more chunks.
        points: the micro-batches.

    Raises:
        NotAlike: what there is more is not of chunks alone.
    """
    begun = seeds.near.one_chunk_more().chunks
    deep = Chunks(twins.near, twins.more_chunks.deep)
    shallow = Chunks(twins.shallow, twins.more_chunks.shallow)
    near, far = deep.by_few(), deep.by(twins.far, seeds.far.chunks - begun)
    wide = near
    if seeds.wide != seeds.near:
        wide = deep.by(twins.wide, seeds.wide.chunks - begun)
    for number in dict.fromkeys(point.chunks for point in points):
        some = [point for point in points if point.chunks == number]
        of_deep = (deep.grown(told, number - begun) for told in (near, far, wide))
        of_shallow = shallow.grown(shallow.by_few(), number - begun)
        places = deep.numbers(near, number - begun)
        own = [place._replace(at=places.index(place.at)) for place in twins.of_samples]
        told = Twins(of_shallow, *of_deep, twins.more, twins.tied, of_samples=own)
        yield Grouped(some, told)
