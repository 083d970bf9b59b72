"""The command line: `onegpu predict | fit | calibrate | report`.

Nothing here is imported before it is needed, so that a wrong option is answered at once.
"""

import argparse
import json
import os
import sys

from .terminal import Parser, Progress, host, picture, setting

TASKS = ("text_classification", "language_modelling")  # of helpers.workloads, which loads torch
PARALLEL = ("ddp", "zero1", "fsdp2", "hsdp")  # of ranks
FACTS = (  # what --json says of a prediction
    "workload peak_allocated peak_reserved used context by_category fits took note "
    "step_seconds step_seconds_low step_seconds_high host samples_per_second tokens_per_second "
    "limited_by shares model_flops_utilisation"
).split()
ALONE = "gpu", "data", "longest"  # options of fit for one card, and those for several, too
BOTH = "task", "length", "batch", "cache", "host"
OK, BAD_INPUT, NOTHING_FITS, INTERRUPTED, CLOSED_PIPE = 0, 2, 3, 130, 141  # exit statuses


# ------------------------------------------------------------------------------------ the commands
def predict_command(options: argparse.Namespace) -> str | tuple[str, int]:
    """A prediction, as text or as JSON; with --must-fit a status of its own where none fits."""
    scripted = options.script or options.module
    options.ranks, options.gpu = _cards(options, bool(scripted))
    if options.code:
        from .ranks import rank_script

        asked, named = _rank_asked(options)
        return rank_script(*asked, **named)
    predicted = _script_predicted if scripted else _model_predicted
    found, title, asked = (_rank_predicted if options.parallel else predicted)(options)
    if options.timeline:
        from helpers import show

        show.drawn(found, found.workload).savefig(options.timeline, dpi=160)
    if options.must_fit and found.fits is None:
        raise ValueError("--must-fit asks whether a card holds it: name one with --gpu")
    status = NOTHING_FITS if options.must_fit and not found.fits else OK
    if not options.json:
        return f"{title}{found}{_about_host(options, found)}", status
    from helpers.hardware import versions

    facts = {name: getattr(found, name) for name in FACTS}
    about = {"gpu": found.device} | asked | facts | {"versions": versions()}
    return json.dumps(about, indent=2), status


def _about_host(options: argparse.Namespace, found) -> str:
    """What a reader can do where a step waits for a host that nobody told or measured."""
    from helpers.host import HOST_SECONDS, us

    if options.host is not None or found.limited_by != "host" or found.host != HOST_SECONDS:
        return ""
    return (
        f"\nThis step waits for its host, of which {us(HOST_SECONDS)} for an operation are "
        "assumed: onegpu calibrate finds them, --host tells them."
    )


def _cards(options: argparse.Namespace, scripted: bool) -> tuple[int, str]:
    """How many cards there are, and which."""
    alone = next((n for n in ("tensor", "code") if getattr(options, n)), "")
    if alone and not options.parallel:
        raise ValueError(f"--{alone} goes with --parallel")
    if options.gpus is None:
        if options.parallel:
            raise ValueError("--parallel needs several cards: --gpus 8xA100-80GB")
        return 1, options.gpu or "here"
    count, times, name = options.gpus.partition("x")
    if not (times and count.isdecimal() and int(count)):
        raise ValueError(f"{options.gpus!r} is no number of cards: write 8xA100-80GB")
    if options.gpu:
        raise ValueError("name the cards once: --gpu or --gpus")
    if scripted and options.parallel:
        raise ValueError("a script says itself how it uses its cards: leave out --parallel")
    if not (scripted or options.parallel):
        ways = ", ".join(PARALLEL)
        raise ValueError(f"--gpus needs a script, or --parallel and one of {ways}")
    return int(count), name


def _script_predicted(options: argparse.Namespace) -> tuple:
    """The prediction of a script that nobody changed, a title, and what was asked."""
    from fake_cuda.scripts.script import SECONDS, Script

    name = options.script or options.module
    with Progress() as progress:
        script = Script(
            name,
            options.settings,
            module=bool(options.module),
            ranks=options.ranks,
            network=options.network,
            seconds=SECONDS if options.timeout is None else options.timeout,
            say=progress,
        )
        with script.started():
            from helpers.prediction import predict  # takes seconds, like what the script loads

            return predict(script, gpu=options.gpu, host=options.host), "", {"script": name}


def _model_predicted(options: argparse.Namespace) -> tuple:
    """The prediction of a model with settings, a title, and what was asked."""
    from helpers import workloads
    from helpers.prediction import predict

    settings = dict(map(setting, options.settings))
    workload = workloads.workload(options.size, options.task, length=options.length)
    found = predict(workload, gpu=options.gpu, host=options.host, **settings)
    batch = settings.get("per_device_train_batch_size", 8)
    words = workload.task.replace("_", " ")
    title = f"{words}, batch of {batch} x {workload.length:,} tokens\n"
    return found, title, {"task": workload.task}


def _rank_asked(options: argparse.Namespace) -> tuple[tuple, dict]:
    """What the functions of `ranks` are asked: by place, and by name."""
    if options.task not in (None, "language_modelling"):
        raise ValueError("--parallel is for language modelling: give a script of your own")
    asked = options.size, options.ranks, options.parallel, options.tensor or 1
    return asked, dict(map(setting, options.settings)) | {"length": options.length}


def _rank_predicted(options: argparse.Namespace) -> tuple:
    """The prediction of a rank, a title, and what was asked."""
    from .ranks import predict_rank

    (model, ranks, parallel, tensor), named = _rank_asked(options)
    about = {"host": options.host} | named
    with Progress() as progress:
        found = predict_rank(model, options.gpu, ranks, parallel, tensor, say=progress, **about)
    batch = named.get("per_device_train_batch_size", 8)
    title = f"language modelling, batch of {batch} on each rank\n"
    return found, title, dict(ranks=ranks, parallel=parallel, tensor=tensor)


