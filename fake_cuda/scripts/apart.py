"""A process of its own for a script: it ends with everything it started, whatever happens.

This is the caller's side; `keeper` is the other one.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe, wait

from ..loading import load
from . import own_folder
from .keeper import ANEW, CALLERS, CARDS, NO_CARD, Ends, keep

GRACE = 10.0  # seconds in which work that was told to end may still answer
KEPT = 2**16  # bytes of what is printed, the last ones


class Ended(Exception):
    """The process ended without an answer; `status` as of os.waitstatus_to_exitcode, None if it
    was ended because its time was over. `keeper` says whether it is the keeper's, not the work's.
    """

    def __init__(self, status: int | None, keeper: bool = False):
        super().__init__(f"ended with status {status}")
        self.status, self.keeper = status, keeper


class Process:
    """A process of its own, which loads the module of that name and waits for a task.

    The module is not imported here: it may take seconds to load, and this process may do other
    things meanwhile. `work(task, base, tell)` is its function for the task; `base` is the name of
    an empty folder that is removed afterwards, and what it tells is heard here. It has `seconds`
    for it, and ten more.
    """

    def __init__(self, module: str, seconds: float):
        self.seconds, self._text, self._closed = seconds, b"", False
        self.given = 0.0  # when it got its task
        tasks, self._tasks = Pipe(duplex=False)
        self._answers, answers = Pipe(duplex=False)
        self._reads, writes = os.pipe()
        leash, self._leash = os.pipe()  # the keeper sees it close when this process is gone
        ends = Ends(tasks, answers, writes, leash)
        # The keeper makes the folder, so that there is none without somebody to remove it.
        folder = os.path.join(tempfile.gettempdir(), own_folder.name())
        self._keeper, self._base = 0, folder
        if _forkable() and "torch" in sys.modules:
            load(module)  # what takes seconds is loaded once for all that follow
        try:
            self._start(module, ends)
        except BaseException:  # of a signal's handler
            self.__exit__()
            raise

    def _start(self, module: str, ends: Ends) -> None:
        """Start the keeper. Signals wait until it and the caller are two."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, CALLERS)
        try:
            if _forkable():
                sys.stdout.flush()
                sys.stderr.flush()
                self._keeper = os.fork()
                if not self._keeper:
                    keep(module, self.seconds, GRACE, self._base, ends)  # does not return
            else:
                self._keeper = _fresh(module, self.seconds, self._base, ends)
            ends.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        """End it, with all that it started."""
        if self._closed:
            return
        self._closed = True
        os.close(self._leash)
        if self._keeper:
            with suppress(ChildProcessError):
                os.waitpid(self._keeper, 0)
        self._clear()
        while self._drain():
            pass
        os.close(self._reads)
        self._answers.close()
        self._tasks.close()

    def _clear(self) -> None:
        """Remove the folder, which a keeper that was killed has left; what it kept may die a moment
        later, and write until then."""
        ends = time.monotonic() + GRACE
        while os.path.lexists(self._base) and time.monotonic() < ends:
            shutil.rmtree(self._base, ignore_errors=True)
            time.sleep(0.02)

    def give(self, task: object) -> None:
        """Its task, with which its time begins. It can begin anew while the answer is awaited."""
        self.given = time.monotonic()
        with suppress(BrokenPipeError):  # it has ended, and its status tells how
            self._tasks.send(task)
            os.write(self._leash, b"!")

    def answer(self, heard: Callable) -> object:
        """What `work(task, base, tell)` returns there; its exceptions are raised here.

        What it tells is handed to `heard(message)`, which is also called with None twice a second.
        `Ended` if it ends, or is ended, without an answer.
        """
        ends = self.given + self.seconds + GRACE
        while True:
            ready = wait([self._answers, self._reads], timeout=0.5)
            if self._reads in ready:
                self._drain()
            if self._answers not in ready:
                heard(None)
                continue
            try:
                kind, what = self._answers.recv()
            except EOFError:
                over = time.monotonic() > ends - 0.5
                status = os.waitstatus_to_exitcode(os.waitpid(self._keeper, 0)[1])
                if status < 0:
                    raise Ended(status, keeper=True) from None
                raise Ended(None if over else status - 256 * (status > 127)) from None
            if kind == "answer":
                return what
            if what == ANEW:
                with suppress(BrokenPipeError):
                    os.write(self._leash, b"!")
                ends = time.monotonic() + self.seconds + GRACE
                continue
            if kind == "error":
                raise what
            heard(what)

    @property
    def printed(self) -> str:
        """The last 64 KiB of what it printed; all of it once it has ended."""
        return self._text.decode(errors="replace")

    def _drain(self) -> bool:
        """Keep the end of what was printed; whether there was anything."""
        ready = select.select([self._reads], [], [], 0)[0]
        if not ready or not (text := os.read(self._reads, KEPT)):
            return False
        self._text = (self._text + text)[-KEPT:]
        return True


def shared_later() -> bool:
    """Whether a process that is made once torch is loaded will share it: to load it here and there
    at the same time would be twice the work."""
    return sys.platform == "linux" and not any(map(os.path.exists, CARDS))


def _forkable() -> bool:
    """Whether a fork can work: threads of CUDA, or of macOS's libraries, do not survive it. Where
    torch is not loaded, there are none of CUDA yet."""
    torch = sys.modules.get("torch")
    return sys.platform == "linux" and not (torch and torch.accelerator.is_available())


def _fresh(module: str, seconds: float, base: str, ends: Ends) -> int:
    """The keeper as a fresh Python."""
    code = "import sys; from fake_cuda.scripts.keeper import awake; awake(sys.argv[1:])"
    numbers = ends.numbers()
    told = map(str, [module, seconds, GRACE, base, *numbers])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    keeper = subprocess.Popen(
        [sys.executable, "-c", code, *told], pass_fds=numbers, env=environment | NO_CARD
    )
    keeper.returncode = 0  # not for subprocess to wait for
    return keeper.pid
