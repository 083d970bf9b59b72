"""The command line: `onegpu predict | fit | calibrate | report | doctor`.

Nothing here is imported before it is needed, so that a wrong option is answered at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable

from .options import PARALLEL, parser
from .terminal import (
    BAD_INPUT,
    CLOSED_PIPE,
    INTERRUPTED,
    NOT_WELL,
    NOTHING_FITS,
    OK,
    Progress,
    setting,
)

FACTS = (  # what --json says of a prediction
    "workload peak_allocated peak_reserved used context by_category fits took note "
    "step_seconds step_seconds_low step_seconds_high host samples_per_second tokens_per_second "
    "limited_by shares model_flops_utilisation"
).split()


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
    if options.prices:
        return _priced(options, predicted)
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


def _priced(options: argparse.Namespace, predicted: Callable) -> tuple[str, int]:
    """The cards of a price list, the cheapest that holds the run first."""
    from . import prices

    listed = prices.read(options.prices)
    length = prices.Length(options.steps, options.tokens)
    offers, title, asked = [], "", {}
    for card in prices.cards_asked(options.gpu, listed):
        one = argparse.Namespace(**vars(options) | {"gpu": card})
        try:
            found, title, asked = predicted(one)
        except ValueError as error:
            raise ValueError(f"{card}: {error}") from error
        offers.append(prices.offer(found, listed[card], length))
    offers = prices.cheapest_first(offers)
    status = NOTHING_FITS if options.must_fit and not offers[0].prediction.fits else OK
    if not options.json:
        notes = {one.prediction.note for one in offers} - {""}
        return "\n".join([title + prices.table(offers, length), *sorted(notes)]), status
    from helpers.hardware import versions

    facts = [{name: getattr(one.prediction, name) for name in FACTS} for one in offers]
    cards = [one.facts() | fact for one, fact in zip(offers, facts, strict=True)]
    about = {"run": str(length)} | asked | {"cards": cards, "versions": versions()}
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
    _check_prices(options)
    if options.gpus is None:
        if options.parallel:
            raise ValueError("--parallel needs several cards: --gpus 8xA100-80GB")
        return 1, options.gpu if options.prices else options.gpu or "here"
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


def _check_prices(options: argparse.Namespace) -> None:
    """ValueError for options of prices that do not go together."""
    if not options.prices:
        if options.steps or options.tokens:
            raise ValueError("--steps and --tokens are of a run that is to be priced: add --prices")
        if "," in (options.gpu or ""):
            raise ValueError("several cards are compared by their prices: add --prices")
    elif options.gpus:
        raise ValueError("--prices is for one card: of several no time is told that counts a link")
    elif options.steps and options.tokens:
        raise ValueError("say once how long the run is: --steps or --tokens")
    elif options.timeline:
        raise ValueError("--timeline draws one card's step: leave out --prices")


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
    about = {"length": options.length, "image_size": options.image_size}
    workload = workloads.workload(options.size, options.task, **about)
    found = predict(workload, gpu=options.gpu, host=options.host, **settings)
    batch = settings.get("per_device_train_batch_size", 8)
    words = workload.task.replace("_", " ")
    title = f"{words}, batch of {batch} x {workload.length:,} tokens\n"
    return found, title, {"task": workload.task, "image_size": workload.image_size}


def _rank_asked(options: argparse.Namespace) -> tuple[tuple, dict]:
    """What the functions of `ranks` are asked: by place, and by name."""
    if options.task not in (None, "language_modelling") or options.image_size is not None:
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
    from .finding import find

    found = find(options)
    text = found.to_json() if options.json else str(found)
    if options.code and found.recipes and not options.json:
        text += f"\n\n{found.recipes[0].code}"
    return text, OK if found.recipes else NOTHING_FITS


def calibrate_command(options: argparse.Namespace) -> str:
    """What one step tells of the host: a small one that is measured, or one that was timed."""
    settings = dict(map(setting, options.settings))
    if options.step_seconds is None:
        given = options.model, options.gpu, options.task, options.length, options.image_size
        if any(given) or settings:
            raise ValueError("a run's model, card and settings go with its --step-seconds")
        from .calibration import calibrate

        found = calibrate()
    elif not options.model:
        raise ValueError("--step-seconds is of a run: name its --model and its settings")
    else:
        from helpers import workloads

        from .calibration import calibrate_by

        about = {"length": options.length, "image_size": options.image_size}
        workload = workloads.workload(options.model, options.task, **about)
        found = calibrate_by(workload, options.step_seconds, options.gpu or "here", **settings)
    return json.dumps(vars(found), indent=2) if options.json else str(found)


def report_command(options: argparse.Namespace) -> str:
    """How well the predictions met what other people measured."""
    from fake_cuda.files import is_installed

    from . import report

    drawn = "" if is_installed() else "\n\nDrawn in data/real_cards.png"  # which a wheel lacks
    return f"{report.on_real_cards(report.judged())}{drawn}"


def doctor_command(options: argparse.Namespace) -> tuple[str, int]:
    """Whether this installation can predict, and what a bug report needs."""
    from .doctor import examined

    text, good = examined()
    return text, OK if good else NOT_WELL


def parsed(given: list[str]) -> argparse.Namespace:
    """Options, and in `settings` what is no option: settings, or a script's arguments."""
    cut = given.index("--") if "--" in given else len(given)
    options, rest = parser().parse_known_args(given[:cut])
    run = {"predict": predict_command, "fit": fit_command, "calibrate": calibrate_command}
    run |= {"report": report_command, "doctor": doctor_command}
    options.run = run[options.command]
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
