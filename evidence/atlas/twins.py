"""Twins of a model, with few of its blocks: what is seen of a step of theirs."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple
from unittest import mock

from evidence.atlas.full import Whole
from evidence.atlas.laws import Point, Seeds
from evidence.atlas.pieces import NotAlike, cuts
from evidence.atlas.sums import Summed, kept
from fake_cuda import cost, simulation
from fake_cuda.operations import Work
from fake_cuda.replay import Events
from fake_cuda.trace import EMPTY_CACHE
from planner.layers import differ_by_number
from planner.question import Question, ask
from planner.techniques import CHUNKED_LOSS, Plan

BETWEEN = "between steps"


class Depth(NamedTuple):
    """How many blocks two twins have, and how often the model has once more what one has more."""

    shallow: int
    deep: int
    more: int

    @classmethod
    def of(cls, config, turns: int = 2) -> "Depth":
        """So many blocks and one more where all are alike: of one alone, what is the first's and
        the last's is not told apart. Where kinds of blocks take turns, a turn stands for a block,
        and the twins are taken from the front.

        >>> from transformers import GptOssConfig, LlamaConfig
        >>> Depth.of(LlamaConfig(num_hidden_layers=32))
        Depth(shallow=2, deep=3, more=29)
        >>> Depth.of(GptOssConfig(num_hidden_layers=24))
        Depth(shallow=4, deep=6, more=9)
        >>> Depth.of(LlamaConfig(num_hidden_layers=32), turns=3)
        Depth(shallow=3, deep=4, more=28)
        """
        count = config.num_hidden_layers
        lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == count]
        turn = next(n for n in range(1, count + 1) if all(v[n:] == v[:-n] for v in lists))
        left = turn + count % turn if count % turn and turn > 1 else turn
        shallow = left + (turns - 1) * turn
        return cls(shallow, shallow + turn, (count - shallow - turn) // turn)


class Seen(NamedTuple):
    """A step of a twin.

    Args:
        events: all births and deaths of the run.
        operations: of the last step; the bytes of a Triton kernel are as they are, whatever share
            of a card it keeps busy.
        phases: of the run.
        programs: of each operation, of how many programs a Triton kernel is; None for all others.
        sums: those that take memory of their own, by the first storage of each.
    """

    events: Events
    operations: list
    phases: list[str]
    programs: list[int | None]
    sums: dict[int, Summed]


def seen(question: Question, plan: Plan, length: int, blocks: int, micro_batches: int = 1) -> Seen:
    """Simulate a twin with so many micro-batches, which have all samples of the question.

    Args:
        question: of a model whose blocks are alike, or take turns.
        plan: the recipe.
        length: tokens of a sample.
        blocks: of the twin; 0 is the whole model.
        micro_batches: of a step.
    """
    events, steps, launched = [], [], {}
    replay, launch = simulation.replay, Work.launch

    def launched_by(work, kernel, moved, programs, trace):
        launch(work, kernel, moved, None, trace)
        launched[id(work.operations[-1])] = programs

    def watched(found, cuda):
        events.append(found)
        return replay(found, cuda)

    def untimed(operations, phases, card, **options):
        steps.append((operations, list(phases)))
        return cost.Time()

    config = question.workload.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["any"] * config.num_hidden_layers
    predictions = Whole(question, keep=False)  # each layer, so that launches are those of its log
    with (
        mock.patch.object(simulation, "replay", watched),
        mock.patch.object(cost, "step_time", untimed),
        mock.patch.object(Work, "launch", launched_by),
        kept() as sums,
    ):
        samples = question.batch // micro_batches
        predictions.predict(plan, samples, layers=tuple(kinds[:blocks]), length=length)
    operations, phases = steps[-1]
    programs = [launched.get(id(op)) for op in operations]
    stay = _without_collation(events[-1])
    number = {i: k for k, i in enumerate(stay)}
    sums = {number[i]: summed for i, summed in sums.items() if i in number}
    return Seen(_only(events[-1], number), operations, phases, programs, sums)


class OfSamples(NamedTuple):
    """Operations that each sample of a micro-batch asks for, one sample after the other.

    Args:
        at: the number of the first one.
        size: operations of a sample.
    """

    at: int
    size: int


def of_samples(near: Seen, wide: Seen, samples: int) -> list[OfSamples]:
    """Operations between steps that each sample of a twin asks for.

    Args:
        near: the twin.
        wide: one with twice as many samples.
        samples: how many the twin has.

    Raises:
        NotAlike: they differ otherwise.
    """
    found, begun, shift = [], 0, 0
    for number, name in enumerate(near.phases):
        few, many = (_signs(seen, number) for seen in (near, wide))
        for where in cuts(few, many) if name == BETWEEN else ():
            if where.size % samples:
                raise NotAlike("with more samples more happens than once for each")
            at = begun + where.at - where.size - shift
            found.append(OfSamples(at, where.size // samples))
            shift += where.size
        begun, shift = begun + len(few), 0
    return found


def _signs(seen: Seen, phase: int) -> list[tuple]:
    """What is the same of a phase's operations in any micro-batch: how few bytes move is not."""
    ops = (op for op in seen.operations if op.phase == phase)
    return [(op.issued, op.tensors > 0, op.name) for op in ops]


