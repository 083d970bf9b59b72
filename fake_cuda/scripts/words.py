"""Why a script gave no answer, in one sentence: whose fault it is, and where it stood."""

import errno
import linecache
import os
import re
import site
import sys
import sysconfig
import traceback
from pathlib import Path

from ..simulation import GPU, MISTAKES, NO_VALUES
from . import view, watch

SEVERAL = (
    "asks for several processes, and one is predicted: run it with one, as torchrun would with "
    "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 in front of the command"
)
SEVERAL_CARDS = "puts tensors on {}: one card is predicted, which is cuda:0"
OFFLINE = "ConnectionError|ConnectError|LocalEntryNotFound|OfflineModeIsEnabled|URLError|gaierror"
OFFLINE += "|HfHubHTTPError|MaxRetryError|connect to 'https|Face Hub|urlopen|Network is unreachable"
BROKEN = (BrokenPipeError, ConnectionResetError)  # of processes, as a closed network has none
# What a script raises by values: if some were guessed, the script may be right.
BY_VALUE = (AssertionError, ValueError, ArithmeticError, RuntimeError, LookupError)
IPYTHON = r"[.]ipynb, cell .*(=\s*[!%]|\bawait\b|get_ipython)"  # of its own syntax
DRIVER = "NVML|nvidia-smi"
ALONE = ("'RANK'", "'LOCAL_RANK'", "'WORLD_SIZE'", "'MASTER_ADDR'", "'LOCAL_WORLD_SIZE'")
FULL = (
    "writes more than there is room for{at}: what it writes is kept in memory, half of this "
    "machine's at most"
)
READ_ONLY = "changes {}, which can only be read here{{at}}: the view of the files cannot copy it"
ATTACHES = "attaches a database{at} that is not known to lie in the copy of its folder"
PROGRAM = "starts another program, `{}`{{at}}, and on this system none is started"
OUTSIDE = (
    "writes to {}, outside of the copy of its folder in which it runs on this system"
    "{{at}}: name a folder inside it"
)
UNSET = "environment variable [A-Z_]+ expected, but not set"  # torch/distributed/rendezvous.py


class Stop(BaseException):
    """The script has taken its updates; or, with a text, may not go on."""


class TimeOver(BaseException):
    """The script had its seconds."""


class NoAnswer(EOFError):
    """The script waits for what somebody types."""


