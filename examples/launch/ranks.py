"""Six steps with each method, on this rank's share of the batch; what it saw goes to a file."""

import json
import os
import sys
from datetime import timedelta
from itertools import islice

import torch.distributed as dist
from meters import Collectives, size
from methods import METHODS

from helpers import language_modelling

tiny, seen = language_modelling("tiny"), {}
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, ranks = dist.get_rank(), dist.get_world_size()
for name, method in METHODS.items():
    model, optimizer = method(tiny.model())
    losses = []
    for batch in islice(tiny.dataloader(8), 6):
        mine = {key: rows[rank::ranks] for key, rows in batch.items()}
        with Collectives() as handed:
            loss = model(**mine).loss
            sizes = {"parameters": size(model.parameters())}  # as backward begins
            loss.backward()
            sizes["gradients"] = size(p.grad for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        state = getattr(optimizer, "optim", optimizer).state
        sizes["optimizer states"] = size(t for held in state.values() for t in held.values())
        dist.all_reduce(mean := loss.detach() / ranks)
        losses.append(mean.item())
    kind = type(model).__name__
    seen[name] = {"kind": kind, "sizes": sizes, "handed": handed, "losses": losses}
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
os._exit(0)  # DDP keeps gloo's threads: one still at work while Python ends would abort it
