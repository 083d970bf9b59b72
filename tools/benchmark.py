"""Say what `train` costs over the `Trainer` it runs: pairs of the same training, in turns.

    python -m tools.benchmark [--pairs 7] [--steps 22]

Each pair is one `train(...)` and one bare `Trainer` run of the same arguments on the tiny language
model, in turns first. It prints the median ratio of the time of the timed steps and its spread, the
middle half of the ratios (interquartile range); a difference below it is 'not distinguishable'.

Writes: nothing
"""

import argparse
import statistics
import time

from tools.shared.environment import set_variables

set_variables()  # before torch is imported: steadier steps

from transformers import TrainerCallback  # noqa: E402

from helpers import free, language_modelling, train  # noqa: E402
from helpers.training import WARM_UP, _now  # noqa: E402


class Clock(TrainerCallback):
    """The two looks at the clock that `train` takes, and nothing else."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == WARM_UP:
            self.began = _now()

    def on_train_end(self, args, state, control, **_):
        self.seconds = _now() - self.began


def bare(workload, **arguments) -> float:
    """Seconds of the timed steps of a plain `Trainer` run."""
    free()
    trainer, clock = workload.trainer(**arguments), Clock()
    trainer.add_callback(clock)
    trainer.train()
    return clock.seconds


def measured(workload, **arguments) -> float:
    """Seconds of the timed steps of `train`."""
    return train(workload, **arguments).seconds


def verdict(ratios: list[float]) -> str:
    """The median, its spread, and whether one can be told from the other."""
    low, median, high = statistics.quantiles(ratios, n=4)
    spread = high - low
    text = f"median ratio {median:.4f} (train / bare Trainer), middle half {low:.4f} to {high:.4f}"
    if abs(median - 1) < spread:
        return (
            f"{text}: not distinguishable, {abs(median - 1):.2%} is below the spread {spread:.2%}"
        )
    return f"{text}: {median - 1:+.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="at least 5 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=22, help="of each run, warm-up included")
    options = parser.parse_args()
    if options.pairs < 5 or options.steps <= WARM_UP:
        parser.error(f"take 5 pairs or more, and more than {WARM_UP} steps")
    workload = language_modelling("tiny")
    arguments = {"max_steps": options.steps, "per_device_train_batch_size": 8}
    bare(workload, **arguments)  # builds the data and warms everything up
    ratios, began = [], time.perf_counter()
    for pair in range(options.pairs):
        # In turns, so that a machine growing slower favours neither.
        order = (measured, bare) if pair % 2 else (bare, measured)
        seconds = {run: run(workload, **arguments) for run in order}
        ratios.append(seconds[measured] / seconds[bare])
        print(
            f"pair {pair + 1}: train {seconds[measured]:.3f} s, bare {seconds[bare]:.3f} s, "
            f"ratio {ratios[-1]:.4f}",
            flush=True,
        )
    print(verdict(ratios))
    print(f"{options.pairs} pairs of {options.steps} steps, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
