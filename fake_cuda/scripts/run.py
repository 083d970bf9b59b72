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
from torch.utils._python_dispatch import _disable_current_modes

from ..simulation import simulate
from ..trace import Trace
from . import changes, compiling, view, watch
from .answers import forget_machine
from .attempt import Attempt, Outcome
from .card import MemoryOfTrace, card_of_script
from .closures import passes_first
from .host import UPDATES, Where
from .keeper import ANEW
from .moves import Moves, in_torch
from .ranks import told
from .source import cells_or_code
from .verdict import Again, Failure, ending, judge, leads
from .words import STARTS, Stop

HELD = 4  # ticks of half a second that a script which was stopped has to come to its end
QUIET = dict(HF_DEACTIVATE_ASYNC_LOAD="1", WANDB_MODE="disabled", TQDM_DISABLE="1")


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
    except OSError as error:
        outcome.failure = str(error)
    else:
        around = dict(inside=run.inside, compiler=run.compiler)
        run.concluded(lambda: simulate(run, **attempt.card, **around))
    return outcome


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
        self.code: types.CodeType | None = None  # that is run now
        self.held = 0  # ticks since it was stopped
        self.found: Callable | None = None  # makes the simulation of what was seen (`simulate`)

    def note(self, text: str) -> None:
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)

    def concluded(self, found: Callable) -> None:
        """The outcome is what `found()` returns, or why it does not."""
        try:
            self.outcome.found = found()
        except Again as again:
            fields = ("limited", "compiles", "environment")
            asked = {name: getattr(self.attempt, name) for name in fields}
            self.outcome.again = asked | again.args[0]
        except (Failure, ValueError, OSError) as error:
            self.outcome.failure = str(error)

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
        where.note = self.note
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
        """Twice a second: say how far it is; at the end of its time stop. A script that has caught
        this, or what stopped it after its updates, hears it again, and then is not asked."""
        passes, where = len(self.trace.passes), self.where
        done = min(self.taken.values(), default=where.by_hand)
        self.tell({"forward passes": passes, f"of {UPDATES} updates": done})
        if not self.runs(frame):  # it has come to its end, and nothing may be raised here
            return
        where.over = time.monotonic() - self.began > self.asked["seconds"]
        self.held += where.ended is not None
        if self.held > HELD:
            self.end_here()
        if not in_torch(frame):
            where.go_on()

    def runs(self, frame) -> bool:
        """Whether the script stands among these frames."""
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        return frame is not None

    def end_here(self) -> None:
        """Answer from below the script's own frames, which do not give way; end the process."""
        error, self.outcome.found = self.ended(), None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self.concluded(lambda: (self.conclude(error, True), self.found())[1])
            self.tell(self.outcome, "answer")
        self.leave(0)

    def ended(self) -> BaseException | None:
        """What has stopped the script, if anything did: from now on nothing does."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        ended, self.where.ended, self.where.over = self.where.ended, None, False
        return ended

    def heard(self, event: str, given: tuple) -> None:
        """Python's audit hook: a program is started. One that trains is not predicted here."""
        if event not in watch.PROGRAMS or os.getpid() != self.me:
            return
        command = given[0] if event == "os.system" else given[1]
        words = [*command] if event == "os.exec" else watch.trained(command)
        if words:
            raise Stop(STARTS.format(shlex.join(map(os.fsdecode, words))))

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
            self.where.stop()

    def passed(self) -> None:
        """A backward pass begins: without updates, so many are enough."""
        self.backwards += 1
        if not self.taken and self.backwards > changes.PASSES:
            self.where.stop()

    def __call__(self):
        """Run it until each of its optimizers has taken two steps; its variables are returned."""
        main = types.ModuleType("__main__")
        hook = register_optimizer_step_post_hook(self.count)
        first = register_optimizer_step_pre_hook(passes_first(self.trace))
        sys.modules["__main__"] = main
        error = None
        try:
            for code in cells_or_code(self.path, self.asked["module"], main):
                self.code = code
                exec(code, main.__dict__)
        except BaseException as raised:
            error = raised
        finally:
            ended = self.ended()
            hook.remove()
            first.remove()
        if os.getpid() != self.me:  # a process that the script forked, and that came to its end
            traceback.print_exception(error)
            self.leave(0 if error is None else 1)
        went_on = ended is not None and not leads(ended, error)
        self.conclude(ended if went_on else ending(error), went_on)
        return main

    def conclude(self, error: BaseException | None, went_on: bool) -> None:
        """It has ended: say what is to be said of what was seen."""
        self.tell(ANEW)  # to work out the answer of a long run takes longer than the grace
        self.unused()
        judge(self, error, went_on)
        # Of several, as in a GAN, the last one ends a step; one that holds another ends with it.
        last = {phase for one, phase, _ in self.ends if one == self.ends[-1][0]}
        for _, phase, event in self.ends:
            if phase not in last:
                self.trace.phases[phase] = self.trace.events[event] = "optimizer step"


def _evaluated(operations: list, since: int) -> bool:
    """Whether more is multiplied without gradients since that phase than before. Some is in each
    update: forward passes of checkpoints, of functions with a backward of their own, of teachers.
    """
    free = [op for op in operations if (op.kind, op.issued) == ("product", "no gradients")]
    return sum(op.phase >= since for op in free) > sum(op.phase < since for op in free)


def _forget(folder: str) -> None:
    """What libraries remember of the machine, and modules that have names of the script's own."""
    forget_machine()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if "site-packages" in file or file.startswith(sys.base_prefix):
            continue  # before a look at any file: these are thousands
        own = Path(folder, name.split(".")[0])
        if own.is_dir() or own.with_suffix(".py").is_file():
            if not name.startswith("fake_cuda"):
                del sys.modules[name]
