"""Twins of a model, of two and of three blocks: what is seen of a step of theirs."""

from typing import NamedTuple
from unittest import mock

from fake_cuda import cost, simulation
from fake_cuda.operations import Work
from fake_cuda.replay import Events
from planner.predictions import Predictions
from planner.question import Question
from planner.techniques import Plan

SHALLOW, DEEP = 2, 3  # blocks: of one alone, what is the first's and the last's is not told apart


class Seen(NamedTuple):
    """A step of a twin.

    Args:
        events: all births and deaths of the run.
        operations: of the last step; the bytes of a Triton kernel are as they are, whatever share
            of a card it keeps busy.
        phases: of the run.
        programs: of each operation, of how many programs a Triton kernel is; None for all others.
    """

    events: Events
    operations: list
    phases: list[str]
    programs: list[int | None]


def seen(question: Question, plan: Plan, length: int, blocks: int) -> Seen:
    """Simulate a twin with a micro-batch of all samples of the question.

    Args:
        question: of a model whose blocks are alike.
        plan: the recipe.
        length: tokens of a sample.
        blocks: of the twin; 0 is the whole model.
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

    config = question.workload.config
    kinds = getattr(config, "layer_types", None) or ["any"] * config.num_hidden_layers
    predictions = Predictions(question, keep=False)
    with (
        mock.patch.object(simulation, "replay", watched),
        mock.patch.object(cost, "step_time", untimed),
        mock.patch.object(Work, "launch", launched_by),
    ):
        predictions.predict(plan, question.batch, layers=tuple(kinds[:blocks]), length=length)
    operations, phases = steps[-1]
    return Seen(events[-1], operations, phases, [launched.get(id(op)) for op in operations])
