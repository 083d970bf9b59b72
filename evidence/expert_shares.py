"""Train a tiny mixture with each balance loss of lesson 19, and see how busy its experts are.

    python -m evidence.expert_shares        appends to data/measurements/expert_shares.csv

The lesson trains each way once; here are three seeds of the first weights, each with two orders of
the data. A minute on a CPU core. What stands in the table is not run again.
"""

import datetime
from itertools import product

import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from evidence import equal_compute
from evidence.equal_compute import CHOSEN, EXPERTS, ORDERS, RATES, SEEDS, STEPS, Job
from evidence.tables import MEASURED, append_missing
from helpers.hardware import versions

ROWS = MEASURED / "expert_shares.csv"


def each_layer(out) -> torch.Tensor:
    """The library's balance loss of each layer by itself."""
    parts = [load_balancing_loss_func((layer,), EXPERTS, CHOSEN) for layer in out.router_logits]
    return 0.02 * sum(parts) / len(parts)


WAYS = {"no balance loss": lambda out: 0.0, "the library's": equal_compute.balance}
WAYS |= {"layer by layer": each_layer}


@torch.no_grad()
def busiest(model: nn.Module, test: torch.Tensor) -> float:
    """The largest share of a layer's choices that one expert gets, in equal shares."""
    chosen = [g.topk(CHOSEN).indices.flatten() for g in model(test).router_logits]
    return max((EXPERTS * c.bincount().max() / len(c)).item() for c in chosen)


def measure(way: str, seed: int, order: int, rows: tuple) -> dict:
    """One run as a row."""
    train, test = rows
    job = Job(RATES[0], min(STEPS), seed, order, "experts")
    model = equal_compute.trained(job, train, WAYS[way])
    facts = {"balance": way, "seed": seed, "order": order, "steps": job.steps}
    facts |= {"busiest": round(busiest(model, test), 4)}
    facts |= {"test_loss": round(equal_compute.test_loss(model, test), 4), "device": "cpu"}
    facts |= {name: versions()[name] for name in ("torch", "transformers")}
    return facts | {"date": datetime.date.today().isoformat()}


if __name__ == "__main__":
    rows, jobs = equal_compute.rows(), product(WAYS, SEEDS, ORDERS)
    append_missing(ROWS, ("balance", "seed", "order"), jobs, lambda *job: measure(*job, rows))
