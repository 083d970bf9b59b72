"""A training script and its arguments, as a run for `simulate`."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import watch
from .attempt import Attempt, Outcome
from .words import KEEPER_ENDED, KILLED, RANK_0

try:
    from . import apart
except ModuleNotFoundError as error:  # Windows
    if error.name not in ("fcntl", "termios"):
        raise
    apart = None

RUN = f"{__package__}.run"  # loads torch and transformers: in the script's process

SECONDS = 300.0
A_COMMAND = (
    "{} is a command, and a script of Python is asked for: name the one that it starts, as in "
    "--script train.py -- its arguments; for several processes name as many cards, as --gpus 2xT4"
)


class Script:
    """A run for `simulate`: a script and its arguments, on the card that `simulate` is told.

    `memory` is the card's in bytes where that `Card` does not tell it.

    It runs in a process of its own that can change nothing of the user's (`view`), for at most
    `seconds`. `path` is a script, a notebook, or with `module=True` the name of a module.
    With `ranks` above 1 it is rank 0 of so many processes, each with such a card of its own.
    `network` lets it reach other machines. `say` is called with a line of progress now and then.
    Afterwards `note` says what was run otherwise than the script asks, `printed` ends with the
    last lines that it printed, `updates` is how many it took, and `sent` the bytes that the link of
    rank 0 carries in a step.

    `few` may be the same scripts with models of `depth.SHALLOW` layers in place of `layers`, all of
    them alike: where their logs tell that of this one, they are run in its place. `rule`, of each,
    is a `passages.Rule` for what does not repeat with the layers.

    ValueError with one sentence if there is no answer.
    """

    def __init__(
        self,
        path: str,
        arguments: Sequence[str] = (),
        memory: int = 80 * 2**30,
        *,
        module: bool = False,
        ranks: int = 1,
        network: bool = False,
        seconds: float = SECONDS,
        say: Callable[[str], None] | None = None,
        ways: Sequence[str] = ("overlay", "copy", "watched"),
    ):
        self.path, self.module, self.arguments = str(path), module, [str(a) for a in arguments]
        self.memory, self.ranks = memory, ranks
        self.network, self.seconds, self.ways = network, seconds, tuple(ways)
        self.say = say or (lambda text: None)
        self.note, self.printed, self.updates, self.way = "", "", 0, ""
        self.sent, self.few, self.layers, self.rule = 0.0, (), 0, None
        self._waiting = None  # a process that was started before it is needed
        self._begun = None  # one that has its task
        self.__name__ = self.path if module else Path(path).name
        if not module:
            _check(Path(path), self.arguments)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Around what loads libraries. Its process starts at once where it cannot share them, and
        loads its own meanwhile."""
        if apart is None or apart.shared_later():
            yield
            return
        with apart.Process(RUN, self.seconds) as self._waiting:
            try:
                yield
            finally:
                self._waiting = None

    def simulated(self, **card) -> object:
        """The `Simulation` of its run; `card` are the keywords of `simulate`."""
        if apart is None:
            raise ValueError(f"{self.path} cannot be run here: a script needs Linux or macOS")
        again = {}
        while again is not None:
            outcome = self._attempt(Attempt(self._asked(), card, **again))
            again = outcome.again
        self.note, self.updates, self.way = " ".join(outcome.notes), outcome.updates, outcome.way
        self.sent = outcome.sent
        if outcome.failure:
            raise ValueError(f"{self.path} {outcome.failure}")
        return outcome.found

    @contextmanager
    def begun(self, **card) -> Iterator[None]:
        """Around what else is done while it runs: `simulated` with the same `card` waits for it."""
        with apart.Process(RUN, self.seconds) as self._begun:
            try:
                self._begun.give(Attempt(self._asked(), card))
                yield
            finally:
                self._begun = None

    def told_by_few(self) -> None:
        """What is said of its run is what is said of those of few layers, but for what travels:
        each layer adds as much."""
        begin, end = self.few
        per_layer = (end.sent - begin.sent) / (end.layers - begin.layers)
        self.sent = end.sent + (self.layers - end.layers) * per_layer
        said = (RANK_0.format(self.ranks, sent / 2**20) for sent in (end.sent, self.sent))
        self.note, self.updates, self.way = end.note.replace(*said), end.updates, end.way
        self.printed = end.printed

    def _asked(self) -> dict:
        names = "path module arguments ranks memory network seconds ways".split()
        return {name: getattr(self, name) for name in names}

    def _attempt(self, attempt: Attempt) -> Outcome:
        began, seen = time.monotonic(), {}

        def heard(message: dict | None) -> None:
            seen.update(message or {})
            words = ", ".join(f"{n} {what}" for what, n in seen.items())
            self.say(f"{self.__name__}: {time.monotonic() - began:.0f} s, {words or 'starting'}")

        process, self._begun = self._begun, None
        if not process:
            process, self._waiting = self._waiting or apart.Process(RUN, self.seconds), None
        try:
            with process:
                if not process.given:
                    process.give(attempt)
                began = process.given
                return process.answer(heard)
        except apart.Ended as end:
            told = self._ended(end, process.printed, seen)
            raise ValueError(f"{self.path} {told}") from None
        finally:
            self.printed = process.printed[-4000:]

    def _ended(self, end: Exception, printed: str, seen: dict) -> str:
        if end.status is None:
            taken = (f"{n} {what}" for what, n in seen.items() if n and "updates" in what)
            did = "".join(f"took {updates}" for updates in taken) or "came to no end"
            place = _stood(printed, os.path.basename(self.path))
            return f"{did} in {self.seconds:.0f} s and does not react: {place}"
        if end.keeper:
            name = signal.Signals(-end.status).name
            return f"cannot be followed: {KEEPER_ENDED} {name}"
        if end.status == -signal.SIGKILL:
            return KILLED
        if end.status < 0:
            name, place = (
                signal.Signals(-end.status).name,
                _stood(printed, os.path.basename(self.path)),
            )
            return f"crashed: its process was ended by {name}, {place}"
        return f"ended its process itself, with status {end.status}, and left no answer"


def _stood(printed: str, name: str) -> str:
    """Where the script's own thread was, in the last that faulthandler wrote: it names this thread
    "Current", puts others before it, and writes 100 frames of each. With the file of that name
    among them, its line."""
    own = printed.rpartition("Current thread")[2]
    frames = [line.strip() for line in own.splitlines() if line.startswith("  File ")]
    return next((f for f in frames if name in f), (frames or ["nowhere"])[0])


def _check(path: Path, arguments: list[str]) -> None:
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name the script in it")
        if not path.is_file():
            words = [*str(path).split(), *arguments]
            if watch.trained(words) or words and shutil.which(words[0]):
                raise ValueError(A_COMMAND.format(" ".join(words)))
            raise ValueError(f"{path} is not a file")
        text = path.read_bytes()
    except PermissionError:
        raise ValueError(f"{path} may not be read") from None
    if b"\0" in text[:4096]:
        raise ValueError(f"{path} is not Python")
    if path.suffix == ".ipynb":
        _check_notebook(path, text)


def _check_notebook(path: Path, text: bytes) -> None:
    try:
        about = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no notebook: it is not JSON ({error})") from None
    cells = about.get("cells") if isinstance(about, dict) else None
    whole = isinstance(cells, list) and all(
        isinstance(cell, dict)
        and "cell_type" in cell
        and isinstance(cell.get("source"), str | list)
        for cell in cells
    )
    if not whole:
        raise ValueError(f"{path} is no notebook of today's format: it has no list of cells")


__all__ = ["SECONDS", "Script"]
