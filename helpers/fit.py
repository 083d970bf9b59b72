"""Which recipe fits this card? Combinations of the course's techniques, predicted and ordered.

    from helpers.fit import fit
    print(fit("qwen3-8b", "24GiB", length=4096))

Memory and time are linear in a model's depth and in the micro-batch. So each combination is first
predicted on *twins*, of one layer of each kind and with one layer more, and with the smallest and
the largest micro-batch; what fits by these lines is then predicted in full, and only full
predictions are shown.
"""

import copy
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

from . import hardware, workloads
from .hardware import GPU, data_file, gib, supports, versions
from .prediction import CONTEXT, Prediction, predict
from .runs import load
from .workloads import Workload

NEAR = 1.1  # predicted speeds that differ by less are no difference (tools/speeds.py)


# ------------------------------------------------- techniques: this code is predicted, and pasted
def part(head, hidden, targets):
    """The sum of the loss over some tokens; those labelled -100 count nothing."""
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


def chunked_loss(model, size=512):
    """The same loss without all logits at once: those of `size` tokens are computed twice."""
    whole = model.forward

    @functools.wraps(whole)  # Trainer reads here which columns the model takes
    def forward(input_ids=None, *, labels=None, num_items_in_batch=None, **others):
        if labels is None:  # the model answers
            return whole(input_ids, **others)
        hidden = model.base_model(input_ids, **others)[0][:, :-1].flatten(0, 1)
        targets, head = labels[:, 1:].flatten(), model.get_output_embeddings()
        total = 0.0
        for h, t in zip(hidden.split(size), targets.split(size), strict=True):
            total = total + checkpoint(part, head, h, t, use_reentrant=False)
        if num_items_in_batch is None:  # Trainer counts the labels of all micro-batches of a step
            num_items_in_batch = (targets != -100).sum()
        return {"loss": total / num_items_in_batch}

    model.forward = forward
    return model


def in_backward(model, args):
    """Adafactor for each parameter when its gradient is ready, which is then dropped."""
    if args.gradient_accumulation_steps > 1:
        raise ValueError("each micro-batch would be a step of its own: do not accumulate")
    schedule = torch.optim.SGD(model.parameters(), args.learning_rate)  # never sees a gradient
    options = {"lr": args.learning_rate, "scale_parameter": False, "relative_step": False}
    each = {p: transformers.Adafactor([p], **options) for p in model.parameters()}

    def update(p):
        each[p].param_groups[0]["lr"] = schedule.param_groups[0]["lr"]
        each[p].step()
        p.grad = None

    for p in each:
        p.register_post_accumulate_grad_hook(update)
    return schedule


def adapters(model):
    """LoRA beside every linear layer, as `data/recipe.txt` writes it."""
    from peft import LoraConfig, get_peft_model  # takes seconds, and prints

    task = PEFT["SequenceClassification" in type(model).__name__]
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)
    model = get_peft_model(model, lora)  # adapters are in float32
    for p in model.parameters():  # and so is a classifier's head, which learns too
        p.data = p.data.float() if p.requires_grad else p.data
    return model


def _linear(model) -> dict[str, torch.nn.Module]:
    """The layers that are one product, by name. GPT-2 writes its own transposed."""
    kinds = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    return {name: layer for name, layer in model.named_modules() if type(layer) in kinds}


def _head(model) -> str:
    """The name of the part that turns the last hidden states into answers; it stays whole."""
    return [*_linear(model)][-1].split(".")[0]  # it may be two layers


def _in_4_bits(model):
    import bitsandbytes as bnb

    head = _head(model)
    for name, old in _linear(model).items():
        if head in name:
            continue
        weights = old.state_dict()
        if not isinstance(old, torch.nn.Linear):
            weights["weight"] = weights["weight"].T.contiguous()
        outputs, inputs = weights["weight"].shape
        new = bnb.nn.LinearNF4(inputs, outputs, old.bias is not None, torch.bfloat16)
        new.load_state_dict(weights)
        new.bias = old.bias  # in its own type
        model.set_submodule(name, new.to("cpu"))
    return model


# ------------------------------------------------------------------------------ what is searched
def _name(*parts: str) -> str:
    return ", ".join(filter(None, parts))


