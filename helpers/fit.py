"""Which recipe fits this card? Combinations of the course's techniques, predicted and ordered.

    from helpers.fit import fit
    print(fit("qwen3-8b", "24GiB", length=4096))

Memory and time are linear in a model's depth and in the micro-batch. So each combination is first
predicted on *twins* of one and two blocks of layers, with the smallest and the largest micro-batch;
what fits by these lines is then predicted in full, and only full predictions are shown.
"""

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import hardware, workloads
from .hardware import GPU, data_file, gib, suggest, supports, versions
from .prediction import CONTEXT, predict
from .runs import load
from .workloads import Workload

NEAR = 1.1  # predicted speeds that differ by less are no difference (tools/speeds.py)


# ------------------------------------------------ techniques, as they are predicted and pasted
def part(hidden, weight, targets):
    """The loss of some tokens."""
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def chunked_loss(model, chunks=32):
    """The same loss without all logits at once: those of a chunk are computed twice."""

    def forward(input_ids, labels, attention_mask=None, num_items_in_batch=None):
        hidden = model.base_model(input_ids, attention_mask=attention_mask)[0][:, :-1].flatten(0, 1)
        targets, weight = labels[:, 1:].flatten(), model.get_output_embeddings().weight
        pieces = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
        total = sum(checkpoint(part, h, weight, t, use_reentrant=False) for h, t in pieces)
        count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count}

    model.forward = forward
    return model


class InBackward(torch.optim.Optimizer):
    """Updates each parameter when its gradient is ready, then drops the gradient."""

    def __init__(self, parameters, lr, clip=1.0):
        super().__init__(parameters, {"lr": lr})
        trained = [p for p in self.param_groups[0]["params"] if p.requires_grad]
        options = {"lr": lr, "scale_parameter": False, "relative_step": False}
        self.each = {p: transformers.Adafactor([p], **options) for p in trained}
        self.limit = clip / len(trained) ** 0.5
        for p in trained:
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p):
        """One parameter's step; it is clipped by its own share of the limit."""
        nn.utils.clip_grad_norm_([p], self.limit)
        self.each[p].param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.each[p].step()
        p.grad = None

    def step(self, closure=None):
        """All is done already."""


def in_backward(model, args):
    """The optimizer of a run whose updates happen inside backward."""
    return InBackward(model.parameters(), args.learning_rate)


# ------------------------------------------------------------------------------ what is searched
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


@dataclass(frozen=True)
class Kind:
    """What training changes, and so perhaps its result. `bytes` is what a weight takes at least."""

    name: str
    bytes: float
    price: str
    sixteen: bool = False  # weights in 16 bits
    optim: str = ""
    inside: bool = False  # the update happens inside backward
    adapters: bool = False
    four: bool = False  # frozen weights in 4 bits

    @property
    def family(self) -> str:
        """ "full", "LoRA" or "QLoRA"."""
        return re.split("[ ,]", self.name)[0]


ROUNDED = "weights in bf16: small updates are rounded away"
EIGHT = "optimizer states of 8 bits"
OWN_RATE = "another optimizer, with a learning rate of its own"
INSIDE = f"{OWN_RATE}; gradients clipped one by one; Trainer's checkpoints hold no states"
KINDS = (  # least change first
    Kind("full", 16, ""),
    Kind("full, 8-bit AdamW", 10, EIGHT, optim="adamw_8bit"),
    Kind("full, Adafactor", 8, OWN_RATE, optim="adafactor"),
    Kind("full, Adafactor in backward", 4, INSIDE, inside=True),
    Kind("full in bf16", 8, ROUNDED, sixteen=True),
    Kind("full in bf16, 8-bit AdamW", 6, f"{ROUNDED}; {EIGHT}", sixteen=True, optim="adamw_8bit"),
    Kind("full in bf16, Adafactor in backward", 2, f"{ROUNDED}; {INSIDE}", True, inside=True),
    Kind("LoRA", 2, "only adapters learn", True, adapters=True),
    Kind("QLoRA", 0.5, "only adapters learn, on rounded weights", True, adapters=True, four=True),
)
OFFLOADED = {"activation_checkpointing": True}
OFFLOADED |= {"activation_checkpointing_kwargs": {"offload": True}}
WAYS = {  # what leaves the result as it is: settings, and whether the loss comes in chunks
    "": ({}, False),
    "chunked loss": ({}, True),
    "checkpointing": ({"activation_checkpointing": True}, False),
    "checkpointing, chunked loss": ({"activation_checkpointing": True}, True),
    "checkpoints on the host": (OFFLOADED, False),
    "checkpoints on the host, chunked loss": (OFFLOADED, True),
}
TROUBLE = {
    "chunked": "logits are computed twice, and the model returns none",
    "checkpoint": "each layer is computed twice",
    "host": "two journeys over the bus, and memory of the host",
}


