"""A reader's own texts: a table on this machine or on the hub, read and cut into samples."""

import glob
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
from transformers import AutoTokenizer

from .models import online
from .tiny import blocks, rows

FILES = dict(csv="csv", json="json", jsonl="json", parquet="parquet", txt="text")  # by suffix


def read_table(data: str, columns: list[str]) -> pd.DataFrame:
    """The columns of a reader's table.

    Args:
        data: a CSV, JSON, Parquet or text file, a folder of them, or the id of a data set on the
            hub.
        columns: "text" and, for a classifier, "label".

    Raises:
        FileNotFoundError: there is no such file.
        ConnectionError: the hub cannot be reached.
        ValueError: the table cannot be read, lacks a column, or has an empty cell.
    """
    source, files = _source(data)
    try:
        table = datasets.load_dataset(source, data_files=files, split="train").to_pandas()
    except Exception as error:  # each kind of file fails in its own way, the cause at the bottom
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = str(cause).partition("\n")[0] or type(cause).__name__
        raise ValueError(f"{data} cannot be read as a data set, is it whole? {why}") from error
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


def _source(data: str) -> tuple[str, str | None]:
    """What `load_dataset` is given for a file, a folder or a hub id: its source, and files."""
    path = Path(data).expanduser().resolve()
    kind = FILES.get(path.suffix[1:].lower())
    if path.is_file():
        return kind or "text", glob.escape(str(path))
    if path.exists():
        return str(path), None
    if kind or data.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{data} is neither a file nor a folder on this machine")
    if not online():
        raise ConnectionError(f"data set {data!r}: the hub cannot be reached, give local data")
    return data, None


def texts(
    classify: bool, length: int, table: pd.DataFrame, tokenizer, split: str
) -> datasets.Dataset:
    """A reader's own texts: padded to `length` with a mask, or joined and cut into blocks."""
    if classify:
        options = dict(truncation=True, padding="max_length", max_length=length)
        batch = tokenizer(list(table["text"]), **options)
        labels = table["label"].astype("category").cat.codes.to_numpy(np.int64)
        columns = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return rows(split, columns | {"labels": labels})
    end = [tokenizer.eos_token_id or 0]
    stream = np.concatenate([[*tokenizer(text)["input_ids"], *end] for text in table["text"]])
    return rows(split, {"input_ids": blocks(stream, length)})


def with_data(made, data: str):
    """A `Workload` of the same model on a reader's own texts, with its own tokenizer."""
    classify = made.task == "text_classification"
    table = read_table(data, ["text", "label"] if classify else ["text"])
    tokenizer = AutoTokenizer.from_pretrained(str(made.weights or made.name))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    made.config.pad_token_id = tokenizer.pad_token_id
    if classify:
        made.config.num_labels = table["label"].nunique()
    read = partial(texts, classify, made.length, table, tokenizer)
    return replace(made, data=read, masked=classify)
