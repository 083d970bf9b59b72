"""Runs a script that nobody changed: its data is real, its card is not.

What the script puts on the card is fake. What it reads, draws and counts on the CPU is real and
keeps its values, except for parameters and large uninitialised tensors: a model may be larger than
this machine. Questions about the card are answered as on it. It stops after a few updates, which an
optimizer takes or the script itself, by writing weights after a backward pass.
"""

import logging
import os
import shlex
import signal
import sys
import time
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..replay import step_ends
from ..simulation import simulate
from ..trace import HOST, Trace
from . import changes, compiling, view, watch
from .answers import forget_machine
from .attempt import Attempt, Outcome
from .card import MemoryOfTrace, card_of_script
from .closures import passes_first
from .host import UPDATES, Where
from .keeper import ANEW, Printed
from .moves import Moves, in_torch
from .ranks import PROCESS, told
from .reasons import alone, why
from .source import cells_or_code
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
STARTS = "starts another program to train, `{}`: give that one to the prediction"
QUIET = dict(HF_DEACTIVATE_ASYNC_LOAD="1", WANDB_MODE="disabled", TQDM_DISABLE="1")
IN_THREAD = "uses the card{} in a thread of its own, where it is not followed"
NOTHING_THERE = "puts nothing on the card: it trains on the CPU"
NEVER = "never runs a model on the card: it ended without a forward pass"


def work(attempt: Attempt, base: str, tell: Callable) -> Outcome:
    """An attempt, in the process of the script; `apart.Process` says what `base` and `tell` are."""
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    asked, outcome = attempt.asked, Outcome()
    folders = [os.getcwd()]
    if not asked["module"]:
        folders.append(os.path.dirname(os.path.abspath(asked["path"])))
    try:
        outcome.way = view.enter(base, folders, asked["network"], asked["ways"])
        if outcome.way == "watched":
            outcome.notes.append(view.WATCHED)
        run = Run(attempt, base, outcome, tell)
        outcome.found = simulate(run, **attempt.card, inside=run.inside, compiler=run.compiler)
    except Again as again:
        fields = ("limited", "compiles", "environment")
        outcome.again = {name: getattr(attempt, name) for name in fields} | again.args[0]
    except (Failure, ValueError, OSError) as error:
        outcome.failure = str(error)
    return outcome


class Failure(Exception):
    """Why there is no answer, in words that follow the script's name."""


class Again(Exception):
    """The script is to be run once more, with these fields of `Attempt`."""


