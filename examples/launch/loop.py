"""A training loop of one's own on one card, to take home. Lesson 15 runs it, a test holds it.

    for step, loss in train(model, rows, held_out, collate, "run", epochs=3, done=200):
        print(step, loss)

It computes what `Trainer` computes: a step is `group` micro-batches, weighed by their tokens that
count (labels other than -100). `every` so many steps all that a run remembers is saved in the
folder; `done` steps are not taken again. The model is one of transformers that predicts the next
token; `options` are those of `Accelerator`. At the end it is evaluated, and saved in the folder.
"""

from itertools import islice

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from transformers import get_linear_schedule_with_warmup, set_seed


def losses(model, batches):
    """The loss of each batch, a sum divided by the tokens of all: together they are the mean."""
    tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    return (model(**batch, num_items_in_batch=tokens).loss for batch in batches)


def train(model, rows, held_out, collate, folder, epochs=1, micro=1, group=4, rate=5e-5,
          every=100, done=0, shuffle=True, seed=42, **options):  # fmt: skip
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
    accelerator = Accelerator(dataloader_config=order, **options)
    loader = torch.utils.data.DataLoader(rows, micro, shuffle, collate_fn=collate)
    tests = torch.utils.data.DataLoader(held_out, micro, collate_fn=collate)
    in_epoch = -(-len(loader) // group)  # steps; the last one may have fewer micro-batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, epochs * in_epoch)
    parts = accelerator.prepare(model.train(), optimizer, schedule, loader, tests)
    model, optimizer, schedule, loader, tests = parts
    if done:
        accelerator.load_state(f"{folder}/step-{done}")
    for epoch in range(done // in_epoch, epochs):
        loader.set_epoch(epoch)  # another order in each epoch, the same in a resumed one
        batches = iter(accelerator.skip_first_batches(loader, done % in_epoch * group))
        while batch_group := list(islice(batches, group)):
            set_seed(seed + done)  # dropout of a step, whatever was drawn before
            total = 0.0
            for loss in losses(model, batch_group):  # one forward pass after another
                accelerator.backward(loss)
                total += loss.detach()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if done % every == 0:
                accelerator.save_state(f"{folder}/step-{done}")
            yield done, total.item()
    with torch.no_grad():
        print(f"loss of a held-out token: {sum(losses(model.eval(), list(tests))):.3f}")
    accelerator.unwrap_model(model.train()).save_pretrained(folder)
