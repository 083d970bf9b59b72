"""The host of a machine, found by one small step on its card, or by one that somebody timed."""

from dataclasses import dataclass

from fake_cuda.cost import Timed
from helpers import host, language_modelling, train
from helpers.hardware import device, gpu, this_gpu
from helpers.prediction import Prediction, predict
from helpers.workload import Workload

ONE = {"per_device_train_batch_size": 1}


@dataclass(frozen=True)
class Calibration:
    """What one step tells of the computer around a card.

    Args:
        host: its seconds for an operation.
        gpu: the card's name.
        workload: what the step trained.
        step_seconds: what it took.
        kept: whether later predictions for the machine's own card use it.
    """

    host: float
    gpu: str
    workload: str
    step_seconds: float
    kept: bool

    def __str__(self) -> str:
        lines = [
            f"{host.us(self.host)} of the host for an operation: with them a step of "
            f"{self.workload} takes {self.step_seconds:.3g} s on {self.gpu}.",
            f"--host {self.host:.3g} tells it to onegpu predict and fit, host={self.host:.3g} to "
            "predict.",
        ]
        if self.kept:
            lines.append("It is kept: predictions for this machine's own card use it from now on.")
        return "\n".join(lines)


def calibrate() -> Calibration:
    """Measure one small step on this machine's card, and keep what it tells of the host.

    The tiny model does nothing but wait for its host, on any card.

    Raises:
        ValueError: there is no card, its rates are not known, or the step does not tell.
    """
    if device().type != "cuda":
        raise ValueError(
            "no card is here whose step could be measured: give one that was timed elsewhere, by "
            "--gpu, --model, --step-seconds and the settings of its run"
        )
    tiny = language_modelling("tiny")
    timed = train(tiny, **ONE)
    return calibrate_by(tiny, timed.seconds / timed.steps, **ONE)


def calibrate_by(
    workload: Workload, step_seconds: float, name: str = "here", **settings
) -> Calibration:
    """What a timed step tells of its host; it is kept if the card is this machine's own.

    Args:
        workload: what the step trained.
        step_seconds: what an optimizer step took, with all its micro-batches.
        name: of the card, as `predict` knows it.
        settings: keywords of `TrainingArguments` of the run.

    Raises:
        ValueError: the step does not tell, or the card or a setting is unknown.
    """
    if not 0 < step_seconds < float("inf"):
        raise ValueError(f"--step-seconds is the time of a step, and {step_seconds:g} s are none")
    on_card = device().type == "cuda"
    if name == "cpu" or (name == "here" and not on_card):
        raise ValueError("a host waits for a card: name it, as in --gpu T4")
    found = predict(workload, gpu=name, host=Timed(step_seconds), **settings)
    if found.host is None:
        raise ValueError(found.time.note)
    own = on_card and (name == "here" or gpu(name).facts == this_gpu().facts)
    if own:
        host.keep(found.host)
    return _told(found, step_seconds, own)


def _told(found: Prediction, step_seconds: float, kept: bool) -> Calibration:
    return Calibration(found.host, found.device, found.workload, step_seconds, kept)
