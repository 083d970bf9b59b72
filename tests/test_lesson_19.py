"""What readers copy from lesson 19 keeps its promise: kernels that obey, experts in 4 bits."""

import copy
from itertools import product

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from evidence import equal_compute, expert_shares
from evidence.lessons import lesson_19_real
from helpers import load
from test_lessons_pasted import cells_of, trained

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
IDS = torch.randint(0, 257, (4, 64), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in IDS]


@pytest.fixture(scope="module")
def cells() -> dict:
    """The models of the lesson, the registered kernel, and the function that packs experts."""
    return cells_of("19", "KINDS, made, grouped_mm_in_16, experts_in_4_bits")


def loss_and_gradient(cells, kernel: str, autocast: bool, dtype=torch.float32):
    model = cells["made"](cells["KINDS"]["experts"]).to(dtype)
    model.set_experts_implementation(kernel)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_the_registered_kernel_obeys_autocast_as_eager_does(cells):
    loss, gradient = loss_and_gradient(cells, "grouped_mm_in_16", autocast=True)
    wanted_loss, wanted = loss_and_gradient(cells, "eager", autocast=True)
    disobeys = loss_and_gradient(cells, "grouped_mm", autocast=True)[0]
    assert gradient.dtype == torch.float32
    assert loss == pytest.approx(wanted_loss, rel=1e-6) and disobeys != pytest.approx(
        loss, rel=1e-6
    )
    assert (gradient - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_autocast_it_is_the_default_kernel(cells, dtype):
    loss, gradient = loss_and_gradient(cells, "grouped_mm_in_16", autocast=False, dtype=dtype)
    wanted_loss, wanted = loss_and_gradient(cells, "grouped_mm", autocast=False, dtype=dtype)
    assert loss == wanted_loss and torch.equal(gradient, wanted)


def packed(cells):
    model = cells["made"](cells["KINDS"]["experts"]).to(torch.bfloat16)
    return cells["experts_in_4_bits"](model)


def test_experts_in_4_bits_take_their_bytes(cells):
    whole = cells["made"](cells["KINDS"]["experts"]).to(torch.bfloat16)
    model = packed(cells)

    def size(model):
        return sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)

    assert size(model) == size(whole) / 4
    with torch.no_grad():
        apart = (model(IDS).logits - whole(IDS).logits).norm() / whole(IDS).logits.norm()
    assert apart < 0.2


def test_the_recipe_trains_and_its_adapter_loads_again(cells, tmp_path):
    """Experts in 4 bits, adapters on the attention, checkpointing; saved, and loaded anew."""
    lora = LoraConfig(r=4, target_modules=ATTENTION, task_type="CAUSAL_LM")
    model = get_peft_model(packed(cells), lora)
    before = copy.deepcopy({n: p for n, p in model.named_parameters() if ".experts." in n})
    settings = {"activation_checkpointing": True, "bf16": True, "max_steps": 3}
    trainer = trained(model, DATA, tmp_path, learning_rate=1e-2, **settings)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(packed(cells), tmp_path / "adapter")
    adapters = {n: p for n, p in again.named_parameters() if ".lora_" in n}
    assert adapters and all(
        torch.equal(p, adapters[n]) for n, p in model.named_parameters() if n in adapters
    )
    with torch.no_grad():  # Trainer's model answers under autocast, the other one without
        ours, theirs, bare = (m.eval()(IDS).logits.float() for m in (model, again, packed(cells)))
    assert (ours - theirs).norm() < 0.02 * ours.norm() < (ours - bare).norm()


def test_the_runs_of_equal_compute_are_whole_and_say_what_the_lesson_says():
    keys = ["rate", "compute", "seed", "order", "model"]
    runs = load("equal_compute").set_index(keys)["test_loss"]
    assert set(runs.index) == set(equal_compute.wanted()) and runs.notna().all()
    losses = runs.unstack().groupby(["compute", "rate", "seed", "order"]).first()
    gap = losses["experts"] - losses["same cost"]
    assert (losses["experts"] < losses["same size"]).all()

    def better(compute):  # the gap at the rate at which the mixture's mean is lower
        mean = losses.loc[compute, "experts"].groupby("rate").mean()
        return gap.loc[compute, mean.idxmin()]

    few = gap.loc[24].groupby("rate")
    assert (few.min() < 0).all() and (few.max() > 0).all()  # after few steps: no difference
    assert (better(100) > 0).all()
    assert (better(500) < 0).sum() == 5
    assert (better(2000) < 0).all()


def test_the_runs_of_expert_shares_are_whole_and_say_what_the_lesson_says():
    runs = load("expert_shares").set_index(["balance", "seed", "order"])["busiest"]
    assert set(runs.index) == set(product(expert_shares.WAYS, (0, 1, 2), (0, 1)))
    without, library, by_layer = (runs[way] for way in expert_shares.WAYS)
    assert (without > 3.9).all() and library.mean() < without.mean()
    assert (by_layer < without - 0.5).all() and not (library < without - 0.5).all()


def test_a_recorded_run_is_the_lessons():
    """One of each table done again: the lesson's functions, and the recorded number."""
    lesson = cells_of("19", "learn, even, shares, KINDS, HELD_OUT")
    model, loss = lesson["learn"](lesson["KINDS"]["experts"], lesson["even"])
    runs = load("equal_compute").query("compute == 24 and rate == 0.003 and seed == order == 0")
    wanted = runs.query("model == 'experts'")["test_loss"].item()
    assert loss == pytest.approx(wanted, rel=0.01)
    busiest = load("expert_shares").set_index(["balance", "seed", "order"])["busiest"]
    found = expert_shares.EXPERTS * lesson["shares"](model).max().item()
    assert found == pytest.approx(busiest["the library's", 0, 0], rel=0.1)


def test_a_line_through_twins_leads_to_the_whole_mixture():
    rows = load("predictions").query("set == 'mixtures'").set_index(["run", "variant"])
    model, recipe = lesson_19_real.IN_FULL
    low, high = lesson_19_real.DEPTHS
    two, six, whole = (
        rows.loc[(model, f"{recipe}: {layers} layers"), "peak_allocated"]
        for layers in (low, high, 48)
    )
    assert two + (48 - low) * (six - two) / (high - low) == pytest.approx(whole, rel=0.02)
