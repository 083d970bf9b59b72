"""The peak of one rank of two with each method, with one micro-batch a step and with two.

PyTorch's group for tests stands for the other rank: models, buckets and gathered weights are the
real ones, and nothing is sent. (With gloo its own threads free some buffers, which no profiler
sees.)
"""

import gc
import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from methods import METHODS, ddp
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from helpers import language_modelling, measure

ONE_COPY = partial(ddp, gradient_as_bucket_view=True)
METHODS = METHODS | {"DDP, bucket view": ONE_COPY}
del METHODS["FSDP2 by Accelerate"]  # which is DDP here
WAYS = {"one": [True], "two": [False, True], "two, each sent": [True, True]}  # sent or kept


def deep():
    config = language_modelling("tiny").model().config
    config.num_hidden_layers = 8
    return AutoModelForCausalLM.from_config(config)


def alone(model):
    return model, AdamW(model.parameters())


def two_steps(prepare=alone, sent=(True,)):
    model, optimizer = prepare(deep())
    tokens = torch.arange(16)[None]
    for _ in range(2):
        for now in sent:
            if hasattr(model, "set_requires_gradient_sync"):  # what no_sync() of Accelerate does
                model.set_requires_gradient_sync(now)
            model.require_backward_grad_sync = now  # and DDP's own
            (model(input_ids=tokens, labels=tokens).loss / len(sent)).backward()
        optimizer.step()
        optimizer.zero_grad()


def nothing_sent(method, model):
    model, optimizer = method(model)
    if hasattr(model, "register_comm_hook"):  # DDP would wait for an answer
        model.register_comm_hook(None, answer)
    return model, optimizer


def answer(_, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


if __name__ == "__main__":
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    gc.freeze()  # what is imported holds hardly a tensor: `measure` need not look at it each time
    found = {}
    for name, method in METHODS.items():
        found[name] = {}
        for way, sent in WAYS.items():
            with measure() as usage:
                two_steps(partial(nothing_sent, method), sent)
            found[name][way] = usage.peak_allocated
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()
