"""What the lessons train: a model, its data and a collator, as one frozen value."""

import ast
import copy
import difflib
import glob
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from numbers import Integral
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from .hardware import GIB, data_file, describe, device, gib, suggest

PACKAGES = "asyncio email importlib logging multiprocessing unittest xml http".split()
MODELS = {
    "text_classification": transformers.AutoModelForSequenceClassification,
    "language_modelling": transformers.AutoModelForCausalLM,
}
LARGE = {  # name in data/configs, where the weights are, tokens in a sample
    "text_classification": ("bert-large-uncased", "google-bert/bert-large-uncased", 512),
    "language_modelling": ("tinyllama-1.1b", "TinyLlama/TinyLlama_v1.1", 2048),
}
OFFLINE = "random weights, because the hub cannot be reached: memory and speed are the same"
# Names of the guides' years that today's TrainingArguments no longer has, or is about to drop.
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
}
UNDERSTOOD = {  # TrainingArguments still takes these, until transformers 6
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
FILES = dict(csv="csv", json="json", jsonl="json", parquet="parquet", txt="text")  # by suffix
SAME_ON_CPU = {"fp16": "use bf16=True (the same bytes)", "tf32": "leave it out"}


@dataclass(frozen=True)
class Workload:
    """A seeded model and its data.

    `config` describes the model, `weights` is where pretrained ones come from (None: random),
    `data` returns the data set of a split, "train" or "test", in training order: samples are
    `input_ids` of `length` tokens and `labels` (a class, or the tokens themselves).
    """

    name: str
    task: str
    config: object
    length: int
    data: Callable[[str], datasets.Dataset]
    weights: str | Path | None = None
    note: str = ""
    learning_rate: float = 5e-5
    masked: bool = False  # samples carry an attention mask, because their lengths differ
    changes: tuple[Callable, ...] = ()
    seed: int = 0

    @property
    def title(self) -> str:
        return f"{self.name}, {self.length:,} tokens"

    @property
    def changed(self) -> tuple[str, ...]:
        return tuple(getattr(change, "__name__", "changed") for change in self.changes)

    def __str__(self) -> str:
        return self.title + (f" ({self.note})" if self.note else "")

    def with_model(self, change: Callable) -> "Workload":
        """The same workload with `change(model)` applied to each new model: peft, quantization."""
        return replace(self, changes=(*self.changes, change))

    def model(self, pretrained: bool = True) -> torch.nn.Module:
        """A new model in float32, in training mode; the same weights each time."""
        transformers.set_seed(self.seed)
        auto, config = MODELS[self.task], copy.deepcopy(self.config)
        if pretrained and self.weights is not None:
            # Since transformers 5 a checkpoint's own precision is kept unless told otherwise.
            options = {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True}
            try:
                model = auto.from_pretrained(self.weights, **options)
            except SafetensorError as error:
                ours = data_file("cache") in Path(self.weights).parents
                remedy = "delete that folder, it is made anew" if ours else "save or fetch it again"
                raise ValueError(f"{self.weights} holds damaged weights: {remedy}") from error
        else:
            model = auto.from_config(config, dtype=torch.float32)
        model.loss_type = model.loss_type or "ForCausalLM"  # which GPT-2's class name does not tell
        for change in self.changes:
            model = change(model)
            if not isinstance(model, torch.nn.Module):
                raise ValueError("a function given to with_model must return the model")
        return model.train()

    def parameters(self) -> int:
        """How many parameters the model has, before `with_model` changes it; nothing is built."""
        with torch.device("meta"):
            return MODELS[self.task].from_config(copy.deepcopy(self.config)).num_parameters()

    # Samples as one batch: tensors of [batch, length], and [batch] for class labels.
    collate = staticmethod(transformers.default_data_collator)

    def dataloader(self, n: int) -> torch.utils.data.DataLoader:
        """Batches of n samples in the order in which `train` sees them, for a loop of your own."""
        return torch.utils.data.DataLoader(
            self.data("train"), batch_size=n, collate_fn=self.collate, drop_last=True
        )

    def sample(self) -> dict[str, torch.Tensor]:
        """One token many times, padded at the end if samples have a mask: made without the data."""
        ids = torch.full((self.length,), 100)  # no special token of any tokenizer
        labels = ids if self.task == "language_modelling" else torch.zeros((), dtype=torch.long)
        sample = {"input_ids": ids, "labels": labels}
        mask = (torch.arange(self.length) < max(1, self.length - 1)).long()
        return sample | ({"attention_mask": mask} if self.masked else {})

    def trainer(
        self, optimizer: Callable | None = None, pretrained: bool = True, data=None, **arguments
    ) -> Trainer:
        """The `Trainer` that `train` runs and `predict` runs on fake tensors.

        `arguments` are those of `TrainingArguments`; `optimizer` is a function (model, args).
        """
        defaults = {
            "output_dir": str(Path(tempfile.gettempdir()) / "one-gpu-measured"),
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": 1,
            "dataloader_drop_last": True,
            "train_sampling_strategy": "sequential",
            "learning_rate": self.learning_rate,
            "use_cpu": device().type == "cpu",
            "dataloader_pin_memory": device().type != "cpu",
            "seed": self.seed,
        }
        args = TrainingArguments(**defaults | arguments)
        model = self.model(pretrained)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if self.task != "language_modelling":
            # These heads ignore the number of items that the Trainer hands them, so it would
            # multiply the gradient by the accumulation steps (transformers issue 47688, lesson 04).
            base.accepts_loss_kwargs = False
        trainer = Trainer(
            model,
            args,
            train_dataset=data if data is not None else self.data("train"),
            eval_dataset=None if data is not None else self.data("test"),
            data_collator=self.collate,
            compute_metrics=accuracy if self.task == "text_classification" else None,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if not args.use_cpu:  # Accelerate and transformers turn tf32 on for compiled code, for good
            torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
        if optimizer is not None:
            trainer.optimizer = optimizer(trainer.model, args)
            if trainer.optimizer is None:  # for the Trainer that would mean AdamW
                raise ValueError("a function given as optimizer must return the optimizer")
        return trainer


def accuracy(prediction) -> dict[str, float]:
    """Share of right answers, from the logits [samples, classes] of an evaluation."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def todays(settings: dict) -> tuple[dict, str]:
    """Settings by the names of today's transformers, and a note where they had older ones.

    Args:
        settings: keywords of `TrainingArguments`.

    Raises:
        ValueError: a setting is given by both of its names.
    """
    old = [name for name in UNDERSTOOD if name in settings]
    for name in old:
        if UNDERSTOOD[name] in settings:
            raise ValueError(f"{name!r} is the old name of {UNDERSTOOD[name]!r}: give one of them")
    note = "".join(
        f"{name} is called {UNDERSTOOD[name]} since transformers 5.23." for name in old[:1]
    )
    return {UNDERSTOOD.get(name, name): value for name, value in settings.items()}, note


def check_settings(settings: dict, optimizer: Callable | None, on_cpu: bool) -> None:
    """ValueError, with the remedy, for an unknown setting or one that a CPU would ignore."""
    known = {f.name: f.default for f in fields(TrainingArguments) if f.init}
    counts = ("per_device_train_batch_size", "gradient_accumulation_steps")
    optimizers = [name.value for name in OptimizerNames]
    if optimizer is not None and not callable(optimizer):
        raise ValueError(
            "optimizer takes a function (model, args) that returns an optimizer, not an "
            "optimizer: that one belongs to a model, and each run builds its own"
        )
    for name, value in settings.items():
        if name in RENAMED:
            raise ValueError(f"{name!r} is called {RENAMED[name]!r} in today's transformers")
        if name == "batch_size":
            raise ValueError("'batch_size' is called 'per_device_train_batch_size' by Trainer")
        if name not in known:
            raise ValueError(suggest(name, known, "keyword of TrainingArguments"))
        whole = isinstance(value, Integral) and not isinstance(value, bool)  # np.int64 is one too
        if name in counts and not (whole and value >= 1):
            raise ValueError(f"{name}={value!r} is impossible: it is a whole number from 1 on")
        if isinstance(value, str) and type(known[name]) in (int, float, bool):
            kind = "True or False" if type(known[name]) is bool else "a number"
            raise ValueError(f"{name}={value!r} is not {kind}")
        if name == "optim" and value not in optimizers:
            raise ValueError(suggest(value, optimizers, "optimizer"))
        if on_cpu and value and name in SAME_ON_CPU:
            raise ValueError(
                f"{name}=True does nothing on a CPU, it would train in fp32: {SAME_ON_CPU[name]}, "
                'or predict it for a card with gpu="T4"'
            )
    if on_cpu and (settings.get("activation_checkpointing_kwargs") or {}).get("offload"):
        raise ValueError("a CPU has nowhere to offload to: predict it for a card, or leave it out")


def text_classification(size: str = "auto", **options) -> Workload:
    """Classify texts.

    "tiny": which package of Python's standard library does this function come from (8 classes)?
    "large": the classic experiment, bert-large-uncased on 512 samples of 512 random tokens.
    "auto": one of the two, by this machine's memory. Otherwise a hub id, a local folder or a name
    in `data/configs`. Options: `length` in tokens; `seed`; `data`, a CSV, JSON or Parquet file, a
    folder of them or a hub id, with the columns `text` and `label`; `pretrained=True` trains the
    tiny model on first use and keeps its weights. ValueError and OSError say what to change.
    """
    return workload(size, "text_classification", **options)


def language_modelling(size: str = "auto", **options) -> Workload:
    """Predict the next token.

    "tiny": a byte-level Llama on the source of Python's standard library, without a tokenizer.
    "large": TinyLlama, 1.1 billion parameters, on 512 samples of 2,048 random tokens.
    The rest is as in `text_classification`; `data` needs only the column `text`.
    """
    return workload(size, "language_modelling", **options)


def usual_task(size: str) -> str:
    """The task of a model that is named without one: its head's, or else a classifier's."""
    heads = () if size in ("auto", "large", "tiny") else _config(size)[0].architectures or ()
    decoder = any(head.endswith(("ForCausalLM", "LMHeadModel")) for head in heads)
    return "language_modelling" if decoder else "text_classification"


def workload(size: str, task=None, data=None, length=None, pretrained=False, seed=0) -> Workload:
    """The workload of a task, or of a model's usual one; the rest as in `text_classification`."""
    task = task or usual_task(size)
    if task not in MODELS:
        raise ValueError(suggest(task, MODELS, "task"))
    classify, note = task == "text_classification", ""
    if size == "auto":
        # The lessons' largest classic step takes 11.5 GiB (batch 8, lesson 02), a context comes on
        # top; the decoder takes 16 bytes a parameter and its activations.
        here, need = describe(), 13 * GIB if classify else 24 * GIB
        size = "large" if here.device != "cpu" and here.free > need else "tiny"
        note = f"picked for {here.device} with {gib(here.free)} free"
    if size == "tiny" and data is not None:
        raise ValueError('"tiny" has data of its own: name another model to go with yours')
    if length is not None and length < 1:
        raise ValueError(f"a length of {length} tokens is impossible: it starts at 1")
    if pretrained and size != "tiny":
        raise ValueError('pretrained=True is for size "tiny"; other models bring their weights')
    if size == "tiny":
        length = length or 128
        name, rate = ("tiny BERT", 1e-3) if classify else ("tiny Llama", 3e-3)
        read = partial(_standard_library, classify, length)
        config = _tiny_config(classify, length)
        tiny = Workload(name, task, config, length, read, None, note, learning_rate=rate, seed=seed)
        return replace(tiny, weights=_pretrain(tiny)) if pretrained else tiny
    known, hub_id, usual = LARGE[task]
    config, weights, name = _config(known if size == "large" else size)
    if size == "large":
        weights = hub_id if _reachable(hub_id) else None
        note = "; ".join(filter(None, (note, OFFLINE if weights is None else "")))
    if type(config) not in MODELS[task]._model_mapping.keys():
        raise ValueError(f"{name} is not a model for {task.replace('_', ' ')}")
    if classify and config.pad_token_id is None:
        config.pad_token_id = 0  # decoders classify by the last token that is not padding
    config.use_cache = False  # keys and values are cached for generation only
    most = getattr(config, "max_position_embeddings", None) or length or usual
    length = length or min(usual, most)
    if length > most:
        raise ValueError(f"{name} reads {most} tokens at most")
    read = partial(_random_tokens, classify, length, config.vocab_size)
    if data is not None:
        table = _read(str(data), ["text", "label"] if classify else ["text"])
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(weights or name))
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        config.pad_token_id = tokenizer.pad_token_id
        read = partial(_texts, classify, length, table, tokenizer)
        if classify:
            config.num_labels = table["label"].nunique()
    masked = data is not None and classify
    return Workload(name, task, config, length, read, weights, note, masked=masked, seed=seed)


# ------------------------------------------------------------------------------------------ models
def _tiny_config(classify: bool, length: int):
    shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(max_position_embeddings=length, intermediate_size=512 if classify else 384)
    shape["use_cache"] = False
    if classify:
        return transformers.BertConfig(vocab_size=2000, num_labels=len(PACKAGES), **shape)
    return transformers.LlamaConfig(vocab_size=257, **shape)


def _config(name: str):
    """(config, where the weights are, display name) of a model named in one of three ways."""
    folder, local = Path(name).expanduser(), data_file("configs", f"{name}.json")
    if local.is_file():
        return AutoConfig.from_pretrained(local), None, name
    if (folder / "config.json").is_file():
        return AutoConfig.from_pretrained(folder), folder, folder.name
    if name.startswith((".", "/", "~")) or folder.exists():
        raise FileNotFoundError(f"{name} is not a model folder: it has no config.json")
    known = ["tiny", "large", "auto", *sorted(p.stem for p in data_file("configs").glob("*.json"))]
    if "/" not in name:
        _suggest_model(name, known)
    if not online():
        raise ConnectionError(
            f"{name!r} is not in data/configs and the hub cannot be reached: check the name and "
            f"the network, or choose tiny, large, auto or one of the {len(known) - 3} there"
        )
    return AutoConfig.from_pretrained(name), name, name


def _suggest_model(name: str, known: list[str]) -> None:
    """ValueError for a name that is nearly known, or whose family is."""

    def size(text: str) -> list[str]:
        return re.findall(r"\d+(?:\.\d+)?", text)

    near = difflib.get_close_matches(name.lower(), known, n=1)
    if near and size(near[0]) == size(name.lower()):
        raise ValueError(suggest(name, known, "size or model"))
    first = name.lower().split("-")[0]  # the family is what stands before the size
    letters = re.match(r"[a-z]*", first)[0]
    for family in (first, letters if len(letters) > 2 else first):  # "t5" is no "tinyllama"
        found = [other for other in known[3:] if other.startswith(family)]
        if family and found:
            there = json.loads(data_file("configs", f"{found[0]}.json").read_text("utf-8"))
            hub_id = there["_name_or_path"]
            raise ValueError(
                f"{name!r} is not in data/configs, where there are {', '.join(found)}: choose one "
                f"of these, or write the model's hub id, such as {hub_id}"
            )
    if near:
        raise ValueError(suggest(name, known, "size or model"))


@cache
def online() -> bool:
    """Whether the hub answers within three seconds; never asked when HF_HUB_OFFLINE is set."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=3)
        return True
    except Exception:  # whatever the HTTP library calls it, it means no network
        return False


def _reachable(hub_id: str) -> bool:
    cached = huggingface_hub.try_to_load_from_cache(hub_id, "model.safetensors")
    return isinstance(cached, str) or online()


def _pretrain(workload: Workload, steps: int = 400) -> Path:
    """The folder of the tiny model's weights, trained on first use.

    Its name says for which Python, because the data are that Python's own source.
    """
    python = sysconfig.get_python_version()
    folder = data_file("cache", f"{workload.task}-{workload.length}-py{python}")
    if (folder / "model.safetensors").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # another kernel may be training it
            if not (folder / "model.safetensors").is_file():
                print("training the tiny model, once: a minute or more", file=sys.stderr)
                trainer = workload.trainer(max_steps=steps, per_device_train_batch_size=16)
                trainer.train()
                with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
                    whole = Path(unfinished, "weights")  # readable by all, unlike the one around it
                    whole.mkdir()
                    trainer.model.save_pretrained(whole)
                    shutil.rmtree(folder, ignore_errors=True)  # one that lost its weights
                    os.rename(whole, folder)
    except (OSError, SafetensorError) as error:  # no right to write, no room
        raise OSError(
            "data/cache cannot be written, where the tiny model is kept once it is trained: make "
            f"it writable, make room, or copy the course to a folder of your own ({error})"
        ) from error
    return folder


# -------------------------------------------------------------------------------------------- data
def _rows(split: str, columns: dict, test: float | int = 0.1) -> datasets.Dataset:
    """Rows of `input_ids` [samples, length], and the ids as labels where there are no others.

    The last ones are for the test, the others for training.
    """
    columns = {"labels": columns["input_ids"]} | columns
    rows = datasets.Dataset.from_dict(columns).train_test_split(test, shuffle=False)
    return rows[split].with_format("torch")


def _blocks(stream: np.ndarray, length: int) -> np.ndarray:
    return stream[: len(stream) // length * length].reshape(-1, length)


def _random_tokens(classify: bool, length: int, vocabulary: int, split: str) -> datasets.Dataset:
    """512 samples of random tokens, as in the classic experiment, and 64 for a test."""
    random = np.random.default_rng(0)
    low, high = min(100, vocabulary // 2), min(30_000, vocabulary)
    columns = {"input_ids": random.integers(low, high, (576, length))}
    if classify:
        columns["labels"] = random.integers(0, 2, 576)
    return _rows(split, columns, test=64)


@cache
def _standard_library(classify: bool, length: int, split: str) -> datasets.Dataset:
    """Python's own source, in a fixed random order: functions or bytes."""
    columns = (_functions if classify else _bytes)(length)
    order = np.random.default_rng(0).permutation(len(columns["input_ids"]))
    return _rows(split, {name: values[order] for name, values in columns.items()})


@cache
def _functions(length: int) -> dict[str, np.ndarray]:
    """Functions of eight packages, cut or padded to `length` tokens; labels: the package."""
    labels, texts = [], []
    for label, package in enumerate(PACKAGES):
        for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
            if any(part.startswith("test") for part in path.parts[-3:]):
                continue
            for node in ast.walk(ast.parse("\n".join(lines))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    texts.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                    labels.append(label)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, 2000, special_tokens=["<pad>"], show_progress=False)
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=0)
    ids = np.array([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    return {"input_ids": ids, "labels": np.array(labels)}


@cache
def _bytes(length: int) -> dict[str, np.ndarray]:
    """The standard library's top-level modules as bytes, cut into blocks; 256 ends a file."""
    stream = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        stream += [np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64), [256]]
    return {"input_ids": _blocks(np.concatenate(stream), length)}


def _texts(classify: bool, length: int, table, tokenizer, split: str) -> datasets.Dataset:
    """A reader's own texts: padded to `length` with a mask, or joined and cut into blocks."""
    if classify:
        options = dict(truncation=True, padding="max_length", max_length=length)
        batch = tokenizer(list(table["text"]), **options)
        labels = table["label"].astype("category").cat.codes.to_numpy(np.int64)
        columns = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return _rows(split, columns | {"labels": labels})
    end = [tokenizer.eos_token_id or 0]
    stream = np.concatenate([[*tokenizer(text)["input_ids"], *end] for text in table["text"]])
    return _rows(split, {"input_ids": _blocks(stream, length)})


def _read(data: str, columns: list[str]):
    """A reader's own table: a local file, a folder of such files, or a data set on the hub."""
    path = Path(data).expanduser().resolve()
    kind, source, files = FILES.get(path.suffix[1:].lower()), data, None
    if path.is_file():
        source, files = kind or "text", glob.escape(str(path))
    elif path.exists():
        source = str(path)
    elif kind or data.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{data} is neither a file nor a folder on this machine")
    elif not online():
        raise ConnectionError(f"data set {data!r}: the hub cannot be reached, give local data")
    try:
        table = datasets.load_dataset(source, data_files=files, split="train").to_pandas()
    except Exception as error:  # each kind of file fails in its own way
        raise ValueError(f"{data} cannot be read as a data set: is it whole?") from error
    missing = [column for column in columns if column not in table]
    if missing:
        raise ValueError(f"{data} has the columns {list(table.columns)}, but no {missing[0]!r}")
    table = table[columns]
    if table.isna().any(axis=None):
        at = int(table.isna().any(axis=1).to_numpy().argmax()) + 1
        raise ValueError(f"{data} has an empty cell in row {at}: fill it or leave the row out")
    if "label" in columns and table["label"].nunique() < 2:
        raise ValueError(f"{data} has one class only: a classifier needs two labels or more")
    return table
