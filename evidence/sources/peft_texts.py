"""PEFT's comparison of its own methods on an L40S, with a language model: MetaMathQA.

Here is the step of its run.py in our words. Its numbers are read after each step, less the first
segment of the allocator, which stood when it began to count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.optimizers import create_lorafa_optimizer
from transformers import AutoConfig, AutoModelForCausalLM

from evidence.cards import Reading, card
from evidence.peft_methods import TEXTS, TEXTS_2, adapted, after_each_step, update
from fake_cuda import simulate
from helpers.hardware import data_file

# Padded tokens a text of MetaMathQA, which nobody published: those with which one run meets its
# three measurements (`calibrate`). Batches come by twenties, from long to short, and the cache is
# emptied every ten: MEAN is the mean text and that of the eleventh batch, FIRST that of the first,
# LONGEST that of the first in the longest hundredth: two, as one segment more makes a jump.
MEAN, FIRST, LONGEST = 223, 427, (575, 580)
CALIBRATION = "lora rank64-rslora"


@contextmanager
def svd_of_a_card() -> Iterator[None]:
    """cuSOLVER's right vectors lie by rows (`_linalg_svd_meta` in torch/_meta_registrations.py), so
    what PEFT takes of the first rows is no copy and holds all of them. With images it makes no
    difference: that script moves the model to the host and back, which copies the rows alone."""
    decompose = torch.linalg.svd

    def by_rows(*args, **options):
        left, values, right = decompose(*args, **options)
        return left, values, right.contiguous()

    with mock.patch.object(torch.linalg, "svd", by_rows):
        yield


def _rebuilds(model: PeftModel) -> None:
    """OSF as PEFT 0.19 had it (tuners/osf/layer.py): all factors of a weight stand beside it, and
    each pass makes a weight of them. PEFT 0.21 keeps fewer, and adds what was learned."""
    for layer in model.modules():
        if not hasattr(layer, "_osf_U_low_init"):
            continue
        low, rank = layer.osf_svd_params["default"], layer.effective_rank["default"]
        rows, columns = layer.get_base_layer().weight.shape
        for kept in (layer._osf_U_low_init, layer._osf_S_low_init, layer._osf_V_low_init):
            kept.clear()
        layer._osf_U_high.clear()
        layer._osf_V_high.clear()
        layer._detach_hooks()
        left, values, right = (
            torch.empty(shape, dtype=torch.bfloat16)
            for shape in ((rows, rank), (rank,), (rank, columns))
        )

        def forward(x, low=low, left=left, values=values, right=right):
            high = torch.mm(left * values.unsqueeze(0), right)
            return F.linear(x, high + torch.mm(low["U_low"] * low["S_low"][None], low["V_low"]))

        low["U_low"].register_hook(lambda g, left=left: g - left @ (left.T @ g))
        low["V_low"].register_hook(lambda g, right=right: g - (g @ right.T) @ right)
        layer.forward = forward


def train_texts(run: str, lengths: list[int], **config) -> list[Reading]:
    """Steps of 4 texts of these many padded tokens; see `after_each_step` for what comes back.

    run.py of MetaMathQA: bf16 weights, AdamW by lists, gradients clipped, no checkpointing. What
    the model returned lives until the next step: logits, and keys and values for a cache.
    """
    config = AutoConfig.from_pretrained(data_file("configs", "llama-3.2-3b.json"), **config)

    def train():
        model = AutoModelForCausalLM.from_config(config)
        settings = (TEXTS | TEXTS_2)[run]
        with svd_of_a_card():
            model = adapted(model.bfloat16(), run, settings, task_type="CAUSAL_LM")
        if run.startswith("osf"):
            _rebuilds(model)
        if run.endswith("lorafa"):
            optimizer = create_lorafa_optimizer(model, 32, 64, 1e-4, 0.1)
            with model.disable_adapter():  # run.py takes a loss without it: on leaving, PEFT
                pass  # lets all of an adapter train again, what the optimizer froze too
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
        for step, length in enumerate(lengths, 1):
            ids = torch.zeros(4, length, dtype=torch.long)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            batch["attention_mask"][:, -1] = 0  # all but the longest text are padded
            batch["labels"] = ids.clone()
            tokens = batch["attention_mask"].sum().item()
            optimizer.zero_grad()
            outputs = model(**batch, num_items_in_batch=tokens)
            loss = outputs.loss
            loss.backward()
            update(model, optimizer, step)
            torch.cuda.empty_cache()  # as the script does every ten steps, the longest of which
        return model, optimizer, outputs, loss, batch  # come first

    return after_each_step(simulate(train, card=card("L40S")))


def predict_texts(run: str) -> dict[str, int]:
    """Long texts come after shorter ones, whose logits are still there."""
    longest = [length for text in LONGEST for length in (MEAN, text)]
    reading = train_texts(run, [MEAN, MEAN, FIRST, *longest])
    reserved = [now.reserved for now in reading]
    return {
        "allocated after a step, mean": reading[1].allocated,
        "reserved after a step, mean": (reserved[1] + reserved[2]) // 2,
        "reserved after a step, 99th percentile": sum(reserved[4::2]) // len(LONGEST),
    }


def texts(runs: dict = TEXTS) -> Iterator[tuple[str, Callable]]:
    for run in runs:
        yield run, partial(predict_texts, run)


def calibrate() -> None:
    """Print the calibrating run at some lengths, to choose MEAN, FIRST and LONGEST by."""
    tried = [*range(FIRST - 10, FIRST + 11, 5), *range(LONGEST[0] - 5, LONGEST[-1] + 6, 5)]
    lengths = [MEAN, MEAN, *(n for length in tried for n in (length, MEAN))]
    readings = train_texts(CALIBRATION, lengths)
    for length, (allocated, reserved, _) in zip(lengths, readings, strict=True):
        print(f"{length:4}  allocated {allocated:,}  reserved {reserved:,}")


PEAKS = {"peft-texts": texts, "peft-texts-2": partial(texts, TEXTS_2)}

if __name__ == "__main__":
    calibrate()
