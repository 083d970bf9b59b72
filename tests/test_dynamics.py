"""The recorded runs of lesson 20: whole, by the lesson's own code, on text that is held out."""

import ast
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

import notebook_rules as rules
from evidence import dynamics, dynamics_networks
from evidence.dynamics_plan import BAD, Group

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "20_training_dynamics.ipynb"
DECODER, MLP = dynamics.KINDS


def definitions(source: str) -> dict[str, str]:
    """Functions and classes by name, without what is only said about them."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.ClassDef):
                    part.returns = None
                    if ast.get_docstring(part):
                        part.body = part.body[1:]
                if isinstance(part, ast.arg):
                    part.annotation = None
            found[node.name] = ast.dump(node)
    return found


def test_the_lesson_runs_the_code_that_was_recorded():
    cells = {cell.id: cell.source for cell in rules.code(rules.read(LESSON))}
    lesson = definitions("\n".join(cells[name] for name in ("text", "decoder", "learn")))
    recorded = definitions(Path(dynamics_networks.__file__).read_text(encoding="utf-8"))
    lesson["windows"] = recorded["windows"] if "unfold" in cells["text"] else ""
    assert set(lesson) == {"windows", "Decoder", "next_byte", "learn"}
    assert lesson == {name: recorded[name] for name in lesson}


def test_the_rows_are_whole():
    """Each group has every copy once, and nothing else stands in the table."""
    rows = pd.read_csv(dynamics.ROWS)
    wanted = {group: dynamics.copies(group) for group in dynamics.groups()}
    for group in list(wanted):
        if group.experiment in ("habits", "crossed") and group.way == dynamics.HABIT:
            wanted[group._replace(way="mean of five")] = wanted[group]
    pairs = rows.assign(copy=list(zip(rows["seed"], rows["order"], strict=True)))
    assert pairs.groupby(list(Group._fields))["copy"].apply(list).to_dict() == wanted


def test_no_way_is_best_at_the_edge_of_its_rates():
    """Else a rate that was not tried might be better still; bad starts are tried at two rates."""
    rows = pd.read_csv(dynamics.ROWS).fillna({"loss": dynamics.LOST})
    rows = rows[(rows["experiment"] != "batches") & ~rows["way"].isin(BAD)]
    for key, tried in rows.groupby(["experiment", "network", "way"]):
        mean = tried.groupby("rate")["loss"].mean()
        assert mean.idxmin() not in (mean.index[0], mean.index[-1]), key


@pytest.mark.parametrize("network", dynamics.KINDS)
def test_crossed_copies_share_weights_or_an_order_and_nothing_else(network):
    group = Group("crossed", network, dynamics.HABIT, 2, 0.01)
    nets, orders = dynamics.drawn(group)
    assert dynamics.copies(group) == [(seed, order) for seed in range(4) for order in range(2)]
    assert orders == [0, 1] * 4
    first = [next(net.parameters()).flatten()[:4].tolist() for net in nets]
    assert first[::2] == first[1::2] and len({tuple(numbers) for numbers in first}) == 4
    alone, _ = dynamics.drawn(group._replace(experiment="habits"))
    assert next(alone[3].parameters()).flatten()[:4].tolist() == first[6]


def test_an_order_draws_the_same_data_for_all_weights():
    """Weights of zeros see the same gradients in one order, and others in the other."""
    group = Group("crossed", MLP, dynamics.HABIT, 4, 0.01)
    nets, orders = dynamics.drawn(group)
    for net in nets:
        net.load_state_dict(
            {name: 0.1 * torch.ones_like(w) for name, w in net.state_dict().items()}
        )
    run = dynamics_networks.learn(nets, orders, 0.01, dynamics.texts(MLP)[0], torch.optim.SGD, [4])
    norms = [round(norm, 4) for norm in next(run)[1].tolist()]
    assert norms == norms[:2] * 4 and norms[0] != norms[1]


def test_betas_that_go_with_the_batch_remember_as_many_samples():
    for times in (0.25, 1, 4):
        (group,) = dynamics_networks.scaled(times)([torch.zeros(1)], 0.01).param_groups
        remembered = [times / (1 - beta) for beta in group["betas"]]
        assert remembered == pytest.approx([10, 1000]) and group["weight_decay"] == 0
        assert group["eps"] == pytest.approx(1e-8 / times**0.5)


def test_rates_by_width_divide_that_of_matrices_alone():
    net = dynamics_networks.Decoder(width=64)
    named = {name: torch.stack([w, w]).detach() for name, w in net.named_parameters()}
    make = dynamics_networks.by_width(list(named), 2)
    whole, divided = make(list(named.values()), 0.01).param_groups
    assert (whole["lr"], divided["lr"]) == (0.01, 0.005)
    names = {id(w): name for name, w in named.items()}
    found = {names[id(w)] for w in divided["params"]}
    matrices = "self_attn.in_proj_weight self_attn.out_proj.weight linear1.weight linear2.weight"
    wanted = {f"layers.{i}.{name}" for i in (0, 1) for name in matrices.split()}
    assert found == wanted | {"head.weight"}
    assert len(whole["params"]) + len(divided["params"]) == len(named)


def test_what_is_judged_of_schedule_free_is_its_average():
    pytest.importorskip("schedulefree")
    made, w = [], torch.ones(3)
    optimizer = dynamics_networks.schedule_free(made, 2, [w], 0.1)
    for _ in range(5):
        w.grad = torch.ones(3)
        optimizer.step()
    trained = w.clone()
    made[0].eval()
    assert made == [optimizer] and (w > trained).all()  # the average lies behind


@pytest.mark.parametrize("network", dynamics.KINDS)
def test_what_is_judged_does_not_stand_in_the_training_text(network):
    train, held_out = dynamics.texts(network)
    size = dynamics.KINDS[network].reads + 1
    assert train.shape[1] == held_out.shape[1] == size
    stretches = {bytes(row.tolist()) for row in dynamics_networks.windows("train", 8000, 33, 1)}
    kept = dynamics.texts(DECODER)[1]
    assert not stretches & {bytes(row.tolist()) for row in kept} and len(kept) == 200
    assert bytes(held_out[0].tolist()) == bytes(kept[0][:size].tolist())


def test_a_group_that_stands_is_not_run_again(tmp_path, monkeypatch):
    three = [Group("habits", MLP, "WSD", 16, rate) for rate in (0.25, 0.5, 1.0)]
    asked = []

    def rows_of(group):
        asked.append(group)
        return pd.DataFrame([group] * 2).assign(seed=range(2), loss=1.0)

    monkeypatch.setattr(dynamics, "ROWS", tmp_path / "rows.csv")
    monkeypatch.setattr(dynamics, "rows_of", rows_of)
    monkeypatch.setattr(dynamics, "groups", lambda: iter(three[:2]))
    dynamics.main()
    monkeypatch.setattr(dynamics, "groups", lambda: iter(three))
    dynamics.main()
    assert asked == three and len(pd.read_csv(dynamics.ROWS)) == 6


@pytest.mark.parametrize("way", ["old body, gradual", "features", "crossed"])
def test_a_run_repeats_its_recorded_row(way, monkeypatch):
    """The same machine would give the same digits; another rounds otherwise."""
    rate = dynamics.KINDS[MLP].tuned[1] if way != "crossed" else 0.25
    group = Group("crossed", MLP, "WSD", dynamics.KINDS[MLP].batch, rate)
    if way != "crossed":
        group = next(g for g in dynamics.groups() if g.way == way and g.rate == rate)
    first = dynamics.copies(group)[:2]
    monkeypatch.setattr(dynamics, "copies", lambda group: first)
    again = dynamics.rows_of(group)["loss"]
    rows = pd.read_csv(dynamics.ROWS)
    rows = rows[(rows[list(Group._fields)] == list(group)).all(axis=1)]["loss"][:2]
    assert again.tolist() == pytest.approx(rows.tolist(), abs=0.1)


def test_weights_thaw_from_the_top():
    net = dynamics_networks.Bytes(out=4)
    alone, gradual = (dynamics.thawed(net, f"old body, {way}") for way in ("head alone", "gradual"))
    names = [name for name, _ in net.named_parameters()]
    assert [name for name in names if alone(dynamics.FEW, name)] == ["head.weight", "head.bias"]
    counts = [sum(gradual(t, name) for name in names) for t in range(0, dynamics.FEW, 5)]
    assert counts == sorted(counts) and counts[0] == 2 and counts[-1] == len(names)
    assert all(dynamics.thawed(net, "old body")(0, name) for name in names)


def test_as_many_samples_and_steps_whether_the_batch_grows_or_not():
    plain, grown = dynamics.sizes(dynamics.HABIT, 16), dynamics.sizes("growing batch", 16)
    assert len(plain) == len(grown) == dynamics.STEPS and sum(plain) == sum(grown)
    assert set(plain) == {16} and grown == sorted(grown)


def test_copies_are_clipped_one_by_one():
    torch.manual_seed(0)
    nets = [dynamics_networks.Bytes() for _ in range(2)]
    for parameter in nets[1].parameters():
        parameter.data.mul_(3)
    data = dynamics.texts(MLP)[0]
    moved = {}
    for clip in (math.inf, 0.01):
        run = dynamics_networks.learn(
            nets, [0, 1], 1.0, data, dynamics_networks.sgd, [8], clip=clip
        )
        weights, norms = next(run)
        start = [dict(net.named_parameters()) for net in nets]
        moved[clip] = [
            sum((weights[n][i] - w).square().sum().item() for n, w in start[i].items()) ** 0.5
            for i in range(2)
        ]
    assert moved[math.inf] == pytest.approx(norms.tolist(), rel=1e-3)
    assert moved[0.01] == pytest.approx([0.01, 0.01], rel=1e-3)