def collated_like(wide: Seen, near: Seen) -> Seen:
    """With the operations between steps of a twin with fewer samples: they are so small that what
    each moves does not matter, but only how many there are (`of_samples`)."""
    pairs = zip(wide.operations, wide.programs, strict=True)
    found = [pair for pair in pairs if wide.phases[pair[0].phase] != BETWEEN]
    for at, pair in enumerate(zip(near.operations, near.programs, strict=True)):
        if near.phases[pair[0].phase] == BETWEEN:
            found.insert(at, pair)
    operations, programs = (list(column) for column in zip(*found, strict=True))
    return wide._replace(operations=operations, programs=programs)


def _without_collation(seen: Events) -> list[int]:
    """The storages of a log but those that are born and gone before the first step or between two:
    there each sample of a micro-batch takes a few bytes of its own, so that more samples would be
    more events."""
    phases: dict[int, int] = {}  # of each storage the phase of its birth
    gone, phase, between = set(), 0, True
    for event in seen.events:
        if isinstance(event, str):
            if event != EMPTY_CACHE:
                phase, between = phase + 1, event == BETWEEN
        elif event >= 0:
            phases[event] = phase
        elif between and phases.get(~event) == phase:
            gone.add(~event)
    return [i for i in range(len(seen.sizes)) if i not in gone]


def _only(seen: Events, number: dict[int, int]) -> Events:
    """A log of some storages alone, with new numbers."""
    events = []
    for event in seen.events:
        if isinstance(event, str):
            events.append(event)
        elif max(event, ~event) in number:
            events.append(number[event] if event >= 0 else ~number[~event])
    kinds, sizes = [seen.kinds[i] for i in number], [seen.sizes[i] for i in number]
    return Events(events, kinds, sizes, 0)


class Asked(NamedTuple):
    """A recipe of a model on a card.

    Args:
        model: its name.
        card: which stands for its family.
        plan: the recipe.
        turns: how often what repeats stands in the shallow twin (`Depth`); None: all blocks are
            simulated.
        two: whether steps of two micro-batches are simulated for any seeds, if all weights learn.
    """

    model: str
    card: str
    plan: Plan
    turns: int | None = 2
    two: bool = False


class MoreChunks(NamedTuple):
    """Twins with a micro-batch whose loss has one chunk more: few blocks, and more."""

    shallow: Seen
    deep: Seen


class Twins(NamedTuple):
    """What is simulated of a recipe.

    Args:
        shallow: a twin with few blocks, or as many as the others.
        near, far, wide: the deeper twin with each of the three micro-batches.
        more: how often the model has once more what the deeper twin has more than the shallow one.
        tied: whether head and embedding are one parameter.
        more_chunks: where the loss is in chunks, and the three do not tell of themselves alone.
        of_samples: the operations of each sample, if the wide one has more samples.
    """

    shallow: Seen
    near: Seen
    far: Seen
    wide: Seen
    more: int
    tied: bool
    more_chunks: MoreChunks | None = None
    of_samples: Sequence[OfSamples] = ()

    @classmethod
    def of(cls, asked: Asked, seeds: Seeds, micro_batches: int = 1) -> "Twins":
        """Of a recipe with three micro-batches, of which a step has so many."""
        model, card, plan, turns, _ = asked

        @cache
        def asked_at(point: Point) -> Question:
            batch = micro_batches * point.micro_batch
            return ask(model, card, length=point.length, batch=batch)

        config = asked_at(seeds.near).workload.config
        depth = Depth.of(config.get_text_config(), turns or 2)
        as_long = depth.more <= 1 or differ_by_number(config)  # the twins take as the model does
        whole = turns is None or as_long
        few, deep, times = (0, 0, 0) if whole else depth

        def of(point: Point, blocks: int) -> Seen:
            return seen(asked_at(point), plan, point.length, blocks, micro_batches)

        found = {point: of(point, deep) for point in dict.fromkeys(seeds)}
        near, far, wide = (found[point] for point in seeds)
        shallow = near if whole else of(seeds.near, few)
        more_chunks = None
        if CHUNKED_LOSS in plan.techniques and not seeds.alone:
            longer = seeds.near.one_chunk_more()
            more = of(longer, deep)
            more_chunks = MoreChunks(more if whole else of(longer, few), more)
        own = []
        if seeds.wide != seeds.near:
            own = of_samples(near, wide, seeds.near.micro_batch)
            wide = collated_like(wide, near)
        tied = bool(getattr(config, "tie_word_embeddings", False))  # pictures have no words
        return cls(shallow, near, far, wide, times, tied, more_chunks, own)
