"""What each method changes: the model, and perhaps the optimizer."""

from functools import partial

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW


def ddp(model, optimizer=AdamW, **options):
    model = DistributedDataParallel(model)
    return model, optimizer(model.parameters(), lr=1e-3, **options)


def fsdp(model, free=True):
    for layer in model.model.layers:  # gathered and freed one at a time
        fully_shard(layer, reshard_after_forward=free)
    fully_shard(model, reshard_after_forward=free)  # what is left
    return model, AdamW(model.parameters(), lr=1e-3)


def accelerate(model):
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return accelerator.prepare(model, AdamW(model.parameters(), lr=1e-3))


METHODS = {
    "DDP": ddp,
    "ZeRO-1": partial(ddp, optimizer=ZeroRedundancyOptimizer, optimizer_class=AdamW),
    "FSDP2, weights kept": partial(fsdp, free=False),
    "FSDP2": fsdp,
    "FSDP2 by Accelerate": accelerate,
}
