"""The same with DeepSpeed: stages 1 to 3, and stage 2 without a word about clipping."""

import json
import sys
from itertools import islice

import deepspeed
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from meters import Collectives, size

from helpers import language_modelling

__compatible_ops__["deepspeed_shm_comm"] = False  # a faster gloo, which would be compiled first
deepspeed.init_distributed("gloo")
tiny, rank, seen = language_modelling("tiny"), dist.get_rank(), {}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
FIXED = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.0}
configs = {f"ZeRO-{n}": FIXED | {"zero_optimization": {"stage": n}} for n in (1, 2, 3)}
silent = {key: value for key, value in configs["ZeRO-2"].items() if key != "gradient_clipping"}
configs["ZeRO-2, clipping not set"] = silent
for name, config in configs.items():
    engine, zero, *_ = deepspeed.initialize(model=tiny.model(), config=config)
    losses, handed = [], Collectives()
    for batch in islice(tiny.dataloader(8), 6):
        with handed:
            loss = engine(**{key: rows[rank::2] for key, rows in batch.items()}).loss
            engine.backward(loss)
            engine.step()
        dist.all_reduce(mean := loss.detach() / 2)
        losses.append(mean.item())
    held = [getattr(p, "ds_tensor", p) for p in engine.parameters()]  # stage 3 keeps pieces
    states = [t for kept in zero.optimizer.state.values() for t in kept.values()]
    sizes = {"parameters": size(held), "optimizer states": size(states)}
    handed = {key: size / len(losses) for key, size in handed.items()}  # in a step
    seen[name] = {"sizes": sizes, "losses": losses, "handed": handed}
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
