"""Tables checked row by row, and what is wrong said in one sentence with its row and column.

A table is checked as text, an empty cell as "". `cell` describes a column, `table` a table.
"""

import datetime
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pandas as pd

try:
    import pandera.pandas as pandera
except ImportError as error:
    raise ImportError(
        "rows are checked with pandera: python -m pip install -c constraints.txt -e '.[test]'"
    ) from error

from helpers.hardware import cards


# ------------------------------------------------------------------------ what a cell may be
def number(text: str, above: float = float("-inf")) -> bool:
    try:
        return above < float(text) < float("inf")
    except ValueError:
        return False


def day(text: str) -> bool:
    try:
        return datetime.datetime.fromisoformat(text).year >= 2015
    except ValueError:
        return False


NUMBER = (number, "is no number")
POSITIVE = (partial(number, above=0), "is no positive number")
WHOLE = (str.isdigit, "is no whole number")
DAY = (day, "is no day such as 2026-11-23")


@cache
def known_cards() -> frozenset[str]:
    """The names in data/gpus.csv, read once."""
    return frozenset(cards())


CARD = (lambda text: text in known_cards(), "is no card of data/gpus.csv")
HASH = (re.compile("[0-9a-f]{12}").fullmatch, "is no hash of evidence/code.py")


def one_of(*words: str) -> tuple[Callable, str]:
    return words.__contains__, f"is none of {', '.join(words)}"


def cell(*kinds: tuple[Callable[[str], bool], str], empty: bool = False) -> pandera.Column:
    """A column of text.

    Args:
        kinds: what each cell must be, a function and the end of the sentence "x is 'y', which ...".
        empty: whether a cell may be empty.
    """
    checks = [] if empty else [pandera.Check(_filled, element_wise=True, error="is empty")]
    for right, sentence in kinds:
        known = partial(_empty_or, right)
        checks.append(pandera.Check(known, element_wise=True, error=sentence))
    return pandera.Column(str, checks)


def _filled(text: str) -> bool:
    return bool(text.strip())


def _empty_or(right: Callable[[str], bool], text: str) -> bool:
    return not text.strip() or bool(right(text))


FILLED, ANY = cell(), cell(empty=True)


def columns(kind, names: str) -> dict:
    """Several columns of one kind."""
    return dict.fromkeys(names.split(), kind)


def needs(column: str, when: Callable[[pd.DataFrame], pd.Series], why: str) -> pandera.Check:
    """A column that may not be empty in the rows of which `when` is true."""
    return fault(column, lambda rows: when(rows) & (rows[column].str.strip() == ""), why)


def fault(column: str, wrong: Callable[[pd.DataFrame], pd.Series], why: str) -> pandera.Check:
    """What is wrong with a column in the rows of which `wrong` is true, as a sentence's end."""
    return pandera.Check(lambda rows: ~wrong(rows), error=f"{column}: {why}")


def whole(right: Callable[[pd.DataFrame], bool], sentence: str) -> pandera.Check:
    """What must be true of a table as a whole; the sentence is told if it is not."""
    return pandera.Check(lambda rows: bool(right(rows)), error=f": {sentence}")


def table(columns: dict, unique: str = "", *checks: pandera.Check) -> pandera.DataFrameSchema:
    """A table of these columns and no others; `unique` names those that tell its rows apart."""
    options = {"unique": unique.split() or None, "report_duplicates": "exclude_first"}
    return pandera.DataFrameSchema(columns, list(checks), strict=True, **options)


# ---------------------------------------------------------------------------- what is wrong
def text(path: Path) -> pd.DataFrame:
    """A table as text, an empty cell as ""."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def problems(schema: pandera.DataFrameSchema, rows: pd.DataFrame, file: str) -> list[str]:
    """What is wrong with a table, one sentence each, in the order of its rows."""
    rows = rows.reset_index(drop=True)
    try:
        schema.validate(rows, lazy=True)
    except pandera.errors.SchemaErrors as error:
        return list(dict.fromkeys(_sentences(schema, error.failure_cases, rows, file)))
    return []


def checked(schema: pandera.DataFrameSchema, rows: pd.DataFrame, file: str) -> None:
    """ValueError with the first thing that is wrong with a table."""
    for sentence in problems(schema, rows, file):
        raise ValueError(sentence)


def _sentences(schema, cases: pd.DataFrame, rows: pd.DataFrame, file: str) -> Iterator[str]:
    for name in cases["failure_case"][cases["check"] == "column_in_dataframe"]:
        yield f"{file} lacks the column {name}: data/README.md describes the file"
    for name in cases["failure_case"][cases["check"] == "column_in_schema"]:
        yield f"{file} has a column {name}, of which nothing is known: evidence/schemas"
    if not set(schema.columns) <= set(rows):
        return  # what else is said follows from it
    for case in cases.sort_values("index", kind="stable").itertuples():
        if case.check.startswith("column_in"):
            continue
        column, _, why = case.check.partition(": ")
        row = f"{file}, row {0 if pd.isna(case.index) else int(case.index) + 2}"
        if case.schema_context == "Column" and case.check == "is empty":
            yield f"{row}: {case.column} is empty"
        elif case.schema_context == "Column":
            yield f"{row}: {case.column} is {case.failure_case!r}, which {case.check}"
        elif case.check == "multiple_fields_uniqueness":
            yield f"{row}: {', '.join(schema.unique)} stand there twice, and tell rows apart"
        elif column in rows:
            yield f"{row}: {column} is {_shown(rows[column][case.index])}{why}"
        else:  # of the table as a whole
            yield f"{file}: {why}"


def _shown(value: str) -> str:
    return f"{value!r}, " if value.strip() else "empty, "
