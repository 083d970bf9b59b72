"""A process of its own for a script: it ends with everything it started, whatever happens.

Between the caller and the process that works stands a keeper. It adopts what the work leaves
behind, and ends all of it when the work is done, the time is over or the caller is gone.
"""

import ctypes
import faulthandler
import fcntl
import io
import os
import pickle
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

import psutil
import torch

ADOPT, END_WITH_PARENT = 36, 1  # linux/prctl.h: PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
GRACE = 10.0  # seconds in which work that was told to end may still answer
WHERE = signal.SIGUSR2  # asks the worker to print where it stands; a thread would forbid namespaces
KEPT = 2**16  # bytes of what is printed, the last ones


class Printed(io.TextIOWrapper):
    """A stream that remembers the last characters of all such streams."""

    tail = ""

    def write(self, text: str) -> int:
        Printed.tail = (Printed.tail + text)[-4000:]
        return super().write(text)


class Ended(Exception):
    """The process ended without an answer; `status` as of os.waitstatus_to_exitcode, None if it
    was ended because its time was over."""

    def __init__(self, status: int | None):
        super().__init__(f"ended with status {status}")
        self.status = status


def apart(work: Callable, *, seconds: float, heard: Callable, printed: io.BytesIO) -> object:
    """What `work(base, tell)` returns, run in a process of its own.

    It has `seconds`, and ten more. `base` is the name of an empty folder that is removed
    afterwards. What `work` tells is handed to `heard(message)`, which is also called with None
    twice a second. What it prints goes to `printed`, the last 64 KiB. Its exceptions are raised
    here. `Ended` if it ends, or is ended, without an answer.
    """
    answers, theirs = Pipe(duplex=False)
    reads, writes = os.pipe()
    leash, ours = os.pipe()  # the keeper sees it close when this process is gone
    base = tempfile.mkdtemp(prefix="fake_cuda_")
    if _forkable():
        sys.stdout.flush()
        sys.stderr.flush()
        keeper = os.fork()
        if not keeper:
            os.close(ours)
            _keep(work, base, theirs, writes, leash, seconds)  # does not return
    else:  # threads of CUDA or of macOS's libraries do not survive a fork
        keeper = _fresh(work, base, theirs, writes, leash, seconds)
    for theirs_alone in (writes, leash):
        os.close(theirs_alone)
    theirs.close()
    try:
        return _listen(keeper, answers, reads, seconds, heard, printed)
    finally:
        os.close(ours)
        with suppress(ChildProcessError):
            os.waitpid(keeper, 0)
        while _drain(reads, printed):
            pass
        os.close(reads)
        answers.close()


def _forkable() -> bool:
    return sys.platform == "linux" and not torch.accelerator.is_available()


def _fresh(work, base: str, theirs: Connection, *rest) -> int:
    """The keeper as a fresh Python, for which `work` is pickled."""
    numbers = [theirs.fileno(), *rest[:2]]
    code = "import sys; from fake_cuda.scripts.apart import _awake; _awake(sys.argv[1:])"
    task = tempfile.NamedTemporaryFile(dir=base, delete=False)
    with task:
        pickle.dump(work, task)
    arguments = [sys.executable, "-c", code, task.name, base, *map(str, numbers), str(rest[2])]
    # Without a card of its own: the threads that CUDA starts would not reach the script either.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    keeper = subprocess.Popen(arguments, pass_fds=numbers, env=environment)
    keeper.returncode = 0  # not for subprocess to wait for
    return keeper.pid


def _awake(arguments: list[str]) -> None:
    task, base, *numbers, seconds = arguments
    with open(task, "rb") as file:
        work = pickle.load(file)
    os.remove(task)
    pipe, writes, leash = map(int, numbers)
    _keep(work, base, Connection(pipe, readable=False), writes, leash, float(seconds))


def _listen(keeper: int, answers, reads: int, seconds: float, heard: Callable, printed):
    ends = time.monotonic() + seconds + GRACE
    while True:
        ready = wait([answers, reads], timeout=0.5)
        if reads in ready:
            _drain(reads, printed)
        if answers in ready:
            try:
                kind, what = answers.recv()
            except EOFError:
                over = time.monotonic() > ends - 0.5
                status = os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
                raise Ended(None if over else status - 256 * (status > 127)) from None
            if kind == "answer":
                return what
            if kind == "error":
                raise what
            heard(what)
        else:
            heard(None)


def _drain(reads: int, printed: io.BytesIO) -> bool:
    """Keep the end of what was printed; whether there was anything."""
    if not select.select([reads], [], [], 0)[0] or not (text := os.read(reads, KEPT)):
        return False
    kept = (printed.getvalue() + text)[-KEPT:]
    printed.seek(0)
    printed.truncate()
    printed.write(kept)
    return True


# -------------------------------------------------------------------------------- the keeper


def _keep(work, base, theirs: Connection, writes: int, leash: int, seconds: float) -> None:
    """In the keeper: start the work, wait for it, end what it left, remove its folder."""
    status = 1
    try:
        os.setsid()  # Ctrl-C is for the caller, of whose end the leash tells
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _only(theirs.fileno(), writes, leash)
        _system("prctl", ADOPT, 1, 0, 0, 0)
        worker = os.fork()
        if not worker:
            _work(work, base, theirs, writes)  # does not return
        theirs.close()
        os.close(writes)
        status = _wait(worker, leash, time.monotonic() + seconds + GRACE)
        _end_all(worker)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        os._exit(status % 256)


def _wait(worker: int, leash: int, ends: float) -> int:
    """The worker's status; -1 if the caller is gone or the time over. Shortly before that the
    worker prints where it stands."""
    asked = False
    while time.monotonic() < ends and not select.select([leash], [], [], 0.02)[0]:
        pid, found = os.waitpid(worker, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(found)
        if not asked and time.monotonic() > ends - GRACE / 2:
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


def _work(work, base, theirs: Connection, writes: int) -> None:
    """In the worker: run it, send what comes of it, and be gone without any handler at exit."""
    me = os.getpid()
    try:
        os.setsid()
        _system("prctl", END_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
        answers = fcntl.fcntl(
            theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 900
        )  # scripts close small ones
        for number in (1, 2):
            os.dup2(writes, number)
        _only(answers)
        theirs = Connection(answers, readable=False)
        _fresh_start()
        message = ("answer", work(base, lambda message: theirs.send(("told", message))))
    except BaseException as error:
        message = ("error", error)
    if os.getpid() == me:  # and not a process that the script forked
        with suppress(Exception):
            theirs.send(message)
    os._exit(0)


def _fresh_start() -> None:
    """Leave behind what the caller had set for itself."""
    signal.set_wakeup_fd(-1)  # an event loop's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.register(WHERE, file=2)
    with suppress(OSError):  # where memory runs out, it is this process that ends
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    sys.stdin = io.StringIO()  # nobody answers
    sys.stdout = Printed(io.FileIO(1, "w"), write_through=True, errors="replace")
    sys.stderr = Printed(io.FileIO(2, "w"), write_through=True, errors="replace")
    _terminal()
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork


def _terminal() -> None:
    """Standard input: a terminal, which some programs ask for its size, at its end."""
    typed, read = os.openpty()
    fcntl.ioctl(read, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.write(typed, b"\x04" * 100)
    os.dup2(read, 0)


def _system(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), name)(*arguments)
