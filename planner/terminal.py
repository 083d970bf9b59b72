"""What the command reads from a terminal and writes to it; nothing here loads a library."""

import argparse
import ast
import importlib.metadata
import os
import sys
import time
from pathlib import Path

# Exit statuses.
OK, NOT_WELL, BAD_INPUT, NOTHING_FITS, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 3, 130, 141
PROJECT = "one-gpu-measured"
WORDS = ("true", "false", "none")  # however they are written
NOT_SETTINGS = ("gpu", "host", "name", "optimizer", "workload")  # keywords of predict that are none


def version() -> str:
    """The version of the course that is installed, which pyproject.toml says."""
    try:
        return importlib.metadata.version(PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, like any other bad input."""

    def error(self, message: str):
        """ValueError in place of the usage and an exit."""
        raise ValueError(message)


class Progress:
    """One line, written over and over; where nobody watches, a line in twenty seconds."""

    EVERY = 20  # seconds

    def __init__(self):
        self.said = time.monotonic()

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text:<100.100}\r", end="", file=sys.stderr, flush=True)
        elif text and time.monotonic() - self.said > self.EVERY:
            self.said = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self("")  # the line is wiped


def setting(text: str) -> tuple[str, object]:
    """`name=value` with the value read as Python where it is, else as text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not a setting: write name=value, such as bf16=True")
    if name in NOT_SETTINGS:
        raise ValueError(f"{name} is not a keyword of TrainingArguments: see --help")
    try:
        return name, ast.literal_eval(value.title() if value.lower() in WORDS else value)
    except (ValueError, SyntaxError):
        return name, value


def host(text: str) -> float | str:
    """A host's seconds as a number; what is none is left to `helpers.host`, which knows names."""
    try:
        return float(text)
    except ValueError:
        return text


def amount(text: str) -> float:
    """A number of steps or tokens, also as 1e9 or 1,000."""
    try:
        found = float(text.replace(",", ""))
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of them: write 1000 or 1e9")
    return found


def picture(name: str) -> Path:
    """A file that can be written, as far as that is known before the work is done."""
    path = Path(name)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{name!r} is no picture: name a .png, .svg or .pdf file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name!r} cannot be written")
    return path
