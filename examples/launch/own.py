"""Whether a function averages the gradients of two processes: it is called after each has its own.

The file named first holds `average(model)`, which may use `torch` and `dist`, torch.distributed.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from meters import Collectives

from helpers import language_modelling

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, ranks, tiny = dist.get_rank(), dist.get_world_size(), language_modelling("tiny")
space = {"torch": torch, "dist": dist}
exec(Path(sys.argv[1]).read_text(), space)
model, batch = tiny.model(), next(iter(tiny.dataloader(8)))
model(**batch).loss.backward()
wanted = [p.grad for p in model.parameters()]  # of one process with the whole batch
model.zero_grad()
model(**{key: rows[rank::ranks] for key, rows in batch.items()}).loss.backward()
with Collectives() as handed:
    space["average"](model)
found = [p.grad for p in model.parameters()]
apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))
with open(f"{sys.argv[2]}.{rank}.json", "w") as file:
    json.dump({"apart": apart, "handed": handed}, file)
dist.destroy_process_group()
