"""The same with DeepSpeed: stages 1 to 3, stage 3 with its thresholds at 0, stage 2 without a word
about clipping."""

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
KEEPS = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
nothing = {"stage": 3} | {f"stage3_{name}": 0 for name in KEEPS}  # stays whole
configs["ZeRO-3, thresholds 0"] = FIXED | {"zero_optimization": nothing}
silent = {key: value for key, value in configs["ZeRO-2"].items() if key != "gradient_clipping"}
configs["ZeRO-2, clipping not set"] = silent
for name, config in configs.items():
    engine, zero, *_ = deepspeed.initialize(model=tiny.model(), config=config)
    losses = []
    for batch in islice(tiny.dataloader(8), 6):
        with Collectives() as handed:
            loss = engine(**{key: rows[rank::2] for key, rows in batch.items()}).loss
            held = [*engine.parameters()]  # as backward begins: in stage 3 what is whole by now,
            held += [getattr(p, "ds_tensor", None) for p in held]  # beside this rank's pieces
            sizes = {"parameters": size(held)}
            engine.backward(loss)
            engine.step()
        dist.all_reduce(mean := loss.detach() / 2)
        losses.append(mean.item())
    states = [t for kept in zero.optimizer.state.values() for t in kept.values()]
    sizes["optimizer states"] = size(states)
    seen[name] = {"sizes": sizes, "losses": losses, "handed": handed}
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
