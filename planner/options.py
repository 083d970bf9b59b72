"""What can be asked of `onegpu`: its commands and their options. Nothing here loads a library."""

import argparse

from fake_cuda.units import TASKS

from .terminal import NOTHING_FITS, Parser, amount, host, picture, version

ORDERS = ("change", "fastest", "smallest")  # of answer
PARALLEL = ("ddp", "zero1", "fsdp2", "hsdp")  # of ranks


def parser() -> argparse.ArgumentParser:
    """What can be asked, and how."""
    found = Parser(prog="onegpu", description="Predict training on one GPU, before it runs.")
    both = Parser(add_help=False)
    both.add_argument("--task", choices=TASKS, help="guessed from the model")
    both.add_argument("--length", type=int, help="tokens in a sample")
    about = "of a model that reads pictures in texts: pixels of a side of each picture"
    both.add_argument("--image-size", type=int, metavar="PIXELS", help=about)
    both.add_argument("--json", action="store_true", help="everything, for programs")
    found.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    names = "predict, fit, calibrate, report or doctor"
    commands = found.add_subparsers(metavar=names, required=True)
    _predict_options(commands, both)
    _fit_options(commands, both)
    _calibrate_options(commands, both)
    report = commands.add_parser("report", help="compare predictions with measurements")
    report.set_defaults(command="report")
    doctor = commands.add_parser("doctor", help="look whether this installation can predict")
    doctor.set_defaults(command="doctor")
    return found


def _host_option(command: Parser) -> None:
    about = "seconds that the card's computer takes for an operation; onegpu calibrate finds them"
    command.add_argument("--host", type=host, metavar="fast|typical|slow|SECONDS", help=about)


def _predict_options(commands, both: Parser) -> None:
    command = commands.add_parser(
        "predict",
        parents=[both],
        help="predict the peak memory of training",
        usage="%(prog)s [options] [name=value ... | --script train.py -- its arguments]",
        epilog="name=value: keywords of TrainingArguments, such as bf16=True; with --parallel also "
        "lora=16, sync_each_batch, gradient_as_bucket_view and reshard_after_forward",
    )
    add = command.add_argument
    add("--size", "--model", default="large", help="large, tiny, a model's name or folder")
    add("--gpu", help="a card of data/gpus.csv, cpu, or here, the default; with --prices several")
    add("--gpus", metavar="8xA100-80GB", help="so many such cards: rank 0 is predicted")
    add("--parallel", metavar="|".join(PARALLEL), help="how a model is trained on --gpus")
    add("--tensor", type=int, metavar="N", help="so many of them share each product (fsdp2)")
    add("--code", action="store_true", help="print the script of --parallel, for torchrun")
    add("--script", help="a training script that nobody changed")
    add("-m", "--module", help="the same, as python -m runs it")
    add("--timeout", type=float, metavar="SECONDS", help="a script's time to take its updates")
    add("--network", action="store_true", help="let a script reach other machines")
    about = "cards by what the run costs: a list such as examples/prices.csv, or that one"
    add("--prices", metavar="FILE|example", help=about)
    add("--steps", type=amount, help="of the run that is priced")
    add("--tokens", type=amount, help="of the run that is priced, instead: 1e9")
    add("--timeline", type=picture, help="draw the last step: a .png file")
    add("--must-fit", action="store_true", help=f"exit status {NOTHING_FITS} where it does not fit")
    _host_option(command)
    command.set_defaults(command="predict")


def _fit_options(commands, both: Parser) -> None:
    command = commands.add_parser("fit", parents=[both], help="find recipes that fit a card")
    add = command.add_argument
    add("--model", required=True, help="a model's name, folder or hub id")
    add("--gpu", help="a card of data/gpus.csv, or memory: 24GiB; T4 is the default")
    add("--gpus", metavar="2x24GiB", help="so many such cards: rank 0 of each way is predicted")
    add("--batch", type=int, default=8, help="samples of an optimizer step")
    add("--data", help="texts to read for their lengths: a file or folder")
    add("--longest", action="store_true", help="the longest sample, too")
    add("--order", choices=ORDERS, help="of the recipes: least change first is the default")
    add("--code", action="store_true", help="print the first recipe's code")
    add("--exact", action="store_true", help="predict in full also what data/atlas has recorded")
    add("--no-cache", dest="cache", action="store_false", help="predict all anew")
    _host_option(command)
    command.set_defaults(command="fit")


def _calibrate_options(commands, both: Parser) -> None:
    command = commands.add_parser(
        "calibrate",
        parents=[both],
        help="find how fast the card's computer is",
        usage="%(prog)s [--gpu CARD --model NAME --step-seconds SECONDS [name=value ...]]",
        description="Measures a small step on this machine's card, half a minute, and keeps what "
        "it tells; or takes a step that was timed, of a run with these settings.",
    )
    add = command.add_argument
    add("--step-seconds", type=float, metavar="SECONDS", help="what an optimizer step took")
    add("--model", help="of this run: a model's name or folder")
    add("--gpu", help="its card: one of data/gpus.csv, or here, which is the default")
    command.set_defaults(command="calibrate")