KINDS = {  # what training changes, least change first, and the bytes that a weight takes at least
    "full": 16,
    "full, 8-bit AdamW": 10,
    "full, Adafactor": 8,
    "full, Adafactor in backward": 4,
    "full in bf16": 8,
    "full in bf16, 8-bit AdamW": 6,
    "full in bf16, Adafactor in backward": 2,
    "LoRA": 2,
    "QLoRA": 0.5,
}
SAVINGS = ("", "checkpointing", "checkpoints on the host")  # which leave the result as it is
WAYS = [_name(saving, chunks) for saving in SAVINGS for chunks in ("", "chunked loss")]
PRICES = {  # of words in a recipe's name, in quality or trouble
    "bf16": "weights in bf16: small updates are rounded away",
    "8-bit": "optimizer states of 8 bits",
    "Adafactor": "another optimizer, with a learning rate of its own",
    "backward": "gradients are not clipped, and checkpoints hold no optimizer states",
    "LoRA": "only adapters learn",
    "QLoRA": "the weights beside them are rounded to 4 bits",
    "chunked": "logits are computed twice, and the model returns none",
    "checkpoint": "each layer is computed twice",
    "host": "two journeys over the bus, and memory of the host",
}
SETTINGS = {  # keywords of TrainingArguments
    "8-bit": {"optim": "adamw_8bit"},
    "Adafactor": {"optim": "adafactor"},
    "backward": {"max_grad_norm": 0},
    "checkpoint": {"activation_checkpointing": True},
    "host": {"activation_checkpointing_kwargs": {"offload": True}},
}
CHANGES = {"chunked": chunked_loss, "QLoRA": _in_4_bits, "LoRA": adapters}  # to the model, in order
PEFT = ("CAUSAL_LM", "SEQ_CLS")  # the task's name there; of a classifier the second
COLLATORS = ("DataCollatorForSeq2Seq", "DataCollatorWithPadding")  # labels are padded with -100
# A head does more than a product where the configuration has one of these.
ODD = (
    "final_logit_softcapping logits_scaling logit_scale lm_head_multiplier output_router_logits"
).split()


@dataclass(frozen=True)
class Facts:
    """What is kept of a prediction; bytes and seconds, 0 where no time is predicted."""

    peak_allocated: int
    peak_reserved: int
    by_category: dict
    phases: dict  # each phase's own peak
    step_seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    limited_by: str = ""
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """One combination, predicted in full. `need` is what the card must hold."""

    kind: str  # one of `KINDS`
    name: str  # such as "LoRA, checkpointing"
    price: str  # what it costs in quality or trouble
    micro_batch: int
    accumulation: int
    facts: Facts
    need: int
    largest_micro_batch: int
    smallest_card: str | None
    tokens_per_second: float | None
    tokens_low: float | None
    tokens_high: float | None
    code: str = field(repr=False)


