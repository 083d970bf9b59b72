"""Single kernels: what is predicted beside what they took, and in which order it was made."""

import pandas as pd
import pytest

from evidence import kernel_times, trust
from evidence.cards import card
from evidence.tables import ROOT
from fake_cuda.cost import Kernels

KEY = ["table", "what", "pass", "type", "shape", "card"]


def read(path) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False, dtype=str)


def test_the_table_has_each_measured_row_with_its_role_and_seconds():
    table = pd.read_csv(kernel_times.PREDICTED)
    h100, liger = pd.read_csv(kernel_times.H100), pd.read_csv(kernel_times.LIGER)
    measured = pd.concat([h100[h100["kind"] != "host"], liger])
    for name in ("seconds", "role"):
        assert table[name].tolist() == measured[name].tolist()


def test_what_was_first_predicted_judges_and_is_of_rows_that_are_there():
    first, table = read(kernel_times.FIRST), read(kernel_times.PREDICTED)
    judged = set(table[table["role"] == "judged"][KEY].itertuples(index=False, name=None))
    assert set(first[KEY].itertuples(index=False, name=None)) <= judged and len(first) == 566


def test_first_predictions_are_kept_once():
    with pytest.raises(ValueError, match="first predictions are made once"):
        kernel_times.keep()


def test_rows_are_predicted_anew_to_the_recorded_digits():
    table = pd.read_csv(kernel_times.PREDICTED)
    h100 = pd.read_csv(kernel_times.H100)
    h100 = h100[h100["kind"] != "host"].reset_index(drop=True)
    for row in h100[::60].itertuples():
        graph = row.kind == "traffic"
        kernels = kernel_times.in_a_graph(row.card) if graph else Kernels(card(row.card))
        found = kernel_times.one_of_h100(row, kernels)
        assert float(f"{found:.4g}") == table["predicted"][row.Index], row
    liger = pd.read_csv(kernel_times.LIGER)
    start = len(h100)
    for row in liger[liger["operation"].isin(["softmax", "layer_norm"])][::12].itertuples():
        found = kernel_times.one_of_liger(row, Kernels(card(row.card)))
        assert float(f"{found:.4g}") == table["predicted"][start + row.Index], row


def test_a_pass_is_one_pass():
    row = next(r for r in pd.read_csv(kernel_times.H100).itertuples() if r.what == "cross_entropy")
    setup = kernel_times.traffic(row.what, row.type, row.shape)
    found, _ = kernel_times.operations(setup, row.card)
    assert [op.name for op in found] == ["_log_softmax", "nll_loss_forward"]


def test_the_errors_that_are_told_are_those_of_the_rows():
    today, first = trust.kernel_times()
    about = (ROOT / "data" / "README.md").read_text("utf-8").split("## kernel_times.csv")[1]
    sizes = today["error"].abs()
    said = f"{len(today)} rows that judge have a prediction: median {sizes.median():.0%}, nine of "
    assert f"{said}ten within {sizes.quantile(0.9):.0%}".replace("%", " %") in about
    of_h100, of_liger = (first[first["set"] == name]["error"].abs() for name in ("h100", "liger"))
    said = f"{len(of_h100)} kernels of the H100, median {of_h100.median():.0%}, nine of ten within "
    assert f"{said}{of_h100.quantile(0.9):.0%}".replace("%", " %") in about
    said = f"{len(of_liger)} of Liger's operations, median {of_liger.median():.0%}"
    assert said.replace("%", " %") in about
