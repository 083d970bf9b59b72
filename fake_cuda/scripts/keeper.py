"""The process of a script, and its keeper, which stands between it and the caller.

The keeper adopts what the work leaves behind, and ends all of it when the work is done, the time is
over or the caller is gone.
"""

import ctypes
import faulthandler
import fcntl
import gc
import io
import math
import os
import select
import shutil
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import psutil

from ..loading import load
from . import own_folder

ADOPT, END_WITH_PARENT = 36, 1  # linux/prctl.h: PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
CALLERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the caller's, not its keeper's
WHERE = signal.SIGUSR2  # asks the worker to print where it stands; a thread would forbid namespaces
ANEW = "the time begins anew"  # told by work that has come so far that it ends by itself
# Without a card of its own: the threads that CUDA starts would not reach the script either.
NO_CARD = {"CUDA_VISIBLE_DEVICES": ""}
CARDS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # there with drivers of NVIDIA, AMD, and in WSL


class Printed(io.TextIOWrapper):
    """A stream that remembers the last characters of all such streams."""

    tail = ""

    def write(self, text: str) -> int:
        Printed.tail = (Printed.tail + text)[-4000:]
        return super().write(text)


class Ends(NamedTuple):
    """The other process's ends of its pipes."""

    tasks: Connection
    answers: Connection
    writes: int  # what it prints
    leash: int  # it is to end when this closes; what comes over it starts its time

    def numbers(self) -> list[int]:
        """Their file descriptors."""
        return [self.tasks.fileno(), self.answers.fileno(), self.writes, self.leash]

    def close(self) -> None:
        """Let go of them."""
        for one in (self.tasks, self.answers):
            one.close()
        for number in (self.writes, self.leash):
            os.close(number)


def awake(arguments: list[str]) -> None:
    """`keep` in a fresh Python, told by its arguments."""
    module, seconds, grace, base, *numbers = arguments
    tasks, answers, writes, leash = map(int, numbers)
    ends = Ends(
        Connection(tasks, writable=False), Connection(answers, readable=False), writes, leash
    )
    keep(module, float(seconds), float(grace), base, ends)


def keep(module: str, seconds: float, grace: float, base: str, ends: Ends) -> None:
    """In the keeper: make the folder `base`, load the module, start the work, wait for it, end what
    it left, remove the folder. The work has `seconds`, and when they are over `grace` more to
    answer. The worker is a fork of what is loaded here, and has one thread, as its view asks."""
    status = 1
    try:
        os.setsid()  # Ctrl-C is for the caller, of whose end the leash tells
        for number in CALLERS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CALLERS)
        held = own_folder.make(base)  # not before: now nothing but SIGKILL keeps this from its end
        _only(*ends.numbers(), held)
        with suppress(OSError):
            own_folder.sweep(os.path.dirname(base))
        _system("prctl", ADOPT, 1, 0, 0, 0)
        if any(map(os.path.exists, CARDS)):
            os.environ.update(NO_CARD)
        work = load(module).work
        gc.freeze()  # what is loaded stays: the worker sweeps what the script makes
        worker = os.fork()
        if not worker:
            _work(work, base, ends)  # does not return
        ends.tasks.close()
        ends.answers.close()
        os.close(ends.writes)
        status = _wait(worker, ends.leash, seconds, grace)
        _end_all(worker)
    except BaseException as error:  # before there was a worker
        with suppress(Exception):
            ends.answers.send(("error", error))
    finally:
        shutil.rmtree(base, ignore_errors=True)
        os._exit(status % 256)


def _wait(worker: int, leash: int, seconds: float, grace: float) -> int:
    """The worker's status; -1 if the caller is gone or the time over, which begins with the task,
    and anew with what else comes over the leash. Shortly before its end the worker prints where it
    stands."""
    asked, ends = False, math.inf
    while time.monotonic() < ends:
        if select.select([leash], [], [], 0.02)[0]:
            if not os.read(leash, 1):
                return -1
            ends = time.monotonic() + seconds + grace
        pid, found = os.waitpid(worker, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(found)
        if not asked and time.monotonic() > ends - grace / 2:
            asked = True
            os.kill(worker, WHERE)
    return -1


def _only(*needed: int) -> None:
    """Let go of all open files but these. Their numbers stay taken: objects of the caller that
    are dropped here close them, and must not close files opened since."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in {int(n) for n in os.listdir("/dev/fd")} - {0, 1, 2, null, *needed}:
        with suppress(OSError):
            os.dup2(null, number, inheritable=False)


def _end_all(worker: int) -> None:
    """Kill the worker's group and all that it left behind, until nothing is."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _work(work: Callable, base: str, ends: Ends) -> None:
    """In the worker: do the task, send what comes of it, and be gone without handlers at exit."""
    me = os.getpid()
    try:
        os.setsid()
        _system("prctl", END_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
        high = fcntl.fcntl(ends.answers.fileno(), fcntl.F_DUPFD_CLOEXEC, 900)
        for number in (1, 2):
            os.dup2(ends.writes, number)
        _only(high, ends.tasks.fileno())
        answers = Connection(high, readable=False)  # scripts close small numbers
        _fresh_start()
        task = ends.tasks.recv()
        ends.tasks.close()

        def tell(message, kind: str = "told") -> None:
            answers.send((kind, message))

        message = ("answer", work(task, base, tell))
    except BaseException as error:
        message = ("error", error)
    if os.getpid() == me:  # and not a process that the script forked
        with suppress(Exception):
            answers.send(message)
    os._exit(0)


def _fresh_start() -> None:
    """Leave behind what the caller had set for itself."""
    signal.set_wakeup_fd(-1)  # an event loop's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.register(WHERE, file=2)
    faulthandler.enable(file=2)  # where it crashes, too
    with suppress(OSError):  # where memory runs out, it is this process that ends
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    sys.stdin = io.StringIO()  # nobody answers
    sys.stdout = Printed(io.FileIO(1, "w"), write_through=True, errors="replace")
    sys.stderr = Printed(io.FileIO(2, "w"), write_through=True, errors="replace")
    _terminal()


def _terminal() -> None:
    """Standard input: a terminal, which some programs ask for its size, at its end."""
    typed, read = os.openpty()
    fcntl.ioctl(read, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.write(typed, b"\x04" * 100)
    os.dup2(read, 0)


def _system(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), name)(*arguments)
