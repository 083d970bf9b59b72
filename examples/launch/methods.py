"""What each method changes: the model, and perhaps the optimizer."""

from functools import partial

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW


def ddp(model, **options):
    model = DistributedDataParallel(model, **options)
    return model, AdamW(model.parameters(), lr=1e-3)


def zero1(model):
    model = DistributedDataParallel(model)
    return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3)


def fsdp(model, **options):
    for layer in model.model.layers:  # gathered and freed one at a time
        fully_shard(layer, **options)
    fully_shard(model, **options)  # what is left: by default it stays whole until backward ends
    return model, AdamW(model.parameters(), lr=1e-3)


def accelerate(model):
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return accelerator.prepare(model, AdamW(model.parameters(), lr=1e-3))


METHODS = {
    "DDP": ddp,
    "ZeRO-1": zero1,
    "FSDP2, weights kept": partial(fsdp, reshard_after_forward=False),
    "FSDP2": fsdp,
    "FSDP2 by Accelerate": accelerate,
}
