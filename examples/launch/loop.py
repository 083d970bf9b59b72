"""A training loop of one's own on one card, to take home. Lesson 15 runs it, a test holds it.

    for step, loss in train(model, rows, held_out, collate, "run", epochs=3, resume="run/step-200"):
        print(step, loss)

It computes what `Trainer` computes: a step is `group` micro-batches, weighed by their tokens that
count (labels other than -100). `every` so many steps all that a run remembers is saved. The model
is one of transformers that predicts the next token.
"""

from itertools import islice

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup, set_seed


def tokens_of(batches):
    return sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)


@torch.no_grad()
def evaluate(model, loader):
    """The mean loss of a token; the model is in training mode afterwards."""
    model.eval()
    sums = [(model(**b, num_items_in_batch=1).loss, tokens_of([b])) for b in loader]
    model.train()
    lost, tokens = (sum(parts) for parts in zip(*sums, strict=True))
    return (lost / tokens).item()


def train(
    model, rows, held_out, collate, folder, epochs=1, micro=1, group=4, rate=5e-5, clip=1.0,
    every=100, resume=None, shuffle=True, seed=42, **options,
):  # fmt: skip
    """Yield the step and its loss; at the end evaluate, and save the model in the folder."""
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
    accelerator = Accelerator(dataloader_config=order, **options)
    loader = DataLoader(rows, micro, shuffle, collate_fn=collate)
    in_epoch = -(-len(loader) // group)  # steps; the last one may have fewer micro-batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, epochs * in_epoch)
    tests = DataLoader(held_out, micro, collate_fn=collate)
    parts = accelerator.prepare(model.train(), optimizer, schedule, loader, tests)
    model, optimizer, schedule, loader, tests = parts
    done = int(resume.rpartition("-")[2]) if resume else 0
    if resume:
        accelerator.load_state(resume)
    for epoch in range(done // in_epoch, epochs):
        loader.set_epoch(epoch)  # another order in each epoch, the same in a resumed one
        batches = iter(accelerator.skip_first_batches(loader, done % in_epoch * group))
        while batch_group := list(islice(batches, group)):
            set_seed(seed + done)  # dropout of a step, whatever was drawn before
            tokens, total = tokens_of(batch_group), 0.0
            for batch in batch_group:
                loss = model(**batch, num_items_in_batch=tokens).loss  # a sum, divided by `tokens`
                accelerator.backward(loss)
                total += loss.detach()
            accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if done % every == 0:
                accelerator.save_state(f"{folder}/step-{done}")
            yield done, total.item()
    print(f"loss of a held-out token: {evaluate(model, tests):.3f}")
    accelerator.unwrap_model(model).save_pretrained(folder)
