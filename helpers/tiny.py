"""Data and models that need no network: Python's own source, random tokens, two tiny models."""

import ast
import os
import shutil
import sys
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path

import datasets
import numpy as np
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from tokenizers import ByteLevelBPETokenizer

from .hardware import own_file

PACKAGES = "asyncio email importlib logging multiprocessing unittest xml http".split()
CACHE = "data/cache"  # of a clone; `own_file` knows where a wheel's user has it
KEPT = 8  # data sets in memory: a lesson uses two or three lengths, each with two splits


def tiny_config(classify: bool, length: int) -> transformers.PreTrainedConfig:
    """A BERT of two layers, or a Llama that reads bytes."""
    shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(max_position_embeddings=length, intermediate_size=512 if classify else 384)
    shape["use_cache"] = False
    if classify:
        return transformers.BertConfig(vocab_size=2000, num_labels=len(PACKAGES), **shape)
    return transformers.LlamaConfig(vocab_size=257, **shape)


def rows(split: str, columns: dict, test: float | int = 0.1) -> datasets.Dataset:
    """Samples as a dataset of tensors.

    Args:
        split: train, or test for the last ones.
        columns: `input_ids` [samples, length] and what else a sample has; the ids are the labels
            where there are no others.
        test: how many samples are for the test, or which share of them.

    Raises:
        KeyError: a split of another name.
    """
    columns = {"labels": columns["input_ids"]} | columns
    rows = datasets.Dataset.from_dict(columns).train_test_split(test, shuffle=False)
    return rows[split].with_format("torch")


def blocks(stream: np.ndarray, length: int) -> np.ndarray:
    """A stream of tokens cut into samples [n, length]; what is left over is dropped."""
    return stream[: len(stream) // length * length].reshape(-1, length)


def random_tokens(classify: bool, length: int, vocabulary: int, split: str) -> datasets.Dataset:
    """Random tokens [512, length], as in the classic experiment, and 64 samples for a test."""
    random = np.random.default_rng(0)
    low, high = min(100, vocabulary // 2), min(30_000, vocabulary)
    columns = {"input_ids": random.integers(low, high, (576, length))}
    if classify:
        columns["labels"] = random.integers(0, 2, 576)
    return rows(split, columns, test=64)


@lru_cache(maxsize=KEPT)
def standard_library(classify: bool, length: int, split: str) -> datasets.Dataset:
    """Python's own source, in a fixed random order: functions [n, length] or bytes [n, length]."""
    columns = (_functions if classify else _bytes)(length)
    order = np.random.default_rng(0).permutation(len(columns["input_ids"]))
    return rows(split, {name: values[order] for name, values in columns.items()})


@lru_cache(maxsize=KEPT)
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


@lru_cache(maxsize=KEPT)
def _bytes(length: int) -> dict[str, np.ndarray]:
    """The standard library's top-level modules as bytes, cut into blocks; 256 ends a file."""
    stream = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        stream += [np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64), [256]]
    return {"input_ids": blocks(np.concatenate(stream), length)}


def pretrain(workload, steps: int = 400) -> Path:
    """The folder of the tiny model's weights, trained on first use.

    Its name says for which Python, because the data are that Python's own source.

    Args:
        workload: a tiny `Workload`.
        steps: how many it is trained for, 16 samples each.

    Raises:
        OSError: the folder cannot be written.
    """
    python = sysconfig.get_python_version()
    name = f"{workload.task}-{workload.length}-py{python}"
    folder = own_file(name, folder=CACHE)
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
            f"{CACHE} cannot be written, where the tiny model is kept once it is trained: make "
            f"it writable, make room, or copy the course to a folder of your own ({error})"
        ) from error
    return folder
