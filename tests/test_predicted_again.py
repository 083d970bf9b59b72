"""Recorded predictions are those of today's code: some are made anew, the others are counted.

The sample is the same in every run until the tables change: 40 rows of memory and 40 times of
steps, drawn with a seed in turns from the sets, so that each set is touched whose runs are cheap.
A run is cheap if it is predicted in some three seconds on a quiet core: `CHEAP_PEAKS` and
`CHEAP_STEPS` name such runs of each set, as they were timed. The two halves are classes of their
own: two workers share them.
"""

import random
import re
from functools import cache

import pandas as pd
import pytest

from evidence import peaks, runs, steps, tables, traces
from evidence.runs import Job

SEED, SAMPLE = 26, 40
# Runs that are cheap to predict, as a pattern of their names; a set that is not named has none.
CHEAP_PEAKS = {
    "bert-large-3090": "second step",
    "compiled-csdiywithme": "attention.*",
    "course-csdiywithme": "small, forward.*",
    "course-damek": "(forward, length 128|attention.*)",
    "course-linyun-2": "forward, length 128",
    "course-luke396": "forward, length 128",
    "course-niuhuang": "forward.*",
    "course-sidsoc12": "forward, length 256",
    "course-wedsonlin": "inference, length 128",
    "liger": ".*",
    "litgpt": "gemma-2b lora",
    "litgpt-2023": "phi-1.5, batch 1",
    "llms-from-scratch": "baseline",
    "vit-l-2023": "bf16-true",
}
CHEAP_STEPS = {
    "attention-b200": ".*",
    "attention-h20": ".*",
    "bert-a100": "eager, (4 x 256|8 x 512)",
    "book-b200": ".*, forward",
    "build-nanogpt": "bf16",
    "compiled-enzoding": "attention.*",
    "decoder-a100": "(small|medium).*, forward",
    "decoder-b200": "small.*, forward",
    "decoder-h20": "small.*, (128|512) tokens",
    "lambda-a10": "bert-base fp16",
    "lambda-h100": "resnet50 amp",
    "llms-from-scratch": "fp32",
    "resnet-v100": "amp.*",
    "timm-3090": "resnet(18|50).*",
    "vit-l-2023": "bf16-true",
}


def drawn(table: pd.DataFrame, cheap: dict[str, str]) -> pd.DataFrame:
    """The sample of a table: in turns a row of each set, in an order that the seed gives."""
    rows = table.dropna(subset="predicted")
    known = [
        name in cheap and bool(re.fullmatch(cheap[name], run))
        for name, run in zip(rows["set"], rows["run"], strict=True)
    ]
    chance = random.Random(SEED)
    queues = [
        chance.sample(list(own.index), len(own)) for _, own in rows[known].groupby("set", sort=True)
    ]
    picked = [queue[k] for k in range(SAMPLE) for queue in queues if k < len(queue)]
    return rows.loc[picked[:SAMPLE]]


def sample(table, cheap: dict[str, str], names: list[str]) -> list:
    found = drawn(pd.read_csv(table), cheap)
    return [pytest.param(row, id=" / ".join(row[n] for n in names)) for _, row in found.iterrows()]


def same_libraries(row: pd.Series) -> None:
    if row["predicted_with"] != tables.libraries():
        pytest.skip(f"recorded with {row['predicted_with']}")


@cache
def amounts(module: str, name: str, run: str) -> dict[str, int]:
    return traces.of_source(Job("source", module, name, run, bytes_too=True)).amounts


class TestBytes:
    @pytest.mark.parametrize("row", sample(peaks.PREDICTED, CHEAP_PEAKS, peaks.KEY))
    def test_a_row_of_memory_is_predicted_anew_to_the_byte(self, row):
        same_libraries(row)
        found = amounts(runs.of_peaks()[row["set"]], row["set"], row["run"])
        assert found[row["quantity"]] == row["predicted"], "make evidence, and say what moved"


class TestSeconds:
    @pytest.mark.parametrize("row", sample(steps.PREDICTED, CHEAP_STEPS, steps.KEY))
    def test_a_step_is_timed_anew_to_the_recorded_digits(self, row):
        same_libraries(row)
        module = runs.of_steps()[row["set"]]
        job = Job("source", module, row["set"], row["run"], seconds_too=True)
        hosts = steps.Hosts(row["host"], row["host"], None)
        found = steps.facts(traces.of_source(job).step, hosts, row["run"])
        for name in ("predicted", "low", "high", "roofline", "fused"):
            assert round(found[name], steps.DIGITS[name]) == row[name], name
        assert found["limited_by"] == row["limited_by"], "make evidence, and say what moved"


def test_the_sample_has_its_size_and_touches_every_cheap_set():
    for table, cheap in ((peaks.PREDICTED, CHEAP_PEAKS), (steps.PREDICTED, CHEAP_STEPS)):
        found = drawn(pd.read_csv(table), cheap)
        assert len(found) == SAMPLE and found.index.is_unique and set(found["set"]) == set(cheap)
        assert found.equals(drawn(pd.read_csv(table), cheap))


def made_by_other_code() -> dict[str, tuple[int, int]]:
    """Of each table of measured runs how many rows other code predicted, and how many there are."""
    found = {}
    for table, homes in ((peaks.PREDICTED, runs.of_peaks()), (steps.PREDICTED, runs.of_steps())):
        rows = pd.read_csv(table).dropna(subset="predicted")
        today = rows["set"].map({name: runs.hash_of(home) for name, home in homes.items()})
        found[table.name] = int((rows["code_hash"] != today).sum()), len(rows)
    return found


def test_how_many_rows_other_code_predicted(record_property, capsys):
    """It is said and does not fail: the sample above tells whether they moved."""
    for name, (others, whole) in made_by_other_code().items():
        record_property(name, others)
        with capsys.disabled():
            print(f"\n{name}: other code predicted {others} of {whole} rows (make evidence)")
        assert 0 <= others <= whole
