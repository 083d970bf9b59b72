"""What comes of a script that has ended: what is said with its answer, or why there is none."""

import os

import torch

from ..replay import step_ends
from ..trace import HOST
from .host import UPDATES
from .keeper import Printed
from .ranks import PROCESS
from .reasons import alone, why
from .words import RANK_0, Stop, TimeOver, in_line

ONE_UPDATE = "It took one update only: from the second on, an optimizer's states stand all along."
BY_HAND = "No optimizer took a step: weights written after a backward pass are its updates."
NOT_UPDATED = (
    "Nothing was updated: no optimizer took a step and no weight was written. This is the memory "
    "of its {}, and the time of the last one."
)
RAN_OUT = "It ran out of memory {} and went on: this is what it came to{}."
ONE_PROCESS = "It was run as one process of one, as torchrun would run it."
OVER = "took no update and ran no model on the card in {}: --timeout gives it more time"
STOPPED = "It was stopped after {}."
WENT_ON = "It was stopped after {}{}, and went on all the same: that is not in this answer."
IN_THREAD = "uses the card{} in a thread of its own, where it is not followed"
NOTHING_THERE = "puts nothing on the card: it trains on the CPU"
NEVER = "never runs a model on the card: it ended without a forward pass"


class Failure(Exception):
    """Why there is no answer, in words that follow the script's name."""


class Again(Exception):
    """The script is to be run once more, with these fields of `Attempt`."""


def _try_again(run, error: BaseException | None, refused: bool) -> None:
    """Whether it is to be run once more, otherwise."""
    out = run.memory.ran_out
    over = not run.outcome.updates or in_chain(error, torch.OutOfMemoryError)
    if run.attempt.limited and out and over:
        raise Again(dict(limited=False))  # and say how much it would have needed
    if not run.attempt.environment and alone(error):
        unset = {name: value for name, value in PROCESS.items() if name not in os.environ}
        raise Again(dict(environment=unset))
    if refused and run.attempt.compiles and run.compiled.codes:
        raise Again(dict(compiles=False))  # perhaps by a value that a plan has not


def judge(run, error: BaseException | None, went_on: bool) -> None:
    """Whether what was seen is an answer, and what is to be said of it; `went_on` if it caught what
    stopped it."""
    run.outcome.updates = updates = min(run.taken.values(), default=run.where.by_hand)
    ends = isinstance(error, SystemExit | Stop | TimeOver | None)
    refused = not ends or isinstance(error, Stop) and str(error)
    _try_again(run, error, refused)
    status = error.code if isinstance(error, SystemExit) else None
    on_card = set(run.trace.kind) - {HOST}
    if refused or status and not updates:
        known = run.generated, run.asked["network"], run.trace.guessed
        raise Failure(why(error, Printed.tail, *known))
    if updates and not on_card:
        raise Failure(NOTHING_THERE)
    over = isinstance(error, TimeOver) and f"{run.asked['seconds']:.0f} s,{in_line(error)}"
    if not updates and not (run.trace.passes and on_card):
        lost = IN_THREAD.format(in_line(run.lost)) if run.lost else NEVER
        raise Failure(OVER.format(over) if over else lost)
    if not updates:
        back = "backward" in run.trace.phases
        what = "forward and backward passes" if back else "forward passes"
        run.note(NOT_UPDATED.format("generation of text" if run.generated else what))
    elif not run.taken:
        run.note(BY_HAND)
    if updates and updates < UPDATES:
        run.note(ONE_UPDATE)
    if over:
        run.note(STOPPED.format(over))
    elif went_on:
        taken = f"{updates} updates" if updates else f"{run.backwards} backward passes"
        run.note(WENT_ON.format(taken, in_line(error)))
    if run.asked["ranks"] > 1:
        sent = run.trace.work.wire.of_a_step(step_ends(run.trace.phases))
        run.outcome.sent = sent
        run.note(RANK_0.format(run.asked["ranks"], sent / 2**20))
    elif run.attempt.environment:
        run.note(ONE_PROCESS)
    if out := run.memory.ran_out:
        batch = f", {run.trace.batch:,} samples at once" if run.trace.batch else ""
        run.note(RAN_OUT.format("once" if out == 1 else f"{out} times", batch))


def in_chain(error: BaseException | None, kind: type) -> BaseException | None:
    """The last error of a kind among this one and those during which it was raised."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def leads(first: BaseException, error: BaseException | None) -> bool:
    """Whether an error is the first one, or was raised during it."""
    while error is not None and error is not first:
        error = error.__cause__ or error.__context__
    return error is first


def ending(error: BaseException | None) -> BaseException | None:
    """What ended the script: a `finally` of its own may raise anew while it is on its way out."""
    return in_chain(error, Stop) or in_chain(error, TimeOver) or error