@dataclass(frozen=True)
class Facts:
    """What is kept of a prediction; bytes and seconds."""

    peak_allocated: int
    peak_reserved: int
    by_category: dict
    phases: dict  # each phase's own peak
    step_seconds: float | None = None
    low: float | None = None
    high: float | None = None
    limited_by: str = ""
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """One combination, predicted in full. `need` is what the card must hold."""

    kind: Kind
    way: str
    micro_batch: int
    accumulation: int
    facts: Facts
    need: int
    largest_micro_batch: int
    smallest_card: str | None
    tokens_per_second: float | None
    tokens_low: float | None
    tokens_high: float | None
    code: str = field(repr=False, default="")

    @property
    def name(self) -> str:
        """Such as "LoRA, checkpointing"."""
        return ", ".join(filter(None, (self.kind.name, self.way)))

    @property
    def price(self) -> str:
        """What it costs in quality or trouble."""
        trouble = [text for word, text in TROUBLE.items() if word in self.way]
        return "; ".join(filter(None, (self.kind.price, *trouble))) or "nothing"


def changes(kind: Kind, way: str, classify: bool) -> list[Callable]:
    """What is done to the model, in order."""

    def to_16_bits(model):
        return model.to(torch.bfloat16)

    def to_4_bits(model):
        import bitsandbytes as bnb

        linear = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
        for name, old in list(linear.items())[:-1]:  # the last one is the head
            shape = old.in_features, old.out_features, old.bias is not None
            new = bnb.nn.LinearNF4(*shape, compute_dtype=torch.bfloat16)
            new.load_state_dict(old.state_dict())
            model.set_submodule(name, new.to("cpu"))
        return model

    def to_adapters(model):
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(**LORA, **_task_type(classify)))

    switched = (kind.sixteen, kind.four, WAYS[way][1], kind.adapters)
    steps = zip(switched, (to_16_bits, to_4_bits, chunked_loss, to_adapters), strict=True)
    return [step for on, step in steps if on]


def _task_type(classify: bool) -> dict:
    return {"task_type": "SEQ_CLS"} if classify else {}


def settings(kind: Kind, way: str, micro: int, accumulation: int, precision: str) -> dict:
    """The keywords of TrainingArguments."""
    found = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    if kind.adapters or not kind.sixteen and not (kind.inside and precision == "fp16"):
        found[precision] = True  # the update inside backward cannot unscale fp16's gradients
    found |= {"optim": kind.optim} if kind.optim else {}
    return found | ({"max_grad_norm": 0} if kind.inside else {}) | WAYS[way][0]


