"""A row's role is fixed before its error is seen, or the table of changes says when and why.

`first_roles.csv` holds the role with which each row of evidence was first committed. New rows are
appended there with their table; nothing in it is ever edited: a digest of it stands below.
"""

import hashlib
from pathlib import Path

import pandas as pd
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "data" / "measurements"
KEY = ["table", "set", "run", "quantity"]
FROZEN = 1969  # rows, and their digest: append rows, raise both, and say why in the commit
DIGEST = "606e4c0ae8fafe613bf77d5e774fadecf2079862a69e3e93196836e308da2153"


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(FOLDER / name, dtype=str, keep_default_na=False)


def rows_of_evidence() -> pd.DataFrame:
    """Every row that has a role today."""
    names = ("peaks", "speeds", "several_cards")
    tables = pd.concat([read(f"{name}.csv").assign(table=name) for name in names])
    return tables.fillna({"quantity": ""})[[*KEY, "role", "reason"]]


def digest(first: pd.DataFrame) -> str:
    lines = first.head(FROZEN).itertuples(index=False)
    return hashlib.sha256("\n".join("|".join(line) for line in lines).encode()).hexdigest()


def problems(today: pd.DataFrame, first: pd.DataFrame, changes: pd.DataFrame) -> list[str]:
    """What differs from the first roles and is not declared."""
    if digest(first) != DIGEST:
        return ["first_roles.csv was edited: its rows only ever grow"]
    found = []
    began = first.set_index(KEY)["role"].to_dict()
    declared = changes.set_index(KEY)
    for row in today.itertuples(index=False):
        key = tuple(row[:4])
        was = began.get(key)
        if was is None:
            found.append(f"{' / '.join(key)} is not in first_roles.csv")
        elif key in declared.index:
            change = declared.loc[key]
            if (change["was"], change["role"]) != (was, row.role) or not change["why"]:
                found.append(f"{' / '.join(key)} is {row.role}, declared is {change['role']}")
        elif was != row.role:
            found.append(f"{' / '.join(key)} was {was} and is {row.role}: role_changes.csv")
    gone = set(began) - set(map(tuple, today[KEY].itertuples(index=False)))
    return found + [f"{' / '.join(key)} has been taken away" for key in sorted(gone)]


@pytest.fixture(scope="module")
def tables() -> tuple[pd.DataFrame, ...]:
    return rows_of_evidence(), read("first_roles.csv"), read("role_changes.csv")


def test_each_role_is_the_first_or_its_change_is_declared(tables):
    assert problems(*tables) == []


def test_a_role_that_changed_to_judged_does_not_exist(tables):
    """What chose something never judges later; what was left out never comes back."""
    _, first, changes = tables
    assert not (changes["role"] == "judged").any() and changes["date"].str.match(r"2026-").all()
    assert len(first) >= FROZEN and not first.duplicated(KEY).any()


@pytest.mark.parametrize("table", ["peaks", "speeds"])
def test_a_role_changed_after_the_fact_is_seen(tables, table):
    today, first, changes = tables
    judged = today.index[(today["table"] == table) & (today["role"] == "judged")][0]
    planted = today.reset_index(drop=True)
    at = planted.index[(planted["table"] == table) & (planted["role"] == "judged")][0]
    planted.loc[at, "role"] = "excluded"
    assert judged >= 0 and len(problems(planted, first, changes)) == 1
    assert problems(today.drop(index=today.index[0]), first, changes)  # a row is taken away
    other = first.copy()
    other.loc[at, "role"] = "excluded"  # and the first role with it
    assert problems(planted, other, changes) == [
        "first_roles.csv was edited: its rows only ever grow"
    ]
