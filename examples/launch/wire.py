"""Seconds that collectives take between the ranks, and what they add to passes under DDP.

Where each rank has a card of its own, they talk by NCCL; elsewhere processes talk by gloo.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MIB = 2**20
rank, ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "WORLD_SIZE"))
cards = torch.cuda.device_count() >= ranks
device = torch.device("cuda", rank) if cards else torch.device("cpu")
if cards:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cards else "gloo")


def seconds(work, times=9):
    """The least over so many, after one to warm up, of the rank that takes longest."""
    found = []
    for _ in range(times + 1):
        dist.barrier()
        began = time.perf_counter()
        work()
        if cards:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    slowest = torch.tensor(min(found[1:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


whole = torch.ones(64 * MIB // 4, device=device)
piece = whole.chunk(ranks)[rank].clone()
seen = {
    "all-reduce of 64 MiB": seconds(lambda: dist.all_reduce(whole)),
    "all-reduce of 16 MiB": seconds(lambda: dist.all_reduce(whole[: len(whole) // 4])),
    "all-gather of 64 MiB": seconds(lambda: dist.all_gather_into_tensor(whole, piece)),
    "reduce-scatter of 64 MiB": seconds(lambda: dist.reduce_scatter_tensor(piece, whole)),
}
layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)]  # 64 MiB
model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
samples = torch.ones(8, 1024, device=device)


def alone():
    with model.no_sync():
        model(samples).sum().backward()


seen["passes under DDP, nothing sent"] = seconds(alone)
seen["passes under DDP"] = seconds(lambda: model(samples).sum().backward())
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    json.dump({"backend": dist.get_backend(), "seconds": seen}, file)
dist.destroy_process_group()
os._exit(0)  # DDP keeps gloo's threads: one still at work while Python ends would abort it
