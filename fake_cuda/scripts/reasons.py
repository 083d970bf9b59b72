"""Why a script gave no answer, in one sentence: whose fault it is, and where it stood."""

import errno
import importlib.metadata
import os
import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ..refusals import GPU, what_it_uses
from . import mixed, view, watch
from .extensions import NotKnown
from .ranks import PROCESS
from .words import SEVERAL, NoAnswer, Stop, TimeOver, in_line, reached

# Names of types, and texts: of libraries that are not loaded for this, and that wrap each other.
OFFLINE = "ConnectionError|ConnectError|LocalEntryNotFound|OfflineModeIsEnabled|URLError|gaierror"
OFFLINE += "|HfHubHTTPError|MaxRetryError|connect to 'https|Face Hub|urlopen|Network is unreachable"
# Of these, which take a name for one on a hub where there is no such folder.
HUB = "LocalEntryNotFound|OfflineModeIsEnabled|HfHubHTTPError|Face Hub|huggingface.co'|on the Hub"
BROKEN = (BrokenPipeError, ConnectionResetError)  # of processes, as a closed network has none
# What a script raises by values: if some were guessed, the script may be right.
BY_VALUE = (AssertionError, ValueError, ArithmeticError, RuntimeError, LookupError)
IPYTHON = r"[.]ipynb, cell .*(=\s*[!%]|\bawait\b|get_ipython)"  # of its own syntax
NO_VALUES = "what it makes there depends on tensors' values, which are not known on the card"
# Of a library that is not loaded for this, or of a program's command.
DRIVER = "NVML|nvidia-smi"
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
CLOSED = (
    "needs a hub or another address{}, and the network is closed to it: fetch it first, or open "
    "the network with --network{} ({})"
)
NO_FOLDER = "; if a folder of this machine is meant, there is none of that name"
# The system's words, for a library may print them: of its errors no type is left then.
TERMINAL = ("Inappropriate ioctl", "not a terminal")
OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass
class End:
    """How a script ended, and what is known of its run.

    Args:
        error: what ended it.
        printed: the last characters that it printed.
        generated: where it generated text.
        network: whether it was open to it.
        guessed: whether values of the card were asked for.
    """

    error: BaseException
    printed: str
    generated: str = ""
    network: bool = False
    guessed: bool = False
    chain: list[BaseException] = field(init=False)  # the error and those that led to it
    words: str = field(init=False)  # kinds and texts of the chain
    said: str = field(init=False)  # the error's own text
    at: str = field(init=False)  # " in line 5 of train.py: `its text`", or nothing

    def __post_init__(self):
        self.chain = [self.error]
        while cause := self.chain[-1].__cause__ or self.chain[-1].__context__:
            self.chain.append(cause)
        told = (one for one in self.chain if not isinstance(one, BROKEN))
        self.words = " ".join(f"{type(one).__mro__} {one}" for one in told)
        self.said = " ".join(str(self.error).split())[:300]
        self.at = in_line(self.error)

    @property
    def kind(self) -> str:
        """The error's type and text."""
        name = type(self.error).__name__
        return f"{name}: {self.said}" if self.said else name

    def names(self, *texts: str) -> bool:
        """Whether the errors say one of these."""
        return any(text in self.words for text in texts)


def why(
    error: BaseException, printed: str, generated: str = "", network=False, guessed=False
) -> str:
    """A few words about a script that ended early, to follow its name."""
    end = End(error, printed, generated, network, guessed)
    return next(filter(None, (reason(end) for reason in REASONS)))


# ------------------------------------- the reasons: the words for an end, "" for any other one
def _stopped(end: End) -> str:
    return end.said if isinstance(end.error, Stop | NotKnown) else ""


def _several_processes(end: End) -> str:
    return SEVERAL if end.names("_share_fd_") else ""


def _exited(end: End) -> str:
    """By itself, with a status or a text for one; else its last line tells."""
    if not isinstance(end.error, SystemExit):
        return ""
    last = [f"status {end.error.code}", *end.printed.strip().splitlines()][-1][:300]
    return f"ended before it took an update: {end.said if end.error.code == end.said else last}"


def _not_reached(end: End) -> str:
    if not end.names(*OFFLINE.split("|")):
        return ""
    folder = NO_FOLDER if end.names(*HUB.split("|")) else ""
    if end.network:
        return f"needs a hub or another address{end.at}, and does not reach it{folder} ({end.said})"
    return CLOSED.format(end.at, folder, end.said)


def _named_nowhere(end: End) -> str:
    if not end.names("HFValidationError"):
        return ""
    return f"names what is no folder of this machine, and what no hub can have{end.at}: {end.kind}"


