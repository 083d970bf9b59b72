"""What is predicted for a question: of the whole model, and of twins with few layers."""

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from fake_cuda.depth import MORE, SHALLOW
from fake_cuda.ordered import workspace_told
from fake_cuda.versions import chosen
from helpers import hardware
from helpers.host import host_of
from helpers.prediction import Prediction, predict
from helpers.workload import Workload

from . import cache
from .facts import Facts
from .layers import DEEP, differ_by_number, take_layers
from .question import Question
from .techniques import Plan
from .workers import Workers


class Estimate(NamedTuple):
    """What the lines through twins say of the whole model."""

    need: float  # bytes, with margin and context
    seconds: float  # of a step
    again: float = 0.0  # seconds of the card to compute each layer once more; 0: nobody knows
    end: float = 0.0  # seconds of a step's end, the optimizer's and what follows


class Twin(NamedTuple):
    """What is asked of a twin: bytes at each phase's own peak, how much more the allocator holds
    than the tensors take, seconds of a step, of the card's work in forward passes, and of a step's
    end."""

    phases: dict[str, int]
    beyond: int
    seconds: float
    forward: float
    end: float

    @classmethod
    def of(cls, facts: Facts) -> "Twin":
        """As predicted."""
        beyond = facts.peak_reserved - facts.peak_allocated
        return cls(facts.phases, beyond, facts.step_seconds, facts.forward, facts.end)

    def moved(self, begin: "Twin", end: "Twin") -> "Twin":
        """As far from this one as one twin is from another one, but for what lies beyond tensors:
        that jumps, and adds up to nothing."""
        phases = {
            name: size + end.phases[name] - begin.phases[name] for name, size in self.phases.items()
        }
        seconds = self.seconds + end.seconds - begin.seconds
        last = self.end + end.end - begin.end
        return Twin(phases, self.beyond, seconds, self.forward, last)


