"""`data/calculators.csv` and `data/fits.csv`: recorded rows that lesson 17 reads."""

import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from accelerate.commands import estimate
from transformers import AutoConfig, AutoModel

from evidence import calculators, mem_tracker, web_calculators
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


def test_the_calculators_of_the_web_by_hand():
    """2 x 3 tokens, 5 layers of 8 with 4 heads and an MLP of 20, 100 parameters, 16 words."""
    shape = dict(batch=2, length=3, width=8, layers=5, heads=4, groups=2, inner=20, matrices=3)
    asked = dict(parameters=100, trained=60, vocabulary=16, bits=16, checkpointed=False) | shape
    mixed = web_calculators.Run(**asked)
    full = mixed._replace(bits=32, checkpointed=True)
    assert web_calculators.anatomy(mixed) == 1800 and web_calculators.anatomy(full) == 1600
    assert web_calculators.nairr(mixed) == 4000
    # vram.asmirnov.xyz, term by term: input, q, k, scores, v, output, mask, their dropout, dropout
    attention = 96 + 96 + 48 + 144 + 48 + 96 + 72 + 144 + 48
    layer = attention + (96 + 240 + 240 + 48) + 192
    assert web_calculators.smirnov(mixed) == 1800 + 5 * layer + 2 * 4 * 2 * 3 * 16
    # EleutherAI counts parameters itself: tables, positions, norms, attention, MLP
    counted = 2 * 16 * 8 + 8 * 3 + (8 * 8 * 5 + 16) + 2 * 1.5 * 5 * 64 + 3 * 5 * 8 * 2.5 * 8
    kept = 3 * 2 * 8 * 5 * (34 + 5 * 4 * 3 / 8)
    assert web_calculators.eleuther(mixed) == pytest.approx(18 * counted + kept)
    assert web_calculators.eleuther(full) == pytest.approx(20 * counted + 3 * 2 * 8 * 5 * 34)
    one_layer = 4 * 2 * 3 * 8 * (34 + 5 * 3 * 4 / 8)
    assert web_calculators.escobar(mixed) == 200 + 2 * 2 * 3 * 5 * 8 * 2 + one_layer + 12 * 60


def test_kitsune_is_asked_by_its_own_code():
    """The last resort of its formulas: they know no length, and take an embedding for nothing."""
    if not calculators.KITSUNE.is_dir():
        pytest.skip("torch-kitsune is not in build/kitsune")
    kept = max(2 * 10 * 4, 2 * 1024)  # samples x outputs, at least a KiB a sample
    assert case(bits=32).kitsune() == pytest.approx(1.15 * (16 * 100 + kept), abs=1)


def test_mem_tracker_finds_the_tensors_of_a_loop_and_refuses_frozen_weights():
    def loop(frozen=False, bf16=False):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 1))
        model[0].weight.requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            with torch.no_grad():
                model(torch.zeros(8, 64))
            for _ in range(2):  # passes of a step
                with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                    loss = model(torch.zeros(2048 if bf16 else 8, 64)).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    weights = 4 * 64 * 65  # bytes; and of gradients those of one pass beside those of all
    assert 3 * weights < mem_tracker.tracked(loop) < 3.3 * weights
    assert mem_tracker.tracked(loop, mem_tracker.MemTracker) == mem_tracker.tracked(loop)
    halves = 2048 * 64 * (4 + 2 * 2)  # texts, them in 16 bits, and what the first layer gives
    assert mem_tracker.tracked(lambda: loop(bf16=True)) == pytest.approx(halves, rel=0.15)
    with pytest.raises(RuntimeError, match=mem_tracker.FROZEN):
        mem_tracker.tracked(lambda: loop(frozen=True))


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