class Run:
    """The function that `simulate` calls, and what is put around it."""

    def __init__(self, attempt: Attempt, base: str, outcome: Outcome, tell: Callable):
        self.attempt, self.outcome, self.tell = attempt, outcome, tell
        self.asked, self.base, self.taken = attempt.asked, base, Counter()
        self.began, self.me, self.ends = time.monotonic(), os.getpid(), []
        self.leave = os._exit  # which the script is given another of
        self.stepped = weakref.WeakSet()  # optimizers that took a step
        self.generated = ""  # where the script generates text
        self.backwards = 0
        self.lost: BaseException | None = None  # what ended a thread for lack of a card

    def note(self, text: str) -> None:
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)

    def where_is(self, text: str) -> str:
        """A path or an argument, also one as name=path, as the view has it."""
        name, equals, value = ("", "", text) if os.path.isabs(text) else text.partition("=")
        if not os.path.isabs(value):
            return text
        return name + equals + view.place(value, self.base, self.outcome.way)

    def compiler(self, trace: Trace) -> compiling.ScriptCompiler:
        self.compiled = compiling.ScriptCompiler(trace, self)
        return self.compiled

    @contextmanager
    def inside(self, trace: Trace) -> Iterator[None]:
        """What `simulate` puts around the run. Nothing is put back: the process ends with it."""
        self.trace, asked = trace, self.asked
        room = trace.card.memory or asked["memory"], trace.card.context, self.attempt.limited
        self.memory = MemoryOfTrace(trace, *room, self.forget)
        self.where = where = Where(trace, self.taken, self.memory)
        path = asked["path"] if asked["module"] else self.where_is(os.path.abspath(asked["path"]))
        self.path = path if os.path.isabs(asked["path"]) else asked["path"]
        folder = os.getcwd() if asked["module"] else os.path.dirname(os.path.realpath(path))
        os.environ.update(QUIET | self.attempt.environment | told(asked["ranks"]))
        sys.argv = [self.path, *map(self.where_is, asked["arguments"])]
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        logging.root.handlers = []
        _forget(folder)
        sys.addaudithook(self.heard)
        signal.signal(signal.SIGALRM, self.tick)
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
        with where, Moves(where) as moves:
            both = card_of_script(trace, self.memory), changes.changes(self, where, moves)
            self.compiled.begin(where, *map(changes.made, both))
            yield

    def tick(self, _, frame) -> None:
        """Twice a second: say how far it is; at the end of its time stop."""
        passes = len(self.trace.passes)
        done = min(self.taken.values(), default=self.where.by_hand)
        self.tell({"forward passes": passes, f"of {UPDATES} updates": done})
        self.where.over = time.monotonic() - self.began > self.asked["seconds"]
        if self.where.over and not in_torch(frame):
            raise TimeOver

    def heard(self, event: str, given: tuple) -> None:
        """Python's audit hook: a program is started. One that trains is not predicted here."""
        if event not in watch.PROGRAMS or os.getpid() != self.me:
            return
        command = given[0] if event == "os.system" else given[1]
        words = command if isinstance(command, list | tuple) else shlex.split(os.fsdecode(command))
        words = [os.fsdecode(word) for word in words]
        if event == "os.exec" or watch.trains(words):
            raise Stop(STARTS.format(shlex.join(words)))

    def forget(self) -> None:
        """Memory ran out. If the script goes on, it does so anew: with another optimizer, maybe."""
        self.taken.clear()
        self.ends.clear()
        self.where.by_hand = self.backwards = 0

    def count(self, optimizer, *_) -> None:
        """An optimizer took a step."""
        self.stepped.add(optimizer)
        self.step_of(id(optimizer))

    def unused(self) -> None:
        """Gradients are seen when a step takes them: these wait for one that does not come."""
        groups = (group for optimizer in self.stepped for group in optimizer.param_groups)
        for parameter in (p for group in groups for p in group["params"] if p.grad is not None):
            self.trace.see(parameter.grad, "gradients")

    def step_of(self, me: int) -> None:
        """The optimizer with this `id` took a step, by itself or in the replay of a graph."""
        trace, ends = self.trace, self.ends
        self.taken[me] += 1
        if trace.phases[-1] == "between steps":
            ends.append((me, len(trace.phases) - 1, len(trace.events) - 1))
        done, since = min(self.taken.values()), next((k for o, k, _ in ends if o == me), 0)
        # One that an evaluation precedes is not like the others: then the next one tells.
        if done > UPDATES or done == UPDATES and not _evaluated(trace.work.operations, since):
            raise Stop

    def passed(self) -> None:
        """A backward pass begins: without updates, so many are enough."""
        self.backwards += 1
        if not self.taken and self.backwards > changes.PASSES:
            raise Stop

    def __call__(self):
        """Run it until each of its optimizers has taken two steps; its variables are returned."""
        main = types.ModuleType("__main__")
        hook = register_optimizer_step_post_hook(self.count)
        first = register_optimizer_step_pre_hook(passes_first(self.trace))
        sys.modules["__main__"] = main
        error = None
        try:
            for code in cells_or_code(self.path, self.asked["module"], main):
                exec(code, main.__dict__)
        except BaseException as raised:
            error = _ending(raised)
        finally:
            self.where.over = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            hook.remove()
            first.remove()
        if os.getpid() != self.me:  # a process that the script forked, and that came to its end
            traceback.print_exception(error)
            self.leave(0 if error is None else 1)
        self.tell(ANEW)  # to work out the answer of a long run takes longer than the grace
        self.unused()
        self.judge(error)
        for one, phase, event in self.ends:  # of several, as in a GAN, the last one ends a step
            if one != self.ends[-1][0]:
                self.trace.phases[phase] = self.trace.events[event] = "optimizer step"
        return main

    def try_again(self, error: BaseException | None, refused: bool) -> None:
        """Whether it is to be run once more, otherwise."""
        out = self.memory.ran_out
        over = not self.outcome.updates or _in_chain(error, torch.OutOfMemoryError)
        if self.attempt.limited and out and over:
            raise Again(dict(limited=False))  # and say how much it would have needed
        if not self.attempt.environment and alone(error):
            raise Again(dict(environment=PROCESS))
        if refused and self.attempt.compiles and self.compiled.codes:
            raise Again(dict(compiles=False))  # perhaps by a value that a plan has not

    def judge(self, error: BaseException | None) -> None:
        """Whether what was seen is an answer, and what is to be said of it."""
        self.outcome.updates = updates = min(self.taken.values(), default=self.where.by_hand)
        ends = isinstance(error, SystemExit | Stop | TimeOver | None)
        refused = not ends or isinstance(error, Stop) and str(error)
        self.try_again(error, refused)
        status = error.code if isinstance(error, SystemExit) else None
        on_card = set(self.trace.kind) - {HOST}
        if refused or status and not updates:
            known = self.generated, self.asked["network"], self.trace.guessed
            raise Failure(why(error, Printed.tail, *known))
        if updates and not on_card:
            raise Failure(NOTHING_THERE)
        over = isinstance(error, TimeOver) and f"{self.asked['seconds']:.0f} s,{in_line(error)}"
        if not updates and not (self.trace.passes and on_card):
            lost = IN_THREAD.format(in_line(self.lost)) if self.lost else NEVER
            raise Failure(OVER.format(over) if over else lost)
        if not updates:
            back = "backward" in self.trace.phases
            what = "forward and backward passes" if back else "forward passes"
            self.note(NOT_UPDATED.format("generation of text" if self.generated else what))
        elif not self.taken:
            self.note(BY_HAND)
        if updates and updates < UPDATES:
            self.note(ONE_UPDATE)
        if over:
            self.note(STOPPED.format(over))
        if self.asked["ranks"] > 1:
            sent = self.trace.work.wire.of_a_step(step_ends(self.trace.phases))
            self.note(RANK_0.format(self.asked["ranks"], sent / 2**20))
        elif self.attempt.environment:
            self.note(ONE_PROCESS)
        if out := self.memory.ran_out:
            batch = f", {self.trace.batch:,} samples at once" if self.trace.batch else ""
            self.note(RAN_OUT.format("once" if out == 1 else f"{out} times", batch))


def _in_chain(error: BaseException | None, kind: type) -> BaseException | None:
    """The last error of a kind among this one and those during which it was raised."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _ending(error: BaseException) -> BaseException:
    """What ended the script: a `finally` of its own may raise anew while it is on its way out."""
    return _in_chain(error, Stop) or _in_chain(error, TimeOver) or error


def _evaluated(operations: list, since: int) -> bool:
    """Whether more is multiplied without gradients since that phase than before. Some is in each
    update: forward passes of checkpoints, of functions with a backward of their own, of teachers.
    """
    free = [op for op in operations if (op.kind, op.issued) == ("product", "no gradients")]
    return sum(op.phase >= since for op in free) > sum(op.phase < since for op in free)


def _forget(folder: str) -> None:
    """What libraries remember of the machine, and modules that have names of the script's own."""
    forget_machine()
    for name in list(sys.modules):
        own = Path(folder, name.split(".")[0])
        file = getattr(sys.modules[name], "__file__", None) or ""
        if (own.is_dir() or own.with_suffix(".py").is_file()) and "site-packages" not in file:
            if not file.startswith(sys.base_prefix) and not name.startswith("fake_cuda"):
                del sys.modules[name]
