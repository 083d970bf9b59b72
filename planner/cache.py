"""Predictions that are kept on disk, in `build/predictions`. The folder can be deleted."""

import functools
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from helpers.hardware import own_file, versions

from .facts import Facts

PACKAGES = ("planner", "helpers", "fake_cuda")  # the code that a prediction depends on
SCRIPTS = "scripts"  # but this of fake_cuda: nothing that is kept is a script's


def digest(text: str) -> str:
    """The name of a text that no other text has."""
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def code() -> str:
    """A hash of all that a prediction depends on beside what is asked: our code, the versions."""
    root = Path(__file__).resolve().parents[1]
    files = [path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    texts = [path.read_text("utf-8") for path in files if path.parent.name != SCRIPTS]
    return digest("".join(texts) + repr(versions()))


def kept(question: str, predict: Callable[[], Facts]) -> Facts:
    """What was kept for a question, or else what `predict` answers, which is kept.

    A file has two lines: a hash of question and answer, and the answer. One that is damaged, or
    holds the answer of another question, is written anew.

    Args:
        question: all that the answer depends on, as a text.
        predict: what answers it; its errors are not kept.
    """
    path = own_file("predictions", digest(question))
    with suppress(OSError, ValueError):
        check, answer = path.read_text(encoding="utf-8").split("\n")
        if check == digest(question + answer):
            return Facts(**json.loads(answer))
    facts = predict()
    with suppress(OSError):  # no right to write, no room
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = json.dumps(asdict(facts))
        path.write_text(f"{digest(question + answer)}\n{answer}", encoding="utf-8")
    return facts