# ------------------------------------------------------------------------------------- the question
@dataclass
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

    @property
    def classify(self) -> bool:
        return self.workload.task == "text_classification"

    @property
    def vocabulary(self) -> int:
        return getattr(self.workload.config, "vocab_size", None) or 0

    def need(self, reserved: float, card: GPU | None = None) -> int:
        """With the margin for errors, and the context."""
        context = (card or self.card).context
        return int(reserved * (1 + self.margin)) + (CONTEXT if context is None else context)

    def kinds(self) -> list[Kind]:
        """Without those whose weights alone fill the card, or that this card has no numbers for."""
        size = self.workload.parameters()
        can = [k for k in KINDS if k.adapters or not k.sixteen or self.precision == "bf16"]
        return [k for k in can if self.need(k.bytes * size) <= self.card.memory]

    def ways(self) -> list[str]:
        """Without chunks where logits are small, or where the head is more than a product."""
        config = self.workload.config
        odd = ("final_logit_softcapping", "logits_scaling", "logit_scale")
        small = 4 * self.workload.length * self.batch * self.vocabulary < self.card.memory / 50
        if not (self.classify or small or any(getattr(config, name, None) for name in odd)):
            return [way for way in WAYS if way != "checkpoints on the host"]
        return [way for way in WAYS if not WAYS[way][1]]

    def predict(self, kind: Kind, way: str, micro: int, layers: int = 0, length: int = 0) -> Facts:
        """One prediction, or what is kept of it; `layers` other than 0 asks for a twin."""
        times = max(1, self.batch // micro)
        keywords = settings(kind, way, micro, times, self.precision)
        if kind.adapters:  # one micro-batch tells the others, which saves half of the time
            keywords["gradient_accumulation_steps"] = 1
        config = self.workload.config
        if layers:
            config = type(config).from_dict(config.to_dict())
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
        workload = replace(self.workload, config=config, length=length or self.workload.length)
        asked = [
            config.to_dict(),
            workload.task,
            workload.length,
            asdict(kind),
            way,
            keywords,
            times,
        ]
        card = [self.card.name, self.card.capability, self.card.facts]
        key = hashlib.sha256(json.dumps([asked, card, _code()], default=str).encode()).hexdigest()
        if self.cache and (kept := _kept(key)):
            return kept
        depth = f", {layers} layers" if layers else ""
        self.say(f"predicting {kind.name}, {way or 'plain'}, micro-batch {micro}{depth}")
        for change in changes(kind, way, self.classify):
            workload = workload.with_model(change)
        optimizer = in_backward if kind.inside else None
        p = predict(workload, gpu=self.card.name, optimizer=optimizer, **keywords)
        total, time = p.timeline.sum(axis=1), p.time
        ends = [at for at, _ in p.phases[1:]] + [len(total)]
        phases: dict = {}
        for (at, name), end in zip(p.phases, ends, strict=True):
            phases[name] = max(phases.get(name, 0), int(total[max(at - 1, 0) : end].max()))
        facts = Facts(p.peak_allocated, p.peak_reserved, p.by_category, phases, note=p.note)
        once = kind.adapters and times > 1
        if once:  # later micro-batches find the gradients of the first
            more, found = p.peak_by_category["gradients"], p.by_category
            found = found | {"gradients": found["gradients"] + more}
            facts = replace(facts, by_category=found, peak_allocated=p.peak_allocated + more)
            facts = replace(facts, peak_reserved=p.peak_reserved + more)
        if time and time.step_seconds:
            update = sum(time.phases.get(name, 0) for name in ("optimizer step", "between steps"))
            scale = times - (times - 1) * update if once else 1
            known = {k: scale * getattr(time, k) for k in ("step_seconds", "low", "high")}
            facts = replace(facts, **known, limited_by=time.limited_by)
        if self.cache:
            _keep(key, facts)
        return facts

    def lines(self, kind: Kind, way: str, micro: int, length: int = 0) -> tuple[float, float]:
        """Need in bytes and seconds of a step at full depth, from two twins."""
        config = self.workload.config
        kinds, depth = getattr(config, "layer_types", None) or [0], config.num_hidden_layers
        periods = (
            n for n in range(1, len(kinds)) if kinds == (kinds[:n] * len(kinds))[: len(kinds)]
        )
        block = next(periods, 1)
        if depth <= 2 * block:
            facts = self.predict(kind, way, micro, 0, length)
            return self.need(facts.peak_reserved), facts.step_seconds or 0.0
        one, two = (self.predict(kind, way, micro, n * block, length) for n in (1, 2))

        def at(a, b):
            return a + (b - a) * (depth / block - 1)

        # What the allocator takes beyond the tensors hardly grows with depth, but it jumps.
        beyond = max(twin.peak_reserved - twin.peak_allocated for twin in (one, two))
        size = max(at(one.phases[name], two.phases[name]) for name in one.phases) + beyond
        seconds = at(one.step_seconds, two.step_seconds) if one.step_seconds else 0.0
        return self.need(max(size, kind.bytes * self.workload.parameters())), seconds

    def candidates(self, kind: Kind) -> list[tuple]:
        """(seconds, way, micro-batch, need, need of one more sample) of what seems to fit."""
        found, room, ways = [], self.card.memory, self.ways()
        small = self.batch if kind.inside else 1  # inside backward nothing accumulates
        sizes = [n for n in range(small, self.batch + 1) if self.batch % n == 0]
        if self.lines(kind, ways[-1], small)[0] > room:  # the smallest of all
            return []
        # Of each logit there are copies in 16 and in 32 bits, and gradients of both.
        logits = 12 * self.workload.length * small * self.vocabulary
        low = 0.0
        for way in ways:
            if way == "chunked loss" and low - logits > room or found and way == ways[-1]:
                continue  # cannot be enough, or is slower than what fits
            low, slow = self.lines(kind, way, small)
            if low > room:
                continue
            high, fast = (low, slow) if small == self.batch else self.lines(kind, way, self.batch)
            more = (high - low) / max(1, self.batch - small) or low
            fitting = [n for n in sizes if low + more * (n - small) <= room]
            # Seconds of a step: a part for the samples, and one for each micro-batch.
            each = (slow - fast) / max(1, self.batch - 1)
            times = {n: fast + each * (self.batch / n - 1) for n in fitting}
            best = next(n for n in fitting if times[n] <= 1.02 * min(times.values()))
            found += [
                (times[n], way, n, low + more * (n - small), more) for n in fitting if n <= best
            ]
            if high <= room:
                break  # what follows saves memory alone
        fastest = min((c[0] for c in found), default=0)

        def order(candidate):  # the fastest, but of equals the one with the least trouble
            seconds, way, micro = candidate[:3]
            return (seconds > 1.02 * fastest and seconds, list(WAYS).index(way), -micro)

        return sorted(found, key=order)

    def recipe(self, kind: Kind, way: str, micro: int, more: float) -> Recipe:
        """A combination predicted in full."""
        facts = self.predict(kind, way, micro)
        need, seconds = self.need(facts.peak_reserved), facts.step_seconds
        tokens = self.batch * self.workload.length
        pace = [tokens / s if s else None for s in (seconds, facts.high, facts.low)]
        largest = micro + int((self.card.memory - need) // more) if more > 0 else micro
        cards = sorted(hardware._gpus(data_file("gpus.csv")).values(), key=lambda c: c.memory)
        fits = (
            c.name
            for c in cards
            if supports(self.precision, c) and self.need(facts.peak_reserved, c) <= c.memory
        )
        found = Recipe(
            kind, way, micro, self.batch // micro, facts, need, largest, next(fits, None), *pace
        )
        return replace(found, code=code(self, found))

    def longest(self, kind: Kind, way: str) -> int:
        """The longest sample in tokens that fits with a micro-batch of one; 0 if none does."""
        search = replace(self, batch=1)
        most = getattr(self.workload.config, "max_position_embeddings", None) or 2**20
        near, far = min(512, most // 2), min(2048, most)
        (low, _), (high, _) = (search.lines(kind, way, 1, n) for n in (near, far))
        slope = max(1.0, (high - low) / (far - near))
        length = int(min(most, near + (self.card.memory - low) / slope))
        while length > 0:
            length -= length % 64 if 64 < length < most else 0
            facts = search.predict(kind, way, 1, 0, length)
            over = self.need(facts.peak_reserved) - self.card.memory
            if over <= 0:
                return length
            length = int(min(length * 0.98, length - over / slope))
        return 0


# ---------------------------------------------------------------------------------------- the cache
@functools.cache
def _code() -> str:
    """A hash of all that a prediction depends on beside what is asked: our code, the versions."""
    root = Path(__file__).resolve().parents[1]
    sources = [
        p.read_bytes() for f in ("helpers", "fake_cuda") for p in sorted((root / f).glob("*.py"))
    ]
    return hashlib.sha256(b"".join(sources) + repr(versions()).encode()).hexdigest()


def _folders() -> list[Path]:
    return [
        data_file().parent / "build" / "predictions",
        Path.home() / ".cache" / "one-gpu-measured",
    ]


def _kept(key: str) -> Facts | None:
    """What was kept of a prediction; whatever else lies there is no one's."""
    for folder in _folders():
        try:
            found = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
            if found.pop("key") == key and set(found) == set(Facts.__dataclass_fields__):
                sizes = [
                    found["peak_allocated"],
                    found["peak_reserved"],
                    *found["by_category"].values(),
                ]
                if all(type(n) is int and n >= 0 for n in sizes) and type(found["phases"]) is dict:
                    return Facts(**found)
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            continue
    return None


def _keep(key: str, facts: Facts) -> None:
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f"{key}.{id(facts)}"
            unfinished.write_text(json.dumps({"key": key} | asdict(facts)), encoding="utf-8")
            unfinished.replace(folder / f"{key}.json")
            return
        except OSError:  # no right to write, no room: the next folder, or none
            continue


# ------------------------------------------------------------------------------------ code to paste
def code(search: Search, recipe: Recipe) -> str:
    """A whole script for a recipe. It runs as it is, on samples that the reader replaces."""
    kind, length, classify = recipe.kind, search.workload.length, search.classify
    auto = workloads.MODELS[search.workload.task].__name__
    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[search.precision]
    dtype = dtype if kind.sixteen else "torch.float32"
    names = [auto, "Trainer", "TrainingArguments", *["BitsAndBytesConfig"] * kind.four]
    imports, lines = ["import torch"], []
    if WAYS[recipe.way][1]:
        imports += [
            "import torch.nn.functional as F",
            "from torch.utils.checkpoint import checkpoint",
        ]
        lines += [inspect.getsource(part), "", inspect.getsource(chunked_loss), ""]
    if kind.inside:
        imports += ["import transformers", "from torch import nn"]
        lines += [inspect.getsource(InBackward), "", inspect.getsource(in_backward), ""]
    imports += ["from peft import LoraConfig, get_peft_model"] if kind.adapters else []
    imports += [f"from transformers import {', '.join(sorted(names))}"]
    imports.sort(key=lambda line: (line.startswith("from"), line))
    lines = [*imports, "", *([""] if lines else []), *lines]
    options = {"dtype": dtype}
    if kind.four:
        lines += [
            "quantization = BitsAndBytesConfig(",
            "    load_in_4bit=True,",
            '    bnb_4bit_quant_type="nf4",',
            f"    bnb_4bit_compute_dtype={dtype},",
            "    bnb_4bit_use_double_quant=True,",
            ")",
        ]
        options |= {"quantization_config": "quantization", "device_map": '"auto"'}
    lines += [f"MODEL = {_literal(search.hub_id)}", f"model = {auto}.from_pretrained("]
    lines += ["    MODEL,", *(f"    {key}={value}," for key, value in options.items()), ")"]
    lines += ["model.config.use_cache = False"]
    if classify and search.workload.config.pad_token_id in (None, 0):
        lines += ["model.config.pad_token_id = model.config.pad_token_id or 0"]
    if classify and recipe.accumulation > 1:
        lines += ["model.accepts_loss_kwargs = False  # else accumulated gradients are too large"]
    if WAYS[recipe.way][1]:
        lines += ["model = chunked_loss(model)"]
    if kind.adapters:
        options = (LORA | _task_type(classify)).items()
        given = ", ".join(f"{k}={_literal(v)}" for k, v in options)
        lines += [f"lora = LoraConfig({given})", "model = get_peft_model(model, lora)"]
    label = "0" if classify else f"[1] * {length}"
    lines += [f'sample = {{"input_ids": [1] * {length}, "labels": {label}}}']
    lines += [f"train_dataset = [sample] * {2 * search.batch}  # put your own samples here", ""]
    keywords: dict = {"output_dir": "trained", "num_train_epochs": 1}
    keywords |= settings(
        kind, recipe.way, recipe.micro_batch, recipe.accumulation, search.precision
    )
    lines += [
        "args = TrainingArguments(",
        *(f"    {k}={_literal(v)}," for k, v in keywords.items()),
        ")",
    ]
    lines += ["optimizers = in_backward(model, args), None"] if kind.inside else []
    optimizer = ", optimizers=optimizers" if kind.inside else ""
    lines += [f"trainer = Trainer(model, args, train_dataset=train_dataset{optimizer})"]
    return "\n".join([*lines, "trainer.train()", ""])


def _literal(value) -> str:
    return repr(value) if '"' in str(value) else repr(value).replace("'", '"')


# --------------------------------------------------------------------------------------- the answer
@dataclass
class Fit:
    """The recipes that fit, least change first, then the fastest; else the nearest miss."""

    search: Search = field(repr=False)
    recipes: list[Recipe]
    miss: Recipe | None = None
    longest: dict[str, int] = field(default_factory=dict)  # tokens, where it was asked for

    def table(self) -> pd.DataFrame:
        """One row a recipe, sizes and speeds as text."""
        rows = []
        for r in self.recipes or [self.miss]:
            row = {"recipe": r.name, "micro-batch": f"{r.micro_batch} x {r.accumulation}"}
            row |= {"needs": gib(r.need)}
            pace = "-"
            if r.tokens_per_second:
                low, mid, high = (
                    _round(n) for n in (r.tokens_low, r.tokens_per_second, r.tokens_high)
                )
                pace = f"{mid} ({low} to {high})"
            row |= {"tokens/s": pace, "limited by": r.facts.limited_by or "-"}
            row |= {name: gib(n) for name, n in r.facts.by_category.items()}
            row |= {"largest micro-batch": r.largest_micro_batch if self.recipes else "-"}
            row |= {"smallest card": r.smallest_card or "none known"}
            if self.longest:
                row["longest sample"] = f"{self.longest.get(r.kind.name, 0):,}"
            rows.append(row | {"price": r.price})
        return pd.DataFrame(rows).set_index("recipe")

    def __str__(self) -> str:
        s, table = self.search, self.table().T
        title = f"{s.workload.title}, effective batch {s.batch}, on {s.card.facts['asked']}"
        lines = [f"{title}: {gib(s.card.memory)}, of which the recipes leave room for a context"]
        lines += [
            f"and for an error of {s.margin:.1%}, the worst of our predictions that were judged."
        ]
        if not self.recipes:
            lines += [f"Nothing fits. The nearest miss needs {gib(self.miss.need)}: {self.remedy}."]
        for name in table:
            lines += ["", name, *(f"  {key:20} {value}" for key, value in table[name].items())]
        notes = dict.fromkeys(r.facts.note for r in self.recipes if r.facts.note)
        return "\n".join([*lines, *([""] if notes else []), *notes])

    @property
    def remedy(self) -> str:
        """What would make the nearest miss fit."""
        card = self.miss.smallest_card
        ways = [f"samples of {n:,} tokens" for n in self.longest.values() if n]
        ways += [f"a card such as the {card}" if card else "no card in data/gpus.csv holds it"]
        return "it would fit with " + " or ".join(ways) if ways[0][0] != "n" else ways[0]

    def to_json(self) -> str:
        """Every recipe with its numbers and its code."""
        rows = []
        for r in self.recipes or [self.miss]:
            row = asdict(r) | {"name": r.name, "price": r.price, "kind": r.kind.name}
            rows.append({"fits": bool(self.recipes)} | row)
        s = self.search
        asked = {"model": s.workload.name, "length": s.workload.length, "batch": s.batch}
        asked |= {"gpu": s.card.facts["asked"], "memory": s.card.memory, "margin": s.margin}
        answer = {"recipes": rows, "longest": self.longest, "versions": versions()}
        return json.dumps(asked | answer, indent=2)


def _round(n: float) -> str:
    return f"{float(f'{n:.2g}'):,.0f}" if n >= 10 else f"{n:.2g}"


def card(name: str) -> GPU:
    """A card of `data/gpus.csv`, this machine's ("here"), or so much memory, such as "24GiB".

    Of memory alone the speed is that of the card nearest to it whose rates are known.
    """
    if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:G|GB|GiB)", str(name), re.IGNORECASE):
        memory = int(float(found[1]) * 2**30)
        known = [
            c for c in hardware._gpus(data_file("gpus.csv")).values() if c.facts["bf16_tflops"]
        ]
        near = min(known, key=lambda c: abs(c.memory - memory))
        asked = f"a card of {gib(memory)} as fast as the {near.name}"
        return replace(near, memory=memory, context=None, facts=near.facts | {"asked": asked})
    if str(name).lower() in ("cpu", "here") and hardware.device().type != "cuda":
        raise ValueError("name the card to plan for, such as --gpu T4 or --gpu 24GiB")
    here = str(name).lower() == "here"
    known = hardware.this_gpu() if here else hardware.gpu(name)
    if not supports("fp16", known):
        raise ValueError(f"{known.name} has no hardware for 16 bits: the recipes rest on it")
    facts = known.facts | {"asked": known.name}
    return replace(known, name="here" if here else known.name, facts=facts)  # as `predict` asks it


def fit(
    model: str,
    gpu: str = "T4",
    task: str | None = None,
    length: int | None = None,
    batch: int = 8,
    *,
    longest: bool = False,
    say: Callable[[str], None] = lambda text: None,
    cache: bool = True,
) -> Fit:
    """Recipes to train `model` on a card, predicted; see `Fit`.

    `gpu` is a card of `data/gpus.csv` or a size ("16GiB"), `batch` the samples of a step. `longest`
    also asks for the longest sample of each kind of recipe. `say` is told what is being predicted.
    ValueError and OSError say what to change.
    """
    task = task or workloads.usual_task(model)
    if task not in workloads.MODELS:
        raise ValueError(suggest(task, workloads.MODELS, "task"))
    if type(batch) is not int or batch < 1:
        raise ValueError(f"a batch of {batch!r} is impossible: it is a whole number from 1 on")
    workload = getattr(workloads, task)(model, length=length)
    judged = load("real_cards").query("role == 'judged'")
    judged = judged[judged["quantity"].isin(("allocated", "reserved", "used"))]
    margin = float((judged["measured"] / judged["predicted"]).max() - 1)
    local = data_file("configs", f"{model}.json")
    hub_id = json.loads(local.read_text())["_name_or_path"] if local.is_file() else str(model)
    search = Search(workload, card(gpu), batch, margin, hub_id, say, cache)
    found: list[Recipe] = []
    for kind in search.kinds():
        family = [r for r in found if r.kind.family == kind.family]
        best = min((r.facts.step_seconds or 0 for r in family), default=None)
        for seconds, way, micro, _, more in search.candidates(kind)[:3]:
            if best is not None and seconds * NEAR >= best:
                break  # more change, and no faster
            recipe = search.recipe(kind, way, micro, more)
            if recipe.need <= search.card.memory:
                found.append(recipe)
                break
    miss, lengths = None, {}
    if not found:
        miss = search.recipe(KINDS[-1], search.ways()[-1], 1, 0)
    for kind in {r.kind for r in found} if longest else [KINDS[-1]] * (not found):
        lengths[kind.name] = search.longest(kind, search.ways()[-1])
    return Fit(search, found, miss, lengths)
