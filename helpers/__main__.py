"""The helpers as commands: `python -m helpers predict --size large --gpu T4 bf16=True`."""

import argparse
import ast
import json
import os
import sys
import time
from pathlib import Path

from fake_cuda.scripts.script import SECONDS, Script

from . import fit, report, show, workloads
from .hardware import versions
from .prediction import Prediction, predict


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(message)  # one sentence, like any other bad input


WORDS = ("true", "false", "none")  # however they are written
FACTS = (  # what --json says of a prediction
    "workload peak_allocated peak_reserved used context by_category fits took note "
    "step_seconds samples_per_second tokens_per_second limited_by shares model_flops_utilisation"
).split()


def setting(text: str) -> tuple[str, object]:
    """`name=value` with the value read as Python where it is, else as text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not a setting: write name=value, such as bf16=True")
    if name in ("gpu", "name", "optimizer", "workload"):
        raise ValueError(f"{name} is not a keyword of TrainingArguments: see --help")
    try:
        return name, ast.literal_eval(value.title() if value.lower() in WORDS else value)
    except (ValueError, SyntaxError):
        return name, value


def facts(found: Prediction, **asked: str) -> str:
    told = {"gpu": found.device} | asked | {name: getattr(found, name) for name in FACTS}
    return json.dumps(told | {"versions": versions()}, indent=2)


def picture(name: str) -> Path:
    """A file that can be written, as far as that is known before the work is done."""
    path = Path(name)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{name!r} is no picture: name a .png, .svg or .pdf file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name!r} cannot be written")
    return path


def progress(text: str, end: str = "") -> None:
    """One line, written over and over; where nobody watches, one in twenty seconds."""
    if sys.stderr.isatty():
        print(f"\r{text:<100.100}\r", end=end, file=sys.stderr, flush=True)
    elif text and time.monotonic() - progress.said > 20:
        progress.said = time.monotonic()
        print(text, file=sys.stderr, flush=True)


progress.said = float("inf")


def predict_command(options: argparse.Namespace) -> str:
    if options.script or options.module:
        name, progress.said = options.script or options.module, time.monotonic()
        asked, title = {"script": name}, ""
        about = dict(network=options.network, seconds=options.timeout, say=progress)
        script = Script(name, options.settings, module=bool(options.module), **about)
        try:
            found = predict(script, gpu=options.gpu)
        finally:
            progress("")
    else:
        settings = dict(map(setting, options.settings))
        workload = workloads.workload(options.size, options.task, length=options.length)
        found = predict(workload, gpu=options.gpu, **settings)
        asked, words = {"task": workload.task}, workload.task.replace("_", " ")
        batch = settings.get("per_device_train_batch_size", 8)
        title = f"{words}, batch of {batch} x {workload.length:,} tokens\n"
    if options.timeline:
        show.drawn(found, found.workload).savefig(options.timeline, dpi=160)
    return facts(found, **asked) if options.json else f"{title}{found}"


def fit_command(options: argparse.Namespace) -> tuple[str, int]:
    """The recipes that fit a card, and exit status 3 where none does."""

    asked = "task length batch data longest cache".split()
    asked = {key: getattr(options, key) for key in asked}
    found = fit.fit(options.model, options.gpu, say=progress, **asked)
    progress("")
    text = found.to_json() if options.json else str(found)
    if options.code and found.recipes and not options.json:
        text += f"\n\n{found.recipes[0].code}"
    return text, 0 if found.recipes else 3


def report_command(options: argparse.Namespace) -> str:
    """How well the predictions met what other people measured."""
    return f"{report.on_real_cards(report.judged())}\n\nDrawn in data/real_cards.png"


def main(arguments: list[str] | None = None) -> int:
    parser, both = Parser(prog="python -m helpers", description=__doc__), Parser(add_help=False)
    both.add_argument("--task", choices=[*workloads.MODELS], help="guessed from the model")
    both.add_argument("--length", type=int, help="tokens in a sample")
    both.add_argument("--json", action="store_true", help="everything, for programs")
    commands = parser.add_subparsers(metavar="predict, fit or report", required=True)
    command = commands.add_parser(
        "predict",
        parents=[both],
        help="predict the peak memory of training",
        usage="%(prog)s [options] [name=value ... | --script train.py -- its arguments]",
        epilog="name=value: keywords of TrainingArguments, such as bf16=True",
    )
    command.add_argument(
        "--size", "--model", default="large", help="large, tiny, a model's name or folder"
    )
    command.add_argument("--gpu", default="here", help="a card of data/gpus.csv, cpu, or here")
    command.add_argument("--script", help="a training script that nobody changed")
    command.add_argument("-m", "--module", help="the same, as python -m runs it")
    seconds = dict(type=float, default=SECONDS, metavar="SECONDS")
    command.add_argument("--timeout", **seconds, help="a script's time to take its updates")
    command.add_argument("--network", action="store_true", help="let a script reach other machines")
    command.add_argument("--timeline", type=picture, help="draw the last step: a .png file")
    command.set_defaults(run=predict_command)
    command = commands.add_parser("fit", parents=[both], help="find recipes that fit a card")
    command.add_argument("--model", required=True, help="a model's name, folder or hub id")
    command.add_argument("--gpu", default="T4", help="a card of data/gpus.csv, or memory: 24GiB")
    command.add_argument("--batch", type=int, default=8, help="samples of an optimizer step")
    command.add_argument("--data", help="texts to read for their lengths: a file or folder")
    command.add_argument("--longest", action="store_true", help="the longest sample, too")
    command.add_argument("--code", action="store_true", help="print the first recipe's code")
    command.add_argument("--no-cache", dest="cache", action="store_false")
    command.set_defaults(run=fit_command)
    command = commands.add_parser("report", help="compare predictions with measurements")
    command.set_defaults(run=report_command)
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        cut = given.index("--") if "--" in given else len(given)
        options, rest = parser.parse_known_args(given[:cut])
        script = getattr(options, "script", None) or getattr(options, "module", None)
        options.settings = given[cut + 1 :] if script else rest + given[cut:]
        if script and rest:  # what stands before -- is ours
            raise ValueError(f"{rest[0]!r}: a script's arguments stand after --")
        if options.settings and options.run is not predict_command:
            raise ValueError(f"{options.settings[0]!r} is not an option of {given[0]}")
        answer = options.run(options)
        text, status = answer if isinstance(answer, tuple) else (answer, 0)
        print(text, flush=True)
    except (BrokenPipeError, KeyboardInterrupt) as error:  # of `| head`, or Ctrl-C
        if isinstance(error, BrokenPipeError):  # else Python flushes once more, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if isinstance(error, BrokenPipeError) else 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
