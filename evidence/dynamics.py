"""Two small networks learn Python's source under the habits of lesson 20: the recorded runs.

    nice python -m evidence.dynamics        appends to data/measurements/dynamics.csv

A seed draws the first weights, an order the data, the same ones under every habit: so habits are
compared in pairs. Eight copies have a seed and an order of their own; "crossed" ones are each of
four first weights in each of two orders. All copies of one rate train at once (`vmap`). A group of
them that stands in the table is not run again: stop and start as you like. About 35 minutes on one
CPU core. The networks and `learn` are in `dynamics_networks.py`, what is tried in
`dynamics_plan.py`.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import islice

import pandas as pd
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from tqdm import tqdm

from evidence.dynamics_networks import (
    by_width,
    judged,
    kind_of_sign,
    learn,
    scaled,
    schedule_free,
    windows,
)
from evidence.dynamics_plan import (
    FEW,
    FREE,
    HABIT,
    KINDS,
    MUP,
    OF_THE_NET,
    SCALED,
    STEPS,
    WAYS,
    Group,
    copies,
    groups,
)
from evidence.tables import MEASURED, today
from helpers import language_modelling
from helpers.hardware import versions

ROWS = MEASURED / "dynamics.csv"
LOST = 6.0  # beyond this loss a run diverged, and its row has none


def drawn(group: Group, **change) -> tuple[list[nn.Module], list[int]]:
    """A network for each copy, and the orders of their data."""
    make = KINDS[group.network].make
    nets = [torch.manual_seed(seed) and make(**change) for seed, _ in copies(group)]
    return nets, [order for _, order in copies(group)]


@cache
def texts(network: str) -> tuple[torch.Tensor, torch.Tensor]:
    """To train on, and held out: both networks are judged on the same 200 stretches of 33 bytes,
    none of which stands in the text for training."""
    kind = KINDS[network]
    blocks = torch.as_tensor(language_modelling("tiny").data("train")["input_ids"][:8000])
    seen = bytes(blocks.clamp(max=127).flatten().tolist())
    unseen = (w for w in windows("test", 200, 33, 33) if bytes(w.tolist()) not in seen)
    held_out = torch.stack(list(islice(unseen, 200)))
    size = kind.reads + 1
    train = windows("train", 8000, size, kind.stride)
    return train, held_out.unfold(1, size, kind.stride).reshape(-1, size)


def sizes(way: str, batch: int) -> list[int]:
    """The batch of each step: as many steps and samples, whether it grows or not."""
    thirds = [1, 3, 8] if way == "growing batch" else [4, 4, 4]
    return [third * batch // 4 for third in thirds for _ in range(STEPS // 3)]


def habit(group: Group) -> dict[str, torch.Tensor]:
    """Loss by way: a constant rate hands out the mean of its last five checkpoints, too."""
    kind, (train, held_out) = KINDS[group.network], texts(group.network)
    nets, orders = drawn(group, **OF_THE_NET[group.network].get(group.way, {}))
    batches, kept, long = sizes(group.way, group.batch), [], []
    made, options = [], WAYS.get(group.way, {})
    optimizer = partial(schedule_free, made, STEPS // 10) if group.way == FREE else kind.optimizer
    run = learn(nets, orders, group.rate, train, optimizer, batches, **options)
    for t, (weights, norms) in enumerate(run):
        long.append(norms > 1)
        if (len(batches) - 1 - t) % 10 == 0 and len(batches) - t < 50:
            kept.append({name: w.clone() for name, w in weights.items()})
    _ = [free.eval() for free in made]  # the weights become the average that it keeps of them
    facts = {"long": torch.stack(long).float().mean(0)}
    found = {group.way: {"loss": judged(nets[0], weights, held_out), **facts}}
    if group.way == HABIT:
        mean = {name: torch.stack([w[name] for w in kept]).mean(0) for name in weights}
        found["mean of five"] = {"loss": judged(nets[0], mean, held_out), **facts}
    return found


def batch(group: Group) -> dict:
    """Steps until the held-out loss is first below the goal, looked up at every sixteenth more."""
    kind, (train, held_out) = KINDS[group.network], texts(group.network)
    nets, orders = drawn(group)
    most, reached = kind.batches[group.batch][0], torch.full((len(nets),), math.nan)
    optimizer = scaled(group.batch / kind.middle) if group.way == SCALED else kind.optimizer
    run = learn(nets, orders, group.rate, train, optimizer, [group.batch] * most)
    for t, (weights, _) in enumerate(run, start=1):
        if t % max(1, t // 16) == 0:
            loss = judged(nets[0], weights, held_out[: len(held_out) // 4])
            reached[(loss < kind.goal) & reached.isnan()] = t
            if not reached.isnan().any():
                break
    return {group.way: {"loss": loss, "steps_to_goal": reached}}


def wide(group: Group) -> dict:
    """The loss of wider layers, at one rate for all weights, or at muP's."""
    kind, (train, held_out) = KINDS[group.network], texts(group.network)
    width = int(group.way.split()[0])
    nets, orders = drawn(group, width=width)
    names = [name for name, _ in nets[0].named_parameters()]
    times = width / min(kind.widths)
    optimizer = by_width(names, times) if group.way.endswith(MUP) else kind.optimizer
    *_, (weights, _) = learn(nets, orders, group.rate, train, optimizer, [group.batch] * STEPS)
    return {group.way: {"loss": judged(nets[0], weights, held_out)}}