def _libraries() -> tuple[str, ...]:
    paths = [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    paths += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (*(path.rstrip("/") + "/" for path in paths), sys.prefix + "/lib")


def stood(frames) -> str:
    """The last line of the user's own among the frames of a traceback, as text."""
    foreign = ("<", *_libraries())
    own = [f for f in frames if not f.filename.startswith(foreign)]
    own = [f for f in own if not {"site-packages", "dist-packages"} & set(Path(f.filename).parts)]
    if not own:
        return ""
    file, number = own[-1].filename, own[-1].lineno
    line = (own[-1].line or linecache.getline(file, number)).strip()
    shown = f": `{line[:100]}`" if line else ""
    return f"line {number} of {Path(file).name}{shown}"


def in_line(error: BaseException) -> str:
    """Where the user's own code stood: " in line 5 of train.py: `its text`", or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:  # found before anything ran
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 1, ""))
    place = stood(frames)
    return f" in {place}" if place else ""


def ours(error: BaseException) -> bool:
    """Whether the simulation raised it. What it raises as torch would, and what torch says of a
    call that was handed on to it, is the script's own."""
    if isinstance(error, SyntaxError):
        return False
    last = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    if last is None or re.search("FakeTensor|fake tensor|\\bmeta\\b", str(error)):
        return last is not None and not isinstance(error, AttributeError)
    if "_subclasses/fake" in last.filename:  # where shapes are compared, too
        return type(error) is not RuntimeError
    as_torch = (last.line or "").startswith("raise ") or "func(" in (last.line or "")
    return last.filename.startswith(str(Path(__file__).parents[1])) and not as_torch


def alone(error: BaseException | None) -> bool:
    """Whether it ended since nobody told it how many processes there are."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    asked = isinstance(error, KeyError) and frames[-1:] and frames[-1].filename == os.__file__
    return bool(asked and str(error) in ALONE or re.search(UNSET, str(error)))


def _refused(error: BaseException) -> str:
    """What the view of the files did not let it do."""
    name = str(getattr(error, "filename", None) or error)[:200].replace("{", "{{")
    name, number = name.replace("}", "}}"), getattr(error, "errno", None)
    if view.entered == "overlay":
        if number == errno.ENOSPC or "enough free space" in str(error) or _full():  # numpy's
            return FULL
        return READ_ONLY.format(name) if number in (errno.EROFS, errno.EOVERFLOW) else ""
    if not view.entered or not isinstance(error, PermissionError):
        return ATTACHES if view.entered == "watched" and "not authorized" in str(error) else ""
    if error.errno == errno.EPERM:
        return PROGRAM.format(name) if error.strerror == watch.NO_PROGRAMS else ""
    secret = os.path.exists(name) and not os.access(name, os.R_OK)
    return "" if secret else OUTSIDE.format(name)


def _full() -> bool:
    """Whether there is no room for files: compiled libraries say less of it than the system."""
    about = os.statvfs(".")
    return about.f_bavail * about.f_frsize < 2**16


def why(
    error: BaseException, printed: str, generated: str = "", network=False, guessed=False
) -> str:
    """A few words about a script that ended early. `generated` says where it generated text,
    `network` whether it is open, `guessed` whether values of the card were asked for."""
    chain, said = [error], " ".join(str(error).split())[:300]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    words = " ".join(f"{type(one).__mro__} {one}" for one in chain if not isinstance(one, BROKEN))
    at = in_line(error)
    if isinstance(error, Stop):
        return said
    if alone(error) or "_share_fd_" in words:
        return SEVERAL
    if isinstance(error, SystemExit):
        last = [f"status {error.code}", *printed.strip().splitlines()][-1][:300]
        return f"ended before it took an update: {said if error.code == said else last}"
    if any(text in words for text in OFFLINE.split("|")):
        if network:
            return f"needs a hub or another address{at}, and does not reach it ({said})"
        return (
            f"needs a hub or another address{at}, and the network is closed to it: fetch it first, "
            f"or open the network with --network ({said})"
        )
    if refused := next(filter(None, map(_refused, chain)), ""):
        return refused.format(at=at)
    if isinstance(error, SyntaxError | NameError) and re.search(IPYTHON, at):
        return f"stops{at}: that is for IPython, and only Python is run: leave it out"
    if isinstance(error, ModuleNotFoundError):
        here = any(Path(f"{error.name}{end}").exists() for end in ("", ".py"))
        advice = ": set PYTHONPATH=. to find it in this folder" if here else ""
        return f"needs the module {error.name}, which is not installed{advice}"
    if "no known parent package" in words:
        return "is a module of a package: name it so, as in `-m package.module`"
    if isinstance(error, NoAnswer):
        return f"waits for input{at}, and nobody answers: take it from an argument, or leave it out"
    if "Inappropriate ioctl" in words + printed[-2000:] or "not a terminal" in words:
        return f"needs a terminal{at}, and this is none"
    if "DataDependentOutput" in words or "DynamicOutputShape" in words:
        if generated:
            return f"generates text and picks by its values ({generated})"
        return f"cannot be predicted{at}: {NO_VALUES}"
    kind = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if any(text in words for text in DRIVER.split("|")):
        return f"asks the driver of a card{at}, and there is none here: leave that out ({kind})"
    for text, mistake in MISTAKES.items():
        if text in words and mistake != GPU:
            return f"stops{at}, which the simulation cannot do: it uses {mistake}"
        if text in words:
            return f"asks CUDA{at} for what the simulation does not answer: {kind}"
    if ours(error):
        return f"stops{at} because of the simulation, not of the script: {kind}"
    if guessed and isinstance(error, BY_VALUE):
        return f"fails{at}, perhaps by a value of the card that was guessed: {kind}"
    return f"fails by itself{at}: {kind}"
