"""How a script ends before its own end, and where in the user's code that was."""

import linecache
import site
import sys
import sysconfig
import traceback
from pathlib import Path

SEVERAL = (
    "asks for several processes, and one card was named: name as many, as --gpus 2xT4 does, or run "
    "it with one, as torchrun would with RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 in front of the command"
)
MORE_RANKS = (
    "asks for {} processes, and {} cards were named: name as many, as --gpus 8xA100-40GB does"
)
STARTS = "starts another program to train, `{}`: give that one to the prediction"
RANK_0 = (
    "It was run as rank 0 of {}, as torchrun would run it. In a step its link carries {:,.0f} MiB, "
    "if cards stand in a ring; that takes time beside the step's or on top of it."
)
KILLED = "was ended by SIGKILL, as the system does where this machine's memory runs out"
KEEPER_ENDED = "the process that keeps it was ended by"
SEVERAL_CARDS = "puts tensors on {}: one card is predicted, which is cuda:0"


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
    return _shown(own[-1]) if own else ""


def _shown(frame) -> str:
    file, number = frame.filename, frame.lineno
    line = (frame.line or linecache.getline(file, number)).strip()
    shown = f": `{line[:100]}`" if line else ""
    return f"line {number} of {Path(file).name}{shown}"


def reached(error: BaseException) -> str:
    """The line of a library where it was raised, if the user's own code called one that is not
    torch or this one: ", in line 7 of loss.py: `its text`", or nothing."""
    inside = (f"{Path(sys.modules['torch'].__file__).parent}/", f"{Path(__file__).parents[1]}/")
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if not f.filename.startswith(("<", *inside))]
    return f", in {_shown(frames[-1])}" if frames and not stood(frames[-1:]) else ""


def in_line(error: BaseException) -> str:
    """Where the user's own code stood: " in line 5 of train.py: `its text`", or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:  # found before anything ran
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 1, ""))
    place = stood(frames)
    return f" in {place}" if place else ""
