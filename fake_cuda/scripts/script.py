"""A training script and its arguments, as a run for `simulate`."""

import io
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

try:
    from .apart import Ended, apart
    from .run import Attempt
except ModuleNotFoundError as error:  # Windows
    if error.name not in ("fcntl", "termios"):
        raise
    apart = Attempt = Ended = None

SECONDS = 300.0


class Script:
    """A run for `simulate`: a script and its arguments, on a card with so many bytes of memory.

    It runs in a process of its own that can change nothing of the user's (`view`), for at most
    `seconds`. `path` is a script, a notebook, or with `module=True` the name of a module.
    `network` lets it reach other machines. `say` is called with a line of progress now and then.
    Afterwards `note` says what was run otherwise than the script asks, `printed` ends with the
    last lines that it printed, and `updates` is how many it took.

    ValueError with one sentence if there is no answer.
    """

    def __init__(
        self,
        path: str,
        arguments: Sequence[str] = (),
        memory: int = 80 * 2**30,
        *,
        module: bool = False,
        network: bool = False,
        seconds: float = SECONDS,
        say: Callable[[str], None] | None = None,
        ways: Sequence[str] = ("overlay", "copy", "watched"),
    ):
        self.path, self.module, self.arguments = str(path), module, [str(a) for a in arguments]
        self.memory, self.context, self.card = memory, 0, "a card"
        self.network, self.seconds, self.ways = network, seconds, tuple(ways)
        self.say = say or (lambda text: None)
        self.note, self.printed, self.updates, self.way = "", "", 0, ""
        self.__name__ = self.path if module else Path(path).name
        if not module:
            _check(Path(path))

    def simulated(self, **card) -> object:
        """The `Simulation` of its run; `card` are the keywords of `simulate`."""
        if apart is None:
            raise ValueError(f"{self.path} cannot be run here: a script needs Linux or macOS")
        again = {}
        while again is not None:
            outcome = self._attempt(Attempt(self._asked(), card, **again))
            again = outcome.again
        self.note, self.updates, self.way = " ".join(outcome.notes), outcome.updates, outcome.way
        if outcome.failure:
            raise ValueError(f"{self.path} {outcome.failure}")
        return outcome.found

    def _asked(self) -> dict:
        names = "path module arguments memory context card network seconds ways".split()
        return {name: getattr(self, name) for name in names}

    def _attempt(self, attempt: Attempt):
        began, seen, printed = time.monotonic(), {}, io.BytesIO()

        def heard(message: dict | None) -> None:
            seen.update(message or {})
            words = ", ".join(f"{n} {what}" for what, n in seen.items())
            self.say(f"{self.__name__}: {time.monotonic() - began:.0f} s, {words or 'starting'}")

        try:
            return apart(attempt, seconds=self.seconds, heard=heard, printed=printed)
        except Ended as end:
            raise ValueError(f"{self.path} {self._ended(end, seen, printed)}") from None
        finally:
            self.printed = printed.getvalue().decode(errors="replace")[-4000:]

    def _ended(self, end: Ended, seen: dict, printed: io.BytesIO) -> str:
        if end.status is None:
            lines = printed.getvalue().decode(errors="replace").splitlines()
            frames = [line.strip() for line in lines if line.startswith("  File ")]
            own = [f for f in frames if os.path.basename(self.path) in f] or frames or ["nowhere"]
            return f"took no update in {self.seconds:.0f} s and does not react: {own[0]}"
        if end.status == -9:
            return "was ended by the system, as it does where this machine's memory runs out"
        return f"ended its process itself, with status {end.status}, before it took an update"


def _check(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name the script in it")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        start = path.read_bytes()[:4096]
    except PermissionError:
        raise ValueError(f"{path} may not be read") from None
    if b"\0" in start:
        raise ValueError(f"{path} is not Python")


__all__ = ["SECONDS", "Script"]
