"""`data/calculators.csv` and `data/fits.csv`: recorded rows that lesson 17 reads."""

import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from accelerate.commands import estimate
from transformers import AutoConfig, AutoModel

from evidence import calculators
from helpers.hardware import data_file


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(data_file(name))


def test_the_rows_are_judged_runs_as_they_were_measured():
    rows = read("calculators.csv")
    judged = read("real_cards.csv").query("role == 'judged'")
    judged = judged[judged["quantity"].isin(calculators.QUANTITIES)]
    both = rows.merge(judged, on=["set", "run"], suffixes=("", "_there"))
    assert len(rows) == len(both) >= 20
    assert (both["measured"] == both["measured_there"]).all()
    assert (both["predicted"] == both["predicted_there"]).all()
    assert set(rows["kind"]) == {"full", "LoRA"}


def case(**options) -> calculators.Case:
    with torch.device("meta"):
        model = torch.nn.Linear(10, 10, bias=False)
    shape = dict(batch=2, length=3, width=8, layers=5, heads=4, vocabulary=16)
    return calculators.Case(**{"model": model, "known": model} | shape | options)


def test_the_formula_by_hand():
    ends = 4 * 6 * 8 * (1 + 16 / 8)
    weights = 4 * 400  # weight, gradient and two averages, in 32 bits
    kept = case(scores=True).formula()
    assert kept == weights + 5 * 6 * 8 * (34 + 5 * 4 * 3 / 8) + ends  # as it is published
    assert case().formula() == weights + 5 * 6 * 8 * 34 + ends
    assert case(checkpointed=True).formula() == weights + 5 * 2 * 6 * 8 + ends
    assert case(bits=32).formula() == weights + 5 * 6 * 8 * 66 + ends
    assert case().sixteen_bytes() == 1600


@pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is optional, and not installed")
def test_deepspeed_says_the_same_by_its_function():
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as says

    assert case().deepspeed() == says(100, cpu_offload=False)[1]


def test_accelerate_says_the_same_by_its_command(tmp_path, monkeypatch):
    shutil.copy(data_file("configs", "llama-3.2-1b.json"), tmp_path / "config.json")
    known = SimpleNamespace(config={}, library_name="transformers")
    monkeypatch.setattr(estimate, "verify_on_hub", lambda *_: known)
    arguments = estimate.estimate_command_parser().parse_args([str(tmp_path)])
    says = {row[0]: max(row[3].values()) for row in estimate.gather_data(arguments)}
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    for bits in (16, 32):
        assert case(known=model, bits=bits).accelerate() == says[f"float{bits}"]


def test_recorded_fits():
    rows = read("fits.csv")
    assert ((rows["need"] <= rows["memory"]) == rows["fits"]).all()
    assert rows["remedy"].notna().eq(~rows["fits"]).all()
    assert not rows.duplicated(["model", "gpu", "recipe"]).any()
    for code in rows["code"]:
        compile(code, "recipe", "exec")