@cache
def teacher(network: str) -> dict[str, torch.Tensor]:
    """The weights of a network that learned to guess bytes, without its head."""
    kind, (train, _) = KINDS[network], texts(network)
    torch.manual_seed(999)
    rate, batches = kind.rates[1], [kind.batch] * 3 * STEPS
    run = learn([kind.make()], [999], rate, train, kind.optimizer, batches, schedule="linear")
    *_, (weights, _) = run
    return {name: w[0].clone() for name, w in weights.items() if not name.startswith("head")}


def thawed(net, way: str) -> Callable:
    """Whether a weight trains at a step: the head alone, or ever more from the top."""
    names = [name for name, _ in net.named_parameters()]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    place = {name: len(modules) - modules.index(name.rpartition(".")[0]) for name in names}
    pace = {"old body, gradual": FEW / 2 / len(modules), "old body, head alone": math.inf}
    return lambda t, name: place[name] <= 1 + t / pace[way] if way in pace else True


def imitated(old: nn.Module, net, weights, rows):
    """The labelled stretch, and beside it one without labels whose features a trained body has."""
    middle = rows.shape[1] // 2
    with torch.no_grad():
        wanted = old(rows[:, middle:-1])
    bare = {name: w for name, w in weights.items() if not name.startswith("head")}
    features = functional_call(old, bare, rows[:, middle:-1])
    return kind_of_sign(net, weights, rows[:, :middle]) + 3 * F.mse_loss(features, wanted)


def adapted(group: Group) -> dict:
    """A new task with few labels: from scratch, from a trained body, or imitating its features."""
    kind, (train, held_out) = KINDS[group.network], texts(group.network)
    old, data, loss = kind.make(), train[: kind.labelled], kind_of_sign
    nets, orders = drawn(group, out=4)
    for net in nets if group.way.startswith("old body") else []:
        net.load_state_dict(teacher(group.network), strict=False)
    if group.way == "features":
        old.head = nn.Identity()
        old.load_state_dict(teacher(group.network))
        others = train[kind.labelled : 65 * kind.labelled]
        data, loss = torch.cat([data.repeat(64, 1), others], dim=1), partial(imitated, old)
    options = {"loss": loss, "trains": thawed(nets[0], group.way)}
    steps = [group.batch] * FEW
    *_, (weights, _) = learn(nets, orders, group.rate, data, kind.optimizer, steps, **options)
    return {group.way: {"loss": judged(nets[0], weights, held_out, kind_of_sign)}}


def rows_of(group: Group) -> pd.DataFrame:
    """A row a copy, and way; the loss is empty where the run diverged."""
    run = {"batches": batch, "few labels": adapted, "widths": wide}.get(group.experiment, habit)
    made = {name: versions()[name] for name in ("torch", "transformers")}
    tables, none = [], torch.full((len(copies(group)),), math.nan)
    for way, facts in run(group).items():
        rows = pd.DataFrame(copies(group), columns=["seed", "order"])
        rows["loss"] = facts["loss"].tolist()
        rows["loss"] = rows["loss"].where(rows["loss"] < LOST).round(4)
        rows["steps_to_goal"] = facts.get("steps_to_goal", none)
        rows["long_gradients"] = facts.get("long", none)
        named = pd.DataFrame([group._replace(way=way)] * len(rows))
        tables.append(pd.concat([named, rows], axis=1).assign(**made, date=today()))
    return pd.concat(tables)


def main() -> None:
    torch.set_num_threads(1)  # sharing work this small takes longer than doing it
    done = pd.read_csv(ROWS) if ROWS.exists() else pd.DataFrame(columns=Group._fields)
    there = set(done[list(Group._fields)].itertuples(index=False, name=None))
    for group in tqdm([g for g in groups() if tuple(g) not in there], unit="group"):
        rows_of(group).to_csv(ROWS, mode="a", header=not ROWS.exists(), index=False)


if __name__ == "__main__":
    main()
