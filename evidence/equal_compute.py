"""Train a tiny mixture and dense models of its cost and size with the same compute, for longer.

    python -m evidence.equal_compute        appends to data/measurements/equal_compute.csv

What lesson 19 does once, for a few steps and for more: three seeds of the first weights, each with
two orders of the data. The dense model of the mixture's size gets as many steps as the same compute
pays for. An hour on a busy CPU core; more STEPS are appended to what is there. An
interrupted run goes on where it stopped.
"""

import copy
import datetime
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from evidence.tables import MEASURED, append_missing
from helpers import language_modelling
from helpers.hardware import versions

ROWS = MEASURED / "equal_compute.csv"
EXPERTS, CHOSEN, WIDTH, BATCH, LENGTH = 8, 2, 128, 16, 64
COST = 2.98  # of the dense model of the same size, in the mixture's: the lesson counts it
SEEDS, ORDERS, RATES = (0, 1, 2), (0, 1), (3e-3, 1e-2)
STEPS = {24: RATES, 100: RATES, 500: RATES, 2000: (1e-3, 3e-3)}  # by compute, the rates tried
SHAPE = dict(vocab_size=257, hidden_size=64, num_hidden_layers=2, use_cache=False)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH)
SHAPE |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
FEW = dict(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, output_router_logits=True)
MODELS = {
    "experts": MixtralConfig(**SHAPE, **FEW, intermediate_size=WIDTH),
    "same cost": LlamaConfig(**SHAPE, intermediate_size=CHOSEN * WIDTH),
    "same size": LlamaConfig(**SHAPE, intermediate_size=EXPERTS * WIDTH),
}


class Job(NamedTuple):
    """One training run; `compute` is in steps of the mixture."""

    rate: float
    compute: int
    seed: int  # of the first weights
    order: int  # seed of the samples drawn
    model: str

    @property
    def steps(self) -> int:
        """Steps that the compute pays for."""
        return round(self.compute / COST) if self.model == "same size" else self.compute


def wanted() -> Iterator[tuple]:
    """The fields of each job."""
    for compute, rates in STEPS.items():
        for rate, *others in product(rates, SEEDS, ORDERS, MODELS):
            yield rate, compute, *others


def words_loss(out, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def balance(out) -> torch.Tensor | float:
    logits = getattr(out, "router_logits", None)
    return 0.02 * load_balancing_loss_func(logits, EXPERTS, CHOSEN) if logits else 0.0


def trained(job: Job, train: torch.Tensor, balance: Callable = balance) -> nn.Module:
    """Train as the lesson does, with a balance loss of the model's output."""
    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[job.model]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, job.rate, job.steps, pct_start=0.2)
    pick = torch.Generator().manual_seed(job.order)
    for _ in range(job.steps):
        ids = train[torch.randint(len(train), (BATCH,), generator=pick)]
        out = model(ids)
        (words_loss(out, ids) + balance(out)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def test_loss(model: nn.Module, test: torch.Tensor) -> float:
    """The loss on the rows of `test`, without balance."""
    return words_loss(model(test), test).item()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples to train on, and 256 held-out ones."""
    data = language_modelling("tiny", length=LENGTH)
    train, test = (data.data(p).with_format("torch")["input_ids"][:] for p in ("train", "test"))
    return train, test[:256]


def measure(job: Job, train: torch.Tensor, test: torch.Tensor) -> dict:
    """One run as a row."""
    facts = job._asdict() | {"steps": job.steps, "tokens": job.steps * BATCH * LENGTH}
    facts |= {"test_loss": round(test_loss(trained(job, train), test), 4), "device": "cpu"}
    facts |= {name: versions()[name] for name in ("torch", "transformers")}
    return facts | {"date": datetime.date.today().isoformat()}


if __name__ == "__main__":
    train, test = rows()
    jobs = [Job(*one) for one in wanted()]
    append_missing(ROWS, Job._fields, jobs, lambda *job: measure(Job(*job), train, test))