def no_progress(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Predictions:
    """Predictions for a question; `say` is told of each, `keep` is whether they stay on disk.

    `host` is that of `predict`, and `workers` are who predicts; this process if None.
    """

    question: Question
    say: Callable[[str], None] = no_progress
    keep: bool = True
    host: float | str | None = None
    workers: Workers | None = None
    known: dict = field(default_factory=dict, init=False, repr=False)  # what was asked before
    locks: dict = field(default_factory=dict, init=False, repr=False)  # of each that is asked

    @contextmanager
    def side_by_side(self, processes: int) -> Iterator["Predictions"]:
        """The same, by so many processes at once."""
        if processes < 2:
            yield self
            return
        _ = self.question.alike  # its skeleton is built once, and copied
        with Workers(processes, self._answer) as workers:
            found = replace(self, workers=workers)
            _ = found._twins  # which threads would build side by side
            yield found

    def _answer(self, batch: int, plan: str, micro_batch: int, layers: tuple, length: int) -> Facts:
        """What a worker answers: a prediction for the question with another batch."""
        asked = self if batch == self.question.batch else self.with_batch(batch)
        return asked._predicted(Plan.named(plan), micro_batch, asked._workload(layers, length))

    def with_batch(self, batch: int) -> "Predictions":
        """The same for so many samples of a step."""
        found = replace(self, question=self.question.with_batch(batch))
        if "_twins" in vars(self):
            vars(found)["_twins"] = self._twins  # where `cached_property` keeps them
        return found

    def each(self, function: Callable, values: list) -> list:
        """What a function that predicts returns for each value, in their order."""
        if self.workers is None:
            return list(map(function, values))
        return self.workers.each(function, values)

    def predict(
        self, plan: Plan, micro_batch: int, *, layers: tuple = (), length: int = 0
    ) -> Facts:
        """One prediction, or what is kept of it.

        Args:
            plan: the combination.
            micro_batch: samples of a micro-batch.
            layers: the kind of each layer of a twin; the whole model if empty.
            length: tokens of a sample; those of the question if 0.
        """
        key = plan, micro_batch, layers, length
        with self.locks.setdefault(key, threading.Lock()):  # who asks for the same waits
            if key not in self.known:
                self.known[key] = self._kept(*key)
            return self.known[key]

    def _kept(self, plan: Plan, micro_batch: int, layers: tuple, length: int) -> Facts:
        """What is kept on disk, or is predicted."""
        asked, workload = self.question, self._workload(layers, length)

        def _make() -> Facts:
            depth = f", {len(layers)} layers" if layers else ""
            self.say(f"predicting {plan.name}, micro-batch {micro_batch}{depth}")
            if self.workers:
                return self.workers.ask(asked.batch, plan.name, micro_batch, layers, length)
            return self._predicted(plan, micro_batch, workload)

        if not self.keep:
            return _make()
        key = [workload.config.to_dict(), workload.task, workload.length, workload.image_size]
        key += [plan.name]
        key += [asked.settings(plan, micro_batch), cache.code()]
        key += [asked.card.name, asked.card.capability, asked.card.facts]
        key += [workspace_told(), chosen().workspace_is_kept]  # which the environment decides
        key += host_of(self.host, hardware.gpu(asked.card.name))
        return cache.kept(json.dumps(key, default=str), _make)

    def _workload(self, layers: tuple, length: int) -> Workload:
        """The question's, or a twin of it, or one of other samples."""
        whole = self.question.workload
        config = type(whole.config).from_dict(whole.config.to_dict())
        if layers:
            take_layers(config, layers)
        return replace(whole, config=config, length=length or whole.length)

    def _predicted(self, plan: Plan, micro_batch: int, workload: Workload) -> Facts:
        few = [self.question.changed(plan, one) for one in self._few(workload)]
        workload = self.question.changed(plan, workload)
        keywords = self.question.settings(plan, micro_batch)
        micro_batches = 1
        if plan.kind.adapters:
            # Their gradients are small. One micro-batch tells the others, in half of the time.
            micro_batches = self.question.batch // micro_batch
            if micro_batches > 1:
                keywords["gradient_accumulation_steps"] = 1
        card = self.question.card.name
        keywords |= {"optimizer": plan.optimizer, "host": self.host, "few": few}
        found = predict(workload, gpu=card, **keywords)
        return facts_of(found, micro_batches)

    def _few(self, workload: Workload) -> list[Workload]:
        """The same with few layers, for a deep model whose layers are alike."""
        config = workload.config.get_text_config()
        if getattr(config, "num_hidden_layers", 0) < DEEP or not self.question.alike:
            return []
        kind = (getattr(config, "layer_types", None) or ["any"])[0]
        few = [(kind,) * n for n in SHALLOW + MORE]
        if not all(map(self._can_be_cut, few)):
            return []
        return [self._workload(one, workload.length) for one in few]

    def _can_be_cut(self, layers: tuple) -> bool:
        """Whether the model's configuration can say such layers: some compute theirs."""
        try:
            self._workload(layers, 0)
        except (AttributeError, NotImplementedError):
            return False
        return True

    def estimate(self, plan: Plan, micro_batch: int, *, length: int = 0) -> Estimate:
        """Need and time at full depth, from twins."""
        found = self.each(lambda twin: self._twin(plan, micro_batch, twin, length), self._twins)
        # What the allocator takes beyond the tensors hardly grows with depth, but it jumps.
        beyond = max(twin.beyond for twin in found)
        size = max(
            self._at_full_depth(*(twin.phases[name] for twin in found)) for name in found[0].phases
        )
        seconds, end = (
            self._at_full_depth(*(getattr(twin, name) for twin in found))
            for name in ("seconds", "end")
        )
        first, *one_more = (twin.forward for twin in found)
        by_layer = zip(self._kinds.values(), one_more, strict=False)  # none of the model itself
        again = sum(count * (more - first) for count, more in by_layer)
        return Estimate(self.question.need(size + beyond), seconds, again, end)

    def _twin(self, plan: Plan, micro_batch: int, layers: tuple, length: int) -> Twin:
        """A twin, predicted; of a plan with another optimizer than AdamW that of AdamW, changed by
        what the optimizer changes where nothing is saved: that depends on the weights alone."""
        plainer = plan.kind.plainer
        if plainer is None or not layers:  # the model itself is shown as it is predicted here
            return Twin.of(self.predict(plan, micro_batch, layers=layers, length=length))
        begin, end = (
            Twin.of(self.predict(Plan(kind), 1, layers=layers)) for kind in (plainer, plan.kind)
        )
        return self._twin(Plan(plainer, plan.way), micro_batch, layers, length).moved(begin, end)

    @functools.cached_property
    def _kinds(self) -> dict[str, int]:
        """How many layers there are of each kind that the configuration names."""
        config = self.question.workload.config.get_text_config()
        types = getattr(config, "layer_types", None) or ["any"] * config.num_hidden_layers
        return dict(Counter(types))

    @functools.cached_property
    def _twins(self) -> list[tuple]:
        """The layers of twins: one of each kind, and then one more of each; or the model itself,
        where they were no cheaper or do not tell its weights: some layers differ by their number,
        as the first ones of DeepSeek-V3, which are no mixtures."""
        kinds = tuple(self._kinds)
        twins = [kinds, *((*kinds, kind) for kind in kinds)]
        if sum(self._kinds.values()) <= len(twins) or not self._can_be_cut(kinds):
            return [()]
        if differ_by_number(self.question.workload.config):
            return [()]
        try:
            weights = [self._workload(twin, 0).parameters() for twin in twins]
        except Exception:  # noqa: BLE001 - a model may ask more of its layers, in words of its own
            return [()]
        told = self._at_full_depth(*weights) == self.question.parameters
        return twins if told else [()]

    def _at_full_depth(self, first: float, *one_more: float) -> float:
        """From the values of the twin with a layer of each kind, and of those with one more."""
        layers = zip(self._kinds.values(), one_more, strict=False)  # none of the model itself
        return first + sum((count - 1) * (more - first) for count, more in layers)


def facts_of(prediction: Prediction, micro_batches: int = 1) -> Facts:
    """From a prediction whose single micro-batch stands for so many of a step."""
    bytes_ = prediction.timeline.copy()  # [events, categories]
    names = list(prediction.by_category)
    before = bytes_.sum(axis=1).max()
    if micro_batches > 1:  # the later ones find the gradients of the first
        gradients = prediction.peak_by_category["gradients"]
        bytes_[:, names.index("gradients")] = gradients
    total = bytes_.sum(axis=1)
    more = int(total.max() - before)
    sizes = {
        "peak_allocated": prediction.peak_allocated + more,
        "peak_reserved": prediction.peak_reserved + more,
        "by_category": dict(zip(names, bytes_[total.argmax()].tolist(), strict=True)),
        "phases": _peaks(total, prediction.phases),
        "note": prediction.note,
    }
    return Facts(**sizes, **_times(prediction, micro_batches))


def _peaks(total: np.ndarray, phases: list[tuple[int, str]]) -> dict[str, int]:
    """The largest of the bytes after each event, by the phase that the event belongs to."""
    starts = [0, *(event for event, _ in phases[1:]), len(total)]
    labels = np.repeat([name for _, name in phases], np.diff(starts))
    return pd.Series(total).groupby(labels).max().to_dict()


def _times(prediction: Prediction, micro_batches: int) -> dict:
    """The fields of time: all of a step but its end is repeated for each micro-batch."""
    time = prediction.time
    if not (time and time.step_seconds):
        return {}
    once = sum(time.phases.get(name, 0) for name in ("optimizer step", "between steps"))  # a share
    scale = micro_batches - (micro_batches - 1) * once
    return {
        "step_seconds": scale * time.step_seconds,
        "low": scale * time.low,
        "high": scale * time.high,
        "limited_by": time.limited_by,
        "forward": micro_batches * time.busy.get("forward", 0.0),
        "end": once * time.step_seconds,
    }
