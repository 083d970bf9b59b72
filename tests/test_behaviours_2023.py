"""What torch did in 2023, by hand on small runs."""

from collections.abc import Callable
from functools import partial

import pandas as pd
import pytest
import torch
from torch import nn

import record_real_cards
from behaviours_2023 import BEHAVIOURS, behaving, of
from fake_cuda import Simulation, simulate
from real_cards import litgpt_finetuning, vit_large


def simulated(run: Callable, *behaviours: str) -> Simulation:
    with behaving(behaviours):
        return simulate(run)


def attended(texts: int = 8):
    layer = nn.MultiheadAttention(256, 4, batch_first=True).bfloat16()
    x = torch.zeros(texts, 128, 256, dtype=torch.bfloat16)
    return layer(x, x, x, need_weights=False)[0]


def test_a_result_laid_out_by_tokens_is_kept_beside_the_copy_that_a_layer_wants():
    kept = [sum(n for _, n in simulated(attended, *on).log) for on in ((), BEHAVIOURS[:1])]
    assert kept[1] - kept[0] == 2 * 8 * 128 * 256


def test_a_single_text_was_not_copied():
    """Its reshape to tokens is a view, so its result lies as today's does."""
    alone = partial(attended, texts=1)
    kept = [sum(n for _, n in simulated(alone, *on).log) for on in ((), BEHAVIOURS[:1])]
    assert kept[1] == kept[0]


def test_a_version_decides_and_not_a_set():
    assert of("2.0.1") == of("2.1.0.dev20230623") == BEHAVIOURS
    assert of("2.1.0") == of("2.1.2") == BEHAVIOURS[:1]
    assert of("2.2.0") == of("2.13.0+cpu") == ()
    peaks = pd.read_csv(record_real_cards.MEASURED, dtype=str)
    named = {"vit-l-2023": vit_large.TORCH, "litgpt-2023": litgpt_finetuning.TORCH_2023}
    judged = peaks[(peaks["role"] == "judged") & peaks["torch"].notna()].drop_duplicates("set")
    old = {row.set: row.torch for row in judged.itertuples() if of(row.torch)}
    assert old.pop("guide-2022") == "1.10"  # of a time before fused attention: behaviours_2022
    assert old == named


def test_its_gradients_are_those_of_the_kernel():
    def trained():
        layer = nn.MultiheadAttention(64, 4, batch_first=True).bfloat16()
        x = torch.zeros(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        layer(x, x, x, need_weights=False)[0].sum().backward()
        assert x.grad.shape == x.shape and layer.in_proj_weight.grad is not None

    simulated(trained, *BEHAVIOURS)


@pytest.mark.parametrize(("kind", "more"), [(torch.optim.Adam, 1), (torch.optim.SGD, 0)])
def test_denominators_were_a_list_of_their_own(kind, more):
    def stepped():
        model = nn.Linear(1024, 1024, bias=False)
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.zeros(1, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    now, then = (simulated(stepped, *on).peak_allocated for on in ((), BEHAVIOURS[1:]))
    assert then - now == more * 4 * 1024**2