def _not_allowed(end: End) -> str:
    return next(filter(None, map(_refused, end.chain)), "").format(at=end.at)


def _of_ipython(end: End) -> str:
    if not (isinstance(end.error, SyntaxError | NameError) and re.search(IPYTHON, end.at)):
        return ""
    return f"stops{end.at}: that is for IPython, and only Python is run: leave it out"


def _not_installed(end: End) -> str:
    if not isinstance(end.error, ModuleNotFoundError):
        return ""
    name = end.error.name
    if name is None:  # a library raised it, and says in words what it asks for
        return f"needs what is not installed{end.at}: {end.kind}"
    if isinstance(end.error, importlib.metadata.PackageNotFoundError):
        return f"asks for the version of {name}, which pip has not installed{end.at}"
    here = any(Path(f"{name}{ending}").exists() for ending in ("", ".py"))
    advice = ": set PYTHONPATH=. to find it in this folder" if here else ""
    return f"needs the module {name}, which is not installed{advice}"


def _of_another_version(end: End) -> str:
    """A library that is here has not the name that is asked for."""
    name = (getattr(end.error, "name", None) or "").split(".")[0]
    if not isinstance(end.error, ImportError) or "cannot import name" not in end.said:
        return ""
    try:
        version = importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # the script's own
        return ""
    return f"asks {name} {version} for what it does not have{end.at}: {end.said}"


def _of_a_package(end: End) -> str:
    if not end.names("no known parent package"):
        return ""
    return "is a module of a package: name it so, as in `-m package.module`"


def _waits_for_input(end: End) -> str:
    if not isinstance(end.error, NoAnswer):
        return ""
    return f"waits for input{end.at}, and nobody answers: take it from an argument, or leave it out"


def _without_terminal(end: End) -> str:
    """A library may have caught the first of these errors and printed it."""
    opened = any(getattr(one, "filename", None) == "/dev/tty" for one in end.chain)
    if not (opened or end.names(*TERMINAL) or TERMINAL[0] in end.printed[-2000:]):
        return ""
    return f"needs a terminal{end.at}, and this is none"


def _by_values(end: End) -> str:
    if not any(isinstance(one, OF_VALUES) for one in end.chain):
        return ""
    if end.generated:
        return f"generates text and picks by its values ({end.generated})"
    return f"cannot be predicted{end.at}{reached(end.error)}: {NO_VALUES}"


def _asks_the_driver(end: End) -> str:
    if not end.names(*DRIVER.split("|")):
        return ""
    return f"asks the driver of a card{end.at}, and there is none here: leave that out ({end.kind})"


def _not_simulated(end: End) -> str:
    used = next(filter(None, map(what_it_uses, end.chain)), "")
    if not used:
        return ""
    if used == GPU:
        return f"asks CUDA{end.at} for what the simulation does not answer: {end.kind}"
    return f"stops{end.at}, which the simulation cannot do: it uses {used}"


def _fault_of_ours(end: End) -> str:
    if not ours(end.error):
        return ""
    return f"stops{end.at} because of the simulation, not of the script: {end.kind}"


def _after_a_guess(end: End) -> str:
    by_value = isinstance(end.error, BY_VALUE) and not end.said.startswith(mixed.SAID)
    if not (end.guessed and by_value):
        return ""
    return f"fails{end.at}, perhaps by a value of the card that was guessed: {end.kind}"


def _by_itself(end: End) -> str:
    return f"fails by itself{end.at}: {end.kind}"


# The first one with words is told.
REASONS = (
    _stopped,
    _several_processes,
    _exited,
    _not_reached,
    _named_nowhere,
    _not_allowed,
    _of_ipython,
    _not_installed,
    _of_another_version,
    _of_a_package,
    _waits_for_input,
    _without_terminal,
    _by_values,
    _asks_the_driver,
    _not_simulated,
    _fault_of_ours,
    _after_a_guess,
    _by_itself,
)


# ------------------------------------------------------------------------- what the reasons look at
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
    """Whether it ended since nobody told it what torchrun tells each process: an error names
    torchrun or such a variable, which is not set, or was raised in a line that does."""
    unset = "|".join(name for name in PROCESS if name not in os.environ)
    while unset and error is not None and not isinstance(error, Stop | TimeOver):
        line = (traceback.extract_tb(error.__traceback__) or [None])[-1]
        quoted = re.search(f"[\"']({unset})[\"']", line and line.line or "")
        if quoted or re.search(rf"\b({unset}|torchrun)\b", str(error)):
            return True
        error = error.__cause__  # not its context: the script may have gone on without it
    return False


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