# ------------------------------------------------------------------------------------- the search
@dataclass(frozen=True)
class Search:
    """A model, its task and data, a card, and predictions of them that are kept on disk."""

    workload: Workload
    card: GPU  # its memory may be one that was asked for
    batch: int
    margin: float
    hub_id: str
    say: Callable[[str], None] = lambda text: None
    cache: bool = True

    @property
    def precision(self) -> str:
        return "bf16" if supports("bf16", self.card) else "fp16"

    def need(self, reserved: float, card: GPU | None = None) -> int:
        """With the margin for errors, and the context."""
        return int(reserved * (1 + self.margin)) + ((card or self.card).context or CONTEXT)

    @functools.cached_property
    def _skeleton(self) -> torch.nn.Module:
        """The model without its weights."""
        with torch.device("meta"):
            auto = workloads.MODELS[self.workload.task]
            return auto.from_config(copy.deepcopy(self.workload.config))

    def ways(self) -> list[str]:
        """Without chunks where logits are small, or where the head is more than a product."""
        config, model = self.workload.config, self._skeleton
        whole = self.workload.task == "text_classification"
        whole = whole or any(getattr(config, name, None) for name in ODD)
        whole = whole or model.get_output_embeddings() not in model.children()
        logits = 4 * self.workload.length * self.batch * config.vocab_size
        whole |= logits < self.card.memory / 50
        return [way for way in WAYS if not (whole and "chunked" in way)]

    def settings(self, name: str, micro: int) -> dict:
        """The keywords of TrainingArguments."""
        found = {"per_device_train_batch_size": micro}
        found["gradient_accumulation_steps"] = max(1, self.batch // micro)
        # Weights in bf16 need no autocast; in backward, fp16's gradients cannot be unscaled.
        if "bf16" not in name and not ("backward" in name and self.precision == "fp16"):
            found[self.precision] = True
        chosen = (keywords for word, keywords in SETTINGS.items() if word in name)
        return functools.reduce(dict.__or__, chosen, found)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which the model is loaded."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        return half if "bf16" in name or "LoRA" in name else torch.float32

    def changed(self, name: str, workload: Workload) -> Workload:
        """The workload with the model that a recipe of this name trains."""
        if self.dtype(name) != torch.float32:
            workload = workload.with_model(lambda model: model.to(torch.bfloat16))
        for word, change in CHANGES.items():
            workload = workload.with_model(change) if word in name else workload
        return workload

    def predict(self, name: str, micro: int, layers: tuple = (), length: int = 0) -> Facts:
        """One prediction, or what is kept of it; `layers`, the kind of each, ask for a twin."""
        config = type(self.workload.config).from_dict(self.workload.config.to_dict())
        if layers:
            config.num_hidden_layers = len(layers)
            if getattr(config, "layer_types", None):
                config.layer_types = list(layers)
        workload = replace(self.workload, config=config, length=length or self.workload.length)
        keywords = self.settings(name, micro)
        asked = [config.to_dict(), workload.task, workload.length, name, keywords, _code()]
        asked += [self.card.name, self.card.capability, self.card.facts]

        def make() -> Facts:
            depth = f", {len(layers)} layers" if layers else ""
            self.say(f"predicting {name}, micro-batch {micro}{depth}")
            changed = self.changed(name, workload)
            times = self.batch // micro if "LoRA" in name else 1
            # One micro-batch tells the others, which saves half of the time.
            once = {"gradient_accumulation_steps": 1} if times > 1 else {}
            optimizer = in_backward if "backward" in name else None
            options = keywords | once | {"optimizer": optimizer}
            return _facts(predict(changed, gpu=self.card.name, **options), times)

        return _kept(json.dumps(asked, default=str), make) if self.cache else make()

    def lines(self, name: str, micro: int, length: int = 0) -> tuple[float, float]:
        """Need in bytes and seconds of a step at full depth, from twins."""
        config = self.workload.config
        types = getattr(config, "layer_types", None) or ["any"] * config.num_hidden_layers
        kinds = tuple(dict.fromkeys(types))
        twins = [kinds, *((*kinds, kind) for kind in kinds)]
        twins = twins if len(types) > len(twins) else [()]  # no cheaper than the model itself
        found = [self.predict(name, micro, layers, length) for layers in twins]

        def at(first, *others):  # those with one layer more
            layers = zip(kinds, others, strict=False)
            return first + sum((types.count(kind) - 1) * (more - first) for kind, more in layers)

        # What the allocator takes beyond the tensors hardly grows with depth, but it jumps.
        beyond = max(twin.peak_reserved - twin.peak_allocated for twin in found)
        size = max(at(*(twin.phases[phase] for twin in found)) for phase in found[0].phases)
        return self.need(size + beyond), at(*(twin.step_seconds for twin in found))

    def candidates(self, kind: str) -> list[tuple]:
        """(seconds, way, micro-batch, bytes of one more sample) of what may fit, best first."""
        found, room, ways = [], self.card.memory, self.ways()
        if "bf16" in kind and self.precision != "bf16":
            return []
        small = self.batch if "backward" in kind else 1  # there nothing accumulates
        weights = self.need(KINDS[kind] * self.workload.parameters())
        if weights > room or self.lines(_name(kind, ways[-1]), small)[0] > room:
            return []
        for way in ways:
            if found and "host" in way:
                break  # that is slower than what fits
            low, slow = self.lines(_name(kind, way), small)
            if low > room:
                continue
            high, fast = low, slow
            if small < self.batch:
                high, fast = self.lines(_name(kind, way), self.batch)
            more = (high - low) / max(1, self.batch - small) or low
            # Seconds of a step: a part for the samples, and one for each micro-batch.
            each = (slow - fast) / max(1, self.batch - 1)
            for n in (n for n in range(small, self.batch + 1) if self.batch % n == 0):
                if low + more * (n - small) <= room:
                    found.append((fast + each * (self.batch / n - 1), way, n, more))
            if high <= room:
                break  # what follows saves memory alone
        close = 1.02 * min((c[0] for c in found), default=0)  # as good as the fastest
        # Of equals the one with the least trouble, then the one that needs least.
        return sorted(found, key=lambda c: (c[0] > close and c[0], WAYS.index(c[1]), c[2]))

    def recipe(self, kind: str, way: str, micro: int, more: float = 0) -> Recipe:
        """A combination predicted in full; `more` bytes for each further sample."""
        name, tokens = _name(kind, way), self.batch * self.workload.length
        facts = self.predict(name, micro)
        need = self.need(facts.peak_reserved)
        more = int((self.card.memory - need) // more) if more > 0 else 0
        able = (c for c in _cards() if supports(self.precision, c))
        fits = (c.name for c in able if self.need(facts.peak_reserved, c) <= c.memory)
        pace = [tokens / s if s else None for s in (facts.step_seconds, facts.high, facts.low)]
        price = "; ".join(text for word, text in PRICES.items() if word in name) or "nothing"
        answer = facts, need, micro + more, next(fits, None), *pace, self.code(name, micro)
        return Recipe(kind, name, price, micro, self.batch // micro, *answer)

    def longest(self, name: str) -> int:
        """The longest sample in tokens that fits with a micro-batch of one; 0 if none does."""
        search = replace(self, batch=1)
        most = getattr(self.workload.config, "max_position_embeddings", None) or 2**20
        near, far = min(512, most // 2), min(2048, most)
        (low, _), (high, _) = (search.lines(name, 1, n) for n in (near, far))
        slope = max(1.0, (high - low) / (far - near))
        length = int(min(most, near + (self.card.memory - low) / slope))
        while length > 0:
            length -= length % 64 if 64 < length < most else 0
            need = self.need(search.predict(name, 1, (), length).peak_reserved)
            if need <= self.card.memory:
                return length
            guess = 0.9 * length
            if length > near:  # the line through what was just seen
                guess = near + (self.card.memory - low) * (length - near) / max(1, need - low)
            length = int(min(length * 0.98, guess))
        return 0

    def code(self, name: str, micro: int) -> str:
        """A whole script for a recipe. It runs as it is, on samples that the reader replaces."""
        task, length = self.workload.task, self.workload.length
        keywords = self.settings(name, micro).items()
        lines = [row.partition("|") for row in data_file("recipe.txt").read_text().splitlines()]
        asked = f"{name} {task}"
        needed = ["transformers", "accelerate"] + ["peft"] * ("LoRA" in name)
        needed += ["bitsandbytes"] * ("QLoRA" in name or "8-bit" in name)
        return "\n".join(
            text for words, _, text in lines if all(word in asked for word in words.split("&"))
        ).format(
            auto=workloads.MODELS[task].__name__,
            model=json.dumps(self.hub_id),
            dtype=self.dtype(name),
            head=json.dumps(_head(self._skeleton)),
            peft=json.dumps(PEFT[task == "text_classification"]),
            pad=self.workload.config.pad_token_id,
            length=length,
            label=0 if task == "text_classification" else f"[2] * {length}",
            samples=2 * self.batch,
            settings="\n".join(f"    {k}={v!r},".replace("'", '"') for k, v in keywords),
            torch=versions()["torch"].partition("+")[0],
            needed=" ".join(f"{k}=={versions()[k]}" for k in needed),
            collator=COLLATORS[task == "text_classification"],
            **{f.__name__: "\n" + inspect.getsource(f) for f in (part, chunked_loss, in_backward)},
        )


def _facts(p: Prediction, times: int) -> Facts:
    """What is kept of a prediction, whose single micro-batch stands for so many of a step."""
    rows, names = p.timeline.copy(), list(p.by_category)
    before = rows.sum(axis=1).max()
    if times > 1:  # the later ones find the gradients of the first
        rows[:, names.index("gradients")] = p.peak_by_category["gradients"]
    total = rows.sum(axis=1)
    more = int(total.max() - before)
    split = dict(zip(names, rows[total.argmax()].tolist(), strict=True))
    starts = [0, *(at for at, _ in p.phases[1:]), len(total)]
    labels = np.repeat([name for _, name in p.phases], np.diff(starts))
    phases = pd.Series(total).groupby(labels).max().to_dict()
    sizes = p.peak_allocated + more, p.peak_reserved + more, split, phases
    if not (p.time and p.time.step_seconds):
        return Facts(*sizes, note=p.note)
    ends = sum(p.time.phases.get(name, 0) for name in ("optimizer step", "between steps"))
    scale = times - (times - 1) * ends
    pace = [scale * getattr(p.time, key) for key in ("step_seconds", "low", "high")]
    return Facts(*sizes, *pace, p.time.limited_by, p.note)


# ---------------------------------------------------------------------------------------- the cache
def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _code() -> str:
    """A hash of all that a prediction depends on beside what is asked: our code, the versions."""
    folders = (Path(__file__).resolve().parents[1] / name for name in ("helpers", "fake_cuda"))
    sources = [p.read_text("utf-8") for folder in folders for p in sorted(folder.glob("*.py"))]
    return _hash("".join(sources) + repr(versions()))


def _kept(asked: str, make: Callable[[], Facts]) -> Facts:
    """A prediction from the disk, where it is whole and the one that was asked, or else made."""
    path = data_file().parent / "build" / "predictions" / _hash(asked)
    with suppress(OSError, ValueError):
        check, text = path.read_text(encoding="utf-8").split("\n")
        if check == _hash(asked + text):
            return Facts(**json.loads(text))
    facts = make()
    with suppress(OSError):  # no right to write, no room
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(facts))
        path.write_text(f"{_hash(asked + text)}\n{text}", encoding="utf-8")
    return facts


# --------------------------------------------------------------------------------------- the answer
@dataclass
class Fit:
    """The recipes that fit, least change first, then the fastest; else the nearest miss."""

    search: Search = field(repr=False)
    recipes: list[Recipe]
    miss: Recipe | None = None
    longest: dict[str, int] = field(default_factory=dict)  # tokens, where it was asked for
    data: str = ""  # how long the samples of given data are, and what that means

    @property
    def timed(self) -> bool:
        """Whether the card's rates are known, so that steps have a time."""
        return any(r.tokens_per_second for r in self.recipes or [self.miss])

    def about(self, r: Recipe) -> list[str]:
        """What is said of a recipe, line by line."""
        said = {"micro-batch": f"{r.micro_batch} x {r.accumulation}", "needs": gib(r.need)}
        if r.tokens_per_second:
            pace = (r.tokens_per_second, r.tokens_low, r.tokens_high)
            pace = [f"{float(f'{n:.2g}'):,.0f}" for n in pace]
            said |= {"tokens/s": "{} ({} to {})".format(*pace), "limited by": r.facts.limited_by}
        said |= {
            **{name: gib(n) for name, n in r.facts.by_category.items()},
            "largest micro-batch": r.largest_micro_batch if self.recipes else "-",
            "smallest card": r.smallest_card or "none known",
        }
        if self.longest:
            said["longest sample"] = f"{self.longest.get(r.kind, 0):,}"
        said["price"] = r.price
        return [r.name, *(f"  {key:20} {value}" for key, value in said.items())]

    def __str__(self) -> str:
        s = self.search
        lines = [
            f"{s.workload.title}, effective batch {s.batch}, on {s.card.facts['asked']}: "
            f"{gib(s.card.memory)}, of which the recipes leave room for a context",
            f"and for {s.margin:.1%} more than predicted: 19 of 20 blind runs needed no more.",
        ]
        if not self.timed:
            lines += [
                f"The rates of a {s.card.name} are not in data/gpus.csv: no speeds, and the order "
                "of the recipes is that of change alone."
            ]
        if not self.recipes:
            lines += [f"Nothing fits. The nearest miss needs {gib(self.miss.need)}: {self.remedy}."]
        for recipe in self.recipes or [self.miss]:
            lines += ["", *self.about(recipe)]
        told = (self.data, *(r.facts.note for r in self.recipes if self.timed))
        notes = dict.fromkeys(filter(None, told))
        return "\n".join([*lines, *([""] if notes else []), *notes])

    @property
    def remedy(self) -> str:
        """What would make the nearest miss fit."""
        ways = [f"with samples of {n:,} tokens" for n in self.longest.values() if n]
        ways += [f"on {self.miss.smallest_card or 'none of the cards in data/gpus.csv'}"]
        return f"it would fit {' or '.join(ways)}"

    def to_json(self) -> str:
        """Every recipe with its numbers and its code."""
        s = self.search
        asked = {"model": s.workload.name, "length": s.workload.length, "batch": s.batch}
        asked |= {"gpu": s.card.facts["asked"], "memory": s.card.memory, "margin": s.margin}
        rows = [{"fits": bool(self.recipes)} | asdict(r) for r in self.recipes or [self.miss]]
        asked |= {"recipes": rows, "longest": self.longest, "data": self.data}
        return json.dumps(asked | {"versions": versions()}, indent=2)


def _cards() -> list[GPU]:
    return sorted(hardware.cards().values(), key=lambda c: c.memory)


def card(name: str) -> GPU:
    """A card of `data/gpus.csv`, or so much memory, such as "24GiB".

    Of memory alone the speed is that of the card nearest to it whose rates are known.
    """
    if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:G|GB|GiB)", str(name), re.IGNORECASE):
        memory = int(float(found[1]) * 2**30)
        known = (c for c in _cards() if c.facts["bf16_tflops"])
        near = min(known, key=lambda c: abs(c.memory - memory))
        asked = f"a card of {gib(memory)} as fast as the {near.name}"
        return replace(near, memory=memory, context=None, facts=near.facts | {"asked": asked})
    known = hardware.gpu(name)
    if not supports("fp16", known):
        raise ValueError(f"{known.name} has no hardware for 16 bits: the recipes rest on it")
    return replace(known, facts=known.facts | {"asked": known.name})


def margin() -> float:
    """By how much 19 of 20 runs needed no more than what was predicted before they were known.

    A share of the prediction, from `data/blind_peaks.csv`.
    """
    keys = ["set", "run", "quantity"]
    blind = load("blind_peaks").merge(load("real_cards")[[*keys, "measured"]], on=keys)
    return float((blind["measured"] / blind["predicted"]).quantile(0.95) - 1)


def _tokens(data: str, hub_id: str) -> list[int]:
    """How many tokens each text of a file or data set has."""
    texts = list(workloads._read(str(data), ["text"])["text"])
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(hub_id, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer of {hub_id} is here, so {data} has no length") from error
    return [len(ids) for ids in tokenizer(texts)["input_ids"]]


def fit(
    model: str,
    gpu: str = "T4",
    task: str | None = None,
    length: int | None = None,
    batch: int = 8,
    *,
    data: str | None = None,
    longest: bool = False,
    say: Callable[[str], None] = lambda text: None,
    cache: bool = True,
) -> Fit:
    """Recipes to train `model` on a card, predicted; see `Fit`.

    `gpu` is a card of `data/gpus.csv` or a size ("16GiB"), `batch` the samples of a step. `longest`
    also asks for the longest sample of each kind of recipe. `data`, a file or data set with texts,
    is read for their lengths. `say` is told what is being predicted. ValueError and OSError say
    what to change.
    """
    if type(batch) is not int or batch < 1:
        raise ValueError(f"a batch of {batch!r} is impossible: it is a whole number from 1 on")
    workload = workloads.workload(model, task, length=length)
    if packed := getattr(workload.config, "quantization_config", None):
        method = packed.get("quant_method", "few bits")
        raise ValueError(f"{model} is published in {method}: name a copy of it in 16 bits")
    local = data_file("configs", f"{model}.json")
    hub_id = json.loads(local.read_text())["_name_or_path"] if local.is_file() else str(model)
    sizes = _tokens(data, hub_id) if data else []
    search = Search(workload, card(gpu), batch, margin(), hub_id, say, cache)
    found: list[Recipe] = []
    for kind in KINDS:
        family = [r.facts.step_seconds for r in found if r.kind[:4] == kind[:4]]  # "full"
        for seconds, way, micro, more in search.candidates(kind)[:3]:
            if family and seconds * NEAR >= min(family):
                break  # more change, and no faster
            recipe = search.recipe(kind, way, micro, more)
            if recipe.need <= search.card.memory:
                found.append(recipe)
                break
    last = search.ways()[-1]
    best = found[0] if found else search.recipe("QLoRA", last, 1)
    asked = [r.kind for r in found] if longest else ["QLoRA"] * (not found)
    lengths, told = {kind: search.longest(_name(kind, last)) for kind in asked}, ""
    if sizes:
        beyond = sum(n > workload.length for n in sizes) / len(sizes)
        facts = search.predict(best.name, best.micro_batch, 0, max(sizes))
        told = f"{beyond:.1%} of {len(sizes):,} samples have more than {workload.length:,} tokens. "
        told += f"The longest, of {max(sizes):,}, needs {gib(search.need(facts.peak_reserved))} in "
        told += f"a micro-batch of {best.micro_batch} with {best.name}."
    return Fit(search, found, None if found else best, lengths, told)
