"""What the lessons train: a model, its data and a collator, as one frozen value."""

import ast
import difflib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from huggingface_hub import constants as hub
from safetensors import SafetensorError
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from .hardware import GIB, data_file, describe, device, gib, suggest

PACKAGES = "asyncio email importlib logging multiprocessing unittest xml http".split()
MODELS = {
    "text_classification": AutoModelForSequenceClassification,
    "language_modelling": AutoModelForCausalLM,
}
LARGE = {  # name in data/configs, and where the weights are
    "text_classification": ("bert-large-uncased", "google-bert/bert-large-uncased"),
    "language_modelling": ("tinyllama-1.1b", "TinyLlama/TinyLlama_v1.1"),
}
TINY_LENGTH = 128
OPTIMIZER_INSTANCE = (
    "optimizer takes a function (model, args) that returns an optimizer, not an optimizer: "
    "that one belongs to a model, and each run builds its own"
)
OFFLINE = "random weights, because the hub cannot be reached: memory and speed are the same"
# Names of the guides' years that today's TrainingArguments no longer has.
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "group_by_length": "train_sampling_strategy",
    "warmup_ratio": "warmup_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "batch_size": "per_device_train_batch_size",
}


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

    def __str__(self) -> str:
        return f"{self.name}, {self.length} tokens" + (f" ({self.note})" if self.note else "")

    def with_model(self, change: Callable) -> "Workload":
        """The same workload with `change(model)` applied to each new model: peft, quantization."""
        return replace(self, changes=(*self.changes, change))

    def model(self, pretrained: bool = True) -> torch.nn.Module:
        """A new model in float32, in training mode; the same weights each time."""
        set_seed(self.seed)
        auto = MODELS[self.task]
        if pretrained and self.weights is not None:
            # Since transformers 5 a checkpoint's own precision is kept unless told otherwise.
            try:
                model = auto.from_pretrained(self.weights, config=self.config, dtype=torch.float32)
            except SafetensorError as error:
                raise ValueError(
                    f"the weights in {self.weights} are damaged: delete that folder and try again"
                ) from error
        else:
            model = auto.from_config(self.config, dtype=torch.float32)
        for change in self.changes:
            model = change(model)
        return model.train()

    def collate(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        """Samples as one batch: tensors of [batch, length], and [batch] for class labels."""
        return {k: torch.stack([s[k] for s in samples]) for k in samples[0]}

    def dataloader(self, n: int) -> torch.utils.data.DataLoader:
        """Batches of n samples in the order in which `train` sees them, for a loop of your own."""
        return torch.utils.data.DataLoader(
            self.data("train"), batch_size=n, collate_fn=self.collate, drop_last=True
        )

    def sample(self) -> dict[str, torch.Tensor]:
        """Zeros of the shape of one sample, made without the data."""
        ids = torch.zeros(self.length, dtype=torch.long)
        labels = ids if self.task == "language_modelling" else torch.zeros((), dtype=torch.long)
        sample = {"input_ids": ids, "labels": labels}
        return sample | ({"attention_mask": torch.ones_like(ids)} if self.masked else {})

    def trainer(
        self,
        optimizer: Callable | None = None,
        pretrained: bool = True,
        data=None,
        **arguments,
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
        trainer.remove_callback(PrinterCallback)
        if optimizer is not None:
            trainer.optimizer = optimizer(trainer.model, args)
        return trainer


def accuracy(prediction) -> dict[str, float]:
    """Share of right answers, from the logits [samples, classes] of an evaluation."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def check_settings(settings: dict, on_cpu: bool) -> None:
    """ValueError, with the remedy, for an unknown setting or one that a CPU would ignore."""
    known = [f.name for f in fields(TrainingArguments) if f.init]
    for name in settings:
        if name in RENAMED:
            raise ValueError(f"{name!r} is called {RENAMED[name]!r} in today's transformers")
        if name not in known:
            raise ValueError(suggest(name, known, "keyword of TrainingArguments"))
    for name, instead in {"fp16": "use bf16=True (the same bytes)", "tf32": "leave it out"}.items():
        if on_cpu and settings.get(name):
            raise ValueError(
                f"{name}=True does nothing on a CPU, it would train in fp32: {instead}, "
                'or predict it for a card with gpu="T4"'
            )


def text_classification(size: str = "auto", *, data=None, length: int | None = None, **options):
    """Classify texts. Returns a `Workload`.

    "tiny": which package of Python's standard library does this function come from (8 classes)?
    "large": the classic experiment, bert-large-uncased on 512 samples of 512 random tokens.
    "auto": one of the two, by this machine's memory. Otherwise a hub id, a local folder or a name
    in `data/configs`. `data` is a local CSV, JSON or Parquet file, or a hub id, with the columns
    `text` and `label`. `pretrained=True` trains the tiny model once and keeps its weights.
    """
    return _workload("text_classification", size, data, length, **options)


def language_modelling(size: str = "auto", *, data=None, length: int | None = None, **options):
    """Predict the next token. Returns a `Workload`.

    "tiny": a byte-level Llama on the source of Python's standard library, without a tokenizer.
    "large": TinyLlama, 1.1 billion parameters, on 512 samples of 2,048 random tokens.
    The rest is as in `text_classification`; `data` needs only the column `text`.
    """
    return _workload("language_modelling", size, data, length, **options)


def _workload(task: str, size: str, data, length, pretrained: bool = False, seed: int = 0):
    classify, note = task == "text_classification", ""
    if size == "auto":
        here = describe()
        # The classic run needs 7.5 GiB today, the 1.1B decoder 16 bytes a parameter and more.
        size = (
            "large"
            if here.device != "cpu" and here.free > (9 if classify else 24) * GIB
            else "tiny"
        )
        note = f"picked for {here.device} with {gib(here.free)} free"
    if pretrained and size != "tiny":
        raise ValueError(
            'pretrained=True is for size "tiny"; other sizes load weights by themselves'
        )
    if size == "tiny":
        workload = Workload(
            name=f"tiny {'BERT' if classify else 'Llama'}",
            task=task,
            config=_tiny_config(classify, length or TINY_LENGTH),
            length=length or TINY_LENGTH,
            data=partial(_functions if classify else _bytes, length or TINY_LENGTH),
            note=note,
            learning_rate=1e-3 if classify else 3e-3,
            seed=seed,
        )
        return replace(workload, weights=_pretrain(workload)) if pretrained else workload
    large, weights_there = LARGE[task]
    config, weights, name = _config(large if size == "large" else size)
    if size == "large":
        weights = weights_there if _reachable(weights_there) else None
        note = "; ".join(filter(None, (note, OFFLINE if weights is None else "")))
    config.use_cache = False  # a cache of keys and values is for generation
    length = length or (512 if classify else 2048)
    room = getattr(config, "max_position_embeddings", None) or length
    if length > room:
        raise ValueError(f"{name} reads {room:,} tokens at most: ask for a length up to that")
    if data is None:
        read = partial(_random_tokens, length, config.vocab_size, classify)
    else:
        table = _read(str(data), ["text", "label"] if classify else ["text"])
        read = partial(
            _texts,
            table if classify else table[["text"]],
            str(weights or name),
            length,
        )
        if classify:
            config.num_labels = table["label"].nunique()
    return Workload(
        name=name,
        task=task,
        config=config,
        length=length,
        data=read,
        weights=weights,
        note=note,
        masked=data is not None and classify,
        seed=seed,
    )


# ------------------------------------------------------------------------------------------ models
def _tiny_config(classify: bool, length: int):
    shape = dict(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512 if classify else 384,
        max_position_embeddings=length,
    )
    if classify:
        return BertConfig(vocab_size=2000, num_labels=len(PACKAGES), **shape)
    return LlamaConfig(vocab_size=257, use_cache=False, **shape)


def _config(name: str):
    """(config, where the weights are, display name) of a model named in one of three ways."""
    folder = Path(name).expanduser()
    local = data_file("configs", f"{name}.json")
    if local.is_file():
        config = AutoConfig.from_pretrained(local)
        return config, None, name
    if (folder / "config.json").is_file():
        return AutoConfig.from_pretrained(folder), folder, folder.name
    known = [
        "tiny",
        "large",
        "auto",
        *sorted(p.stem for p in data_file("configs").glob("*.json")),
    ]
    if name.startswith((".", "/", "~")) or folder.exists():
        raise FileNotFoundError(f"{name} is not a model folder: it has no config.json")
    if "/" not in name and difflib.get_close_matches(name.lower(), known, n=1):
        raise ValueError(suggest(name, known, "size or model"))
    if not online():
        raise ConnectionError(
            f"{name!r} is not in data/configs and the hub cannot be reached: "
            f"check the name and the network, or choose from {', '.join(known)}"
        )
    return AutoConfig.from_pretrained(name), name, name


@cache
def online() -> bool:
    """Whether the hub answers within three seconds; never asked when HF_HUB_OFFLINE is set."""
    if hub.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(hub.ENDPOINT, timeout=3)
        return True
    except Exception:  # whatever the HTTP library calls it, it means no network
        return False


def _reachable(hub_id: str) -> bool:
    cached = huggingface_hub.try_to_load_from_cache(hub_id, "model.safetensors")
    return isinstance(cached, str) or online()


def _pretrain(workload: Workload, steps: int = 400) -> Path:
    """The folder of the tiny model's weights, trained on first use."""
    python = sysconfig.get_python_version()
    folder = data_file("cache", f"{workload.task}-{workload.length}-py{python}")
    if not (folder / "model.safetensors").is_file():
        trainer = workload.trainer(max_steps=steps, per_device_train_batch_size=16)
        trainer.train()
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        trainer.model.save_pretrained(unfinished)
        try:
            os.rename(unfinished, folder)
        except OSError:  # another kernel was faster
            shutil.rmtree(unfinished)
    return folder


# -------------------------------------------------------------------------------------------- data
def _cached(name: str, build: Callable[[], pa.Table]) -> pa.Table:
    """A table from `data/cache/`, built on first use and renamed into place when it is whole."""
    path = data_file("cache", f"{name}-py{sysconfig.get_python_version()}.parquet")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        pq.write_table(build(), unfinished)
        os.replace(unfinished, path)
    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path} is damaged: delete it and run this again, Python's own source rebuilds it"
        ) from error