def fit_command(options: argparse.Namespace) -> tuple[str, int]:
    """The recipes that fit a card, or several, and an exit status for where none does."""
    if options.gpus and (alone := next((n for n in ALONE if getattr(options, n)), "")):
        raise ValueError(f"--{alone} is for one card, and --gpus names several: leave out one")
    from . import fit
    from .search_several import fit_several

    with Progress() as progress:
        asked = {name: getattr(options, name) for name in BOTH} | {"say": progress}
        if options.gpus:
            found = fit_several(options.model, options.gpus, **asked)
        else:
            asked |= {"data": options.data, "longest": options.longest}
            found = fit(options.model, options.gpu or "T4", **asked)
    text = found.to_json() if options.json else str(found)
    if options.code and found.recipes and not options.json:
        text += f"\n\n{found.recipes[0].code}"
    return text, OK if found.recipes else NOTHING_FITS


def calibrate_command(options: argparse.Namespace) -> str:
    """What one step tells of the host: a small one that is measured, or one that was timed."""
    settings = dict(map(setting, options.settings))
    if options.step_seconds is None:
        if options.model or options.gpu or options.task or options.length or settings:
            raise ValueError("a run's model, card and settings go with its --step-seconds")
        from .calibration import calibrate

        found = calibrate()
    elif not options.model:
        raise ValueError("--step-seconds is of a run: name its --model and its settings")
    else:
        from helpers import workloads

        from .calibration import calibrate_by

        workload = workloads.workload(options.model, options.task, length=options.length)
        found = calibrate_by(workload, options.step_seconds, options.gpu or "here", **settings)
    return json.dumps(vars(found), indent=2) if options.json else str(found)


def report_command(options: argparse.Namespace) -> str:
    """How well the predictions met what other people measured."""
    from . import report

    return f"{report.on_real_cards(report.judged())}\n\nDrawn in data/real_cards.png"


# ----------------------------------------------------------------------------------------- options
def parser() -> argparse.ArgumentParser:
    """What can be asked, and how."""
    found = Parser(prog="onegpu", description="Predict training on one GPU, before it runs.")
    both = Parser(add_help=False)
    both.add_argument("--task", choices=TASKS, help="guessed from the model")
    both.add_argument("--length", type=int, help="tokens in a sample")
    both.add_argument("--json", action="store_true", help="everything, for programs")
    commands = found.add_subparsers(metavar="predict, fit or report", required=True)
    _predict_options(commands, both)
    _fit_options(commands, both)
    _calibrate_options(commands, both)
    report = commands.add_parser("report", help="compare predictions with measurements")
    report.set_defaults(run=report_command)
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
    add("--gpu", help="a card of data/gpus.csv, cpu, or here, which is the default")
    add("--gpus", metavar="8xA100-80GB", help="so many such cards: rank 0 is predicted")
    add("--parallel", metavar="|".join(PARALLEL), help="how a model is trained on --gpus")
    add("--tensor", type=int, metavar="N", help="so many of them share each product (fsdp2)")
    add("--code", action="store_true", help="print the script of --parallel, for torchrun")
    add("--script", help="a training script that nobody changed")
    add("-m", "--module", help="the same, as python -m runs it")
    add("--timeout", type=float, metavar="SECONDS", help="a script's time to take its updates")
    add("--network", action="store_true", help="let a script reach other machines")
    add("--timeline", type=picture, help="draw the last step: a .png file")
    add("--must-fit", action="store_true", help=f"exit status {NOTHING_FITS} where it does not fit")
    _host_option(command)
    command.set_defaults(run=predict_command)


def _fit_options(commands, both: Parser) -> None:
    command = commands.add_parser("fit", parents=[both], help="find recipes that fit a card")
    add = command.add_argument
    add("--model", required=True, help="a model's name, folder or hub id")
    add("--gpu", help="a card of data/gpus.csv, or memory: 24GiB; T4 is the default")
    add("--gpus", metavar="2x24GiB", help="so many such cards: rank 0 of each way is predicted")
    add("--batch", type=int, default=8, help="samples of an optimizer step")
    add("--data", help="texts to read for their lengths: a file or folder")
    add("--longest", action="store_true", help="the longest sample, too")
    add("--code", action="store_true", help="print the first recipe's code")
    add("--no-cache", dest="cache", action="store_false", help="predict all anew")
    _host_option(command)
    command.set_defaults(run=fit_command)


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
    command.set_defaults(run=calibrate_command)


def parsed(given: list[str]) -> argparse.Namespace:
    """Options, and in `settings` what is no option: settings, or a script's arguments."""
    cut = given.index("--") if "--" in given else len(given)
    options, rest = parser().parse_known_args(given[:cut])
    if getattr(options, "script", None) or getattr(options, "module", None):
        if rest:  # what stands before -- is ours
            raise ValueError(f"{rest[0]!r}: a script's arguments stand after --")
        options.settings = given[cut + 1 :]
    else:
        options.settings = rest + given[cut:]
    if options.settings and options.run not in (predict_command, calibrate_command):
        raise ValueError(f"{options.settings[0]!r} is not an option of {given[0]}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process; the exit status."""
    try:
        options = parsed(list(sys.argv[1:] if arguments is None else arguments))
        answer = options.run(options)
        text, status = answer if isinstance(answer, tuple) else (answer, OK)
        print(text, flush=True)
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # of `| head`; else Python flushes once more, and complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
