"""What older versions of torch did, by hand on small runs, and which runs have it."""

from collections.abc import Callable
from functools import partial

import pandas as pd
import pytest
import torch
from torch import nn

from evidence.libraries import TORCH, Behaviour, behaving, of, rows
from evidence.libraries.torch_2_1 import BEHAVIOURS
from fake_cuda import Simulation, simulate


def simulated(run: Callable, *behaviours: Behaviour) -> Simulation:
    with behaving(behaviours):
        return simulate(run)


def names(**versions: str) -> set[str]:
    """Of the behaviours, without the simulation's own rules, which every version has."""
    return {old.name for old in of(**versions)} - {"rules of the version"}


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
    flash, list_of = (old.name for old in BEHAVIOURS)
    assert names(torch="2.0.1") == names(torch="2.1.0.dev20230623") == {flash, list_of}
    assert names(torch="2.1.0") == names(torch="2.1.2") == {flash}
    assert names(torch="2.2.0") == names(torch="2.13.0+cpu") == names() == set()
    assert names(torch="1.10") == {old.name for old in TORCH}
    zeroed = {"gradients zeroed, not freed", "optimizers without lists"}
    assert names(torch="1.13.0a0+d0d6b1f") == {flash, list_of} | zeroed


def test_the_column_of_a_row_decides_and_not_its_set():
    table = pd.concat(pd.read_csv(rows.MEASURED / name, dtype=str) for name in rows.TABLES)
    table = table[table["role"] != "excluded"].dropna(subset="torch")
    for row in table.itertuples():
        seen = []
        rows.as_it_ran(row.set, row.run, lambda seen=seen: seen.append(torch.nn.Module.zero_grad))()
        older = tuple(int(n) for n in row.torch.split(".")[:2]) < (2, 0)
        assert (seen[0] is not torch.nn.Module.zero_grad) == older
    ran = rows.as_it_ran("a set that", "no table has", lambda: torch.nn.Module.zero_grad)
    assert ran() is torch.nn.Module.zero_grad


def test_rows_of_one_run_name_one_version(monkeypatch, tmp_path):
    table = "set,run,role,torch\na,b,judged,2.1.0\na,b,judged,2.2.0\n"
    (tmp_path / "peaks.csv").write_text(table)
    monkeypatch.setattr(rows, "MEASURED", tmp_path)
    with pytest.raises(ValueError, match="a / b names two versions of torch, 2.1.0 and 2.2.0"):
        rows.named.__wrapped__()


@pytest.mark.parametrize("of_model", [True, False])
def test_gradients_were_filled_with_zeros(of_model):
    """So those of the first step stand in the second forward pass."""

    def trained():
        model = nn.Linear(1024, 1024, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.zeros(1, 1024)).sum().backward()
            optimizer.step()
            (model if of_model else optimizer).zero_grad()
        torch.cuda.empty_cache()  # marks the end
        return model, optimizer

    def stands(version: str) -> int:
        found = simulated(trained, *of(torch=version))
        return sum(size for _, size in found.log[: found.log.index((-1, 0))])

    assert stands("1.13") - stands("2.0") == 4 * 1024**2


def test_optimizers_went_from_parameter_to_parameter():
    """A list of roots stands for all parameters at once, else that of one."""

    def trained():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.zeros(1, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    peaks = [simulated(trained, *of(torch=version)).peak_allocated for version in ("1.13", "2.1.0")]
    assert peaks[1] - peaks[0] >= 4 * 1024**2


@pytest.mark.parametrize(("version", "size"), [("1.10", 0), ("2.11.0", 8519680), ("2.12", 2**25)])
def test_the_workspace_is_that_of_the_version(version, size):
    def multiplied():
        return torch.empty(512, 512) @ torch.empty(512, 512)

    with behaving(of(torch=version)):
        log = simulate(multiplied, (10, 0)).log
    assert sum(n for _, n in log if n in (8519680, 2**25)) == size


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