def _sources(packages: bool) -> Iterator[tuple[str, str]]:
    """(package, source text) of the standard library's files, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = PACKAGES if packages else ["."]
    for package in folders:
        for path in sorted((root / package).rglob("*.py") if packages else root.glob("*.py")):
            if not any(part.startswith("test") for part in path.relative_to(root).parts):
                yield package, path.read_text(encoding="utf-8", errors="ignore")


def _dataset(split: str, table: pa.Table) -> datasets.Dataset:
    """Every tenth row is for the test, the others for training."""
    tests = np.arange(len(table)) % 10 == 0
    rows = table.filter(pa.array(tests if split == "test" else ~tests))
    return datasets.Dataset(rows).with_format("torch")


def _table(ids: np.ndarray, labels: np.ndarray | None) -> pa.Table:
    """Rows in a fixed random order: ids [samples, length], labels [samples], or the ids again."""
    order = np.random.default_rng(0).permutation(len(ids))
    columns = {"input_ids": list(ids[order])}
    columns["labels"] = columns["input_ids"] if labels is None else labels[order]
    return pa.table(columns)


def _functions(length: int, split: str) -> datasets.Dataset:
    """Functions of eight packages, `length` tokens of each, padded; the label is the package."""

    def build() -> pa.Table:
        labels, texts = [], []
        for package, source in _sources(packages=True):
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                    if len(text) >= 80:
                        texts.append(text)
                        labels.append(PACKAGES.index(package))
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(texts, 2000, special_tokens=["<pad>"], show_progress=False)
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length, pad_id=0)
        ids = np.array([e.ids for e in tokenizer.encode_batch(texts)])
        return _table(ids, np.array(labels))

    return _dataset(split, _cached(f"functions-{length}", build))


def _bytes(length: int, split: str) -> datasets.Dataset:
    """The standard library's top-level modules as bytes, cut into blocks; 256 ends a file."""

    def build() -> pa.Table:
        files = [np.frombuffer(s.encode(), np.uint8) for _, s in _sources(packages=False)]
        stream = np.concatenate([x for f in files for x in (f.astype(np.int64), [256])])
        return _table(stream[: len(stream) // length * length].reshape(-1, length), None)

    return _dataset(split, _cached(f"bytes-{length}", build))


def _random_tokens(length: int, vocabulary: int, classify: bool, split: str) -> datasets.Dataset:
    """512 samples of random tokens, as in the classic experiment; for a test, 64 others."""
    random = np.random.default_rng(0 if split == "train" else 1)
    n = 512 if split == "train" else 64
    ids = random.integers(100, min(30_000, vocabulary), (n, length))
    table = _table(ids, random.integers(0, 2, n) if classify else None)
    return datasets.Dataset(table).with_format("torch")


def _texts(table: pd.DataFrame, model: str, length: int, split: str) -> datasets.Dataset:
    """A reader's own texts: padded to `length` with a mask, or joined and cut into blocks."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = list(table["text"])
    if "label" not in table:
        end = [tokenizer.eos_token_id or 0]
        stream = np.concatenate([[*tokenizer(t)["input_ids"], *end] for t in texts])
        return _dataset(
            split,
            _table(stream[: len(stream) // length * length].reshape(-1, length), None),
        )
    batch = tokenizer(texts, truncation=True, padding="max_length", max_length=length)
    labels = table["label"].astype("category").cat.codes.to_numpy(np.int64)
    columns = {k: batch[k] for k in ("input_ids", "attention_mask")}
    return _dataset(split, pa.table({**columns, "labels": labels}))


def _read(data: str, columns: list[str]) -> pd.DataFrame:
    """A reader's own table: a local CSV, JSON or Parquet file, or a data set on the hub."""
    path, kinds = (
        Path(data).expanduser(),
        {".csv": "csv", ".json": "json", ".jsonl": "json"},
    )
    kind = (kinds | {".parquet": "parquet"}).get(path.suffix)
    if path.is_file() and kind:
        table = datasets.load_dataset(kind, data_files=str(path), split="train").to_pandas()
    elif kind or data.startswith((".", "/", "~")) or path.exists():
        raise FileNotFoundError(f"{data} is not a CSV, JSON or Parquet file on this machine")
    elif not online():
        raise ConnectionError(f"data set {data!r}: the hub cannot be reached, give a local file")
    else:
        table = datasets.load_dataset(data, split="train").to_pandas()
    missing = [c for c in columns if c not in table]
    if missing:
        raise ValueError(f"{data} has the columns {list(table.columns)}, but no {missing[0]!r}")
    return table
