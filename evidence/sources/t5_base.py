"""T5-base under transformers' example of translation in 2022, timed on an A100 and an RTX 3090.

Issues 15026 and 14608 of huggingface/transformers: label smoothing, AdamW, tf32. The lengths of the
padded texts are not published, and guessed.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import transformers

from evidence.cards import card
from fake_cuda import Simulation, simulate

WORDS = 32128


def smoothed_loss(model, words, labels):
    """LabelSmoother in transformers/trainer_pt_utils.py; words (batch, source), labels (batch,
    target)."""
    mask = torch.ones_like(words)
    mask[:, -1] = 0  # all but the longest text are padded
    logits = model(input_ids=words, attention_mask=mask, decoder_input_ids=labels).logits
    log = -F.log_softmax(logits, dim=-1)  # (batch, target, words)
    padded = labels.unsqueeze(-1).eq(-100)  # (batch, target, 1), and so are the next two
    chosen = log.gather(-1, labels.unsqueeze(-1)).masked_fill_(padded, 0.0)
    smooth = log.sum(-1, keepdim=True, dtype=torch.float32).masked_fill_(padded, 0.0)
    count = padded.numel() - padded.long().sum()
    return 0.9 * chosen.sum() / count + 0.1 * smooth.sum() / (count * WORDS)


def train(name: str, batch: int, source: int, target: int) -> Simulation:
    """Two steps on texts of so many tokens."""

    def run():
        config = transformers.T5Config(
            vocab_size=WORDS,
            d_model=768,
            d_ff=3072,
            num_layers=12,
            num_heads=12,
            use_cache=False,
            decoder_start_token_id=0,
            attn_implementation="eager",
        )
        model = transformers.T5ForConditionalGeneration(config).train()
        words, labels = (torch.zeros(batch, n, dtype=torch.long) for n in (source, target))
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        for _ in range(2):
            loss = smoothed_loss(model, words, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()
        return model, optimizer

    return simulate(run, card=card(name, tf32=True))


CASES = {"batch 1": (1, 40, 55), "batch 8": (8, 60, 85)}  # texts, tokens of source and target


def runs(name: str) -> Iterator[tuple[str, Callable]]:
    for run, case in CASES.items():
        yield run, partial(train, name, *case)


STEPS = {"t5-base-a100": partial(runs, "A100-40GB"), "t5-base-3090": partial(runs, "RTX 3090")}
