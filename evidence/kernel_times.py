"""`data/kernel_times.csv`: how long single kernels took, beside what the card alone should need.

    python -m evidence.kernel_times            predicts all rows and writes the table
    python -m evidence.kernel_times --first    keeps what is predicted of those that judge, once

Rows are those of data/measurements/kernels_h100.csv, but for the host's, and kernels_liger.csv.
Products and attention are told by their shapes; what moves bytes is run on fake tensors, and its
operations are timed one after another, without a host. Of Liger's table some operations have no
code here (`NOT_WRITTEN`) and stay without a prediction.

Writes: data/kernel_times.csv, data/blind_kernel_times.csv
"""

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from evidence.cards import card
from evidence.sources import liger_operations as liger
from evidence.tables import DATA, MEASURED, libraries, replace_file, today
from evidence.traces import traced
from fake_cuda import simulate
from fake_cuda.cost import CONSTANTS, Kernels
from fake_cuda.operations import Operation
from fake_cuda.products import Attention, Product

PREDICTED, FIRST = DATA / "kernel_times.csv", DATA / "blind_kernel_times.csv"
H100, LIGER = MEASURED / "kernels_h100.csv", MEASURED / "kernels_liger.csv"
KEY = ["table", "what", "pass", "type", "shape", "settings", "card"]
COLUMNS = [*KEY, "seconds", "role", "predicted", "predicted_with", "date"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4}  # bytes of a number
WORDS = 50257  # of an embedding, of which only the rows that are asked for are read
# Of attention over neighbours the mask, whose places a loop of Python writes, is not there either.
NOT_WRITTEN = set(
    "distill_cosine_loss distill_jsd_loss fused_linear_cpo_loss fused_linear_grpo_loss_sequence "
    "fused_linear_grpo_loss_token fused_linear_orpo_loss fused_linear_simpo_loss fused_moe "
    "fused_neighborhood_attention "
    "kto_loss llama4_rope multi_token_attention sparse_multi_token_attention sparsemax".split()
)


class Pass(nn.Module):
    """What is called again and again: a module, so that a trace sees where each pass begins."""

    def __init__(self, once: Callable):
        super().__init__()
        self.once = once

    def forward(self, of: torch.Tensor) -> None:
        self.once()


def operations(setup: Callable, name: str) -> tuple[list[Operation], list[str]]:
    """What the second pass of `setup()` asks of a card, and the names of its phases."""

    def run():
        again, of = Pass(setup()), torch.zeros(1)
        for _ in range(2):
            again(of)
        return again

    _, step = traced(lambda: simulate(run, card(name)))
    found = step.operations
    one_phase = len({op.phase for op in found}) == 1  # two forward passes are one
    return found[len(found) // 2 :] if one_phase else found, step.phases


def seconds(found: list[Operation], kernels: Kernels) -> float:
    """Seconds of operations on a card, one after another."""
    return sum(kernels.seconds(op)[1] for op in found if op.kind not in ("view", "wait"))


def traffic(what: str, type_: str, shape: str) -> Callable:
    """A call of an operation of the H100's rows."""
    sizes = [int(n) for n in shape.replace(" of ", "x").split("x")]

    def setup():
        if what == "embedding":
            table, rows = nn.Embedding(WORDS, sizes[1]), torch.zeros(sizes[0], dtype=torch.long)
            return lambda: table(rows)
        x, y = (torch.zeros(sizes, dtype=TYPES[type_]) for _ in range(2))
        weight = torch.ones(sizes[-1], dtype=x.dtype)
        targets = torch.zeros(sizes[0], dtype=torch.long)
        calls = {
            "add": lambda: x + y,
            "cast to bf16": x.bfloat16,
            "copy": lambda: y.copy_(x),
            "cross_entropy": lambda: F.cross_entropy(x, targets),
            "dropout": lambda: F.dropout(x, 0.1),
            "fill": lambda: y.fill_(1.0),
            "gelu": lambda: F.gelu(x),
            "layer_norm": lambda: F.layer_norm(x, sizes[-1:], weight, weight),
            "log_softmax": lambda: F.log_softmax(x, -1),
            "mul scalar": lambda: x * 2.0,
            "softmax": lambda: F.softmax(x, -1),
            "sum": x.sum,
        }
        return calls[what]

    return setup


def in_a_graph(name: str) -> Kernels:
    """A card that is given kernels by a CUDA graph, as it was for the H100's rows of traffic."""
    seconds = CONSTANTS.traffic.kernel_in_a_graph
    return Kernels(card(name), CONSTANTS.with_value("seconds of a kernel", seconds))


def one_of_h100(row, kernels: Kernels) -> float:
    """The predicted seconds of a row of kernels_h100.csv."""
    if row.kind == "product":
        m, k, n = (int(side) for side in row.shape.split("x"))
        moved = (m * k + k * n + m * n) * SIZES[row.type]
        work = (Product(1, m, n, k, row.type, True),)
        return kernels.seconds(Operation(1, 0, "forward", "product", work, moved))[1]
    if row.kind == "attention":
        kernel = row.what.split()[0]
        kernel = {"default": "flash" if row.type == "bf16" else "efficient"}.get(kernel, kernel)
        work = Attention(row.work, kernel, "backward" in row.what, row.type)
        return kernels.seconds(Operation(1, 0, "forward", "attention", work))[1]
    return seconds(operations(traffic(row.what, row.type, row.shape), row.card)[0], kernels)


def of_liger(row) -> Callable:
    """The operation of a row of kernels_liger.csv, as liger_operations and this module have it."""
    n, told = row.size, json.loads(row.settings)
    known = {
        "cross_entropy": liger.cross_entropy,
        "embedding": partial(embedding, told.get("D")),
        "fused_add_rms_norm": liger.add_rms_norm,
        "fused_linear_cross_entropy": liger.linear_cross_entropy,
        "fused_linear_jsd": liger.linear_jensen_shannon,
        "geglu": partial(liger.mlp, "geglu", 8),
        "group_norm": liger.group_norm,
        "jsd": liger.jensen_shannon if row.of == "V" else liger.jensen_shannon_2026,
        "kl_div": liger.kl_divergence,
        "layer_norm": liger.layer_norm,
        "megatron_rms_norm": megatron_rms_norm,
        "megatron_swiglu": megatron_swiglu,
        "relu_squared": relu_squared,
        "rms_norm": liger.rms_norm,
        "rope": (lambda h: liger.rope(h, 2048)) if row.of == "H" else partial(liger.rope, 8192),
        "softmax": partial(softmax, told.get("dtype")),
        "swiglu": partial(liger.mlp, "swiglu", 4),
        "tiled_geglu": lambda t: liger.mlp("geglu", 2, t, 2048, 4096),
        "tiled_swiglu": lambda t: liger.mlp("swiglu", 2, t, 2048, 4096),
        "tvd": liger.total_variation,
    }
    return partial(known[row.operation], n)


def embedding(width: int, words: int) -> Callable:
    table, tokens = nn.Embedding(words, width), torch.zeros(16384, dtype=torch.long)
    return liger.with_new_gradient(lambda _: table(tokens), None)


def megatron_rms_norm(width: int) -> Callable:
    norm, x = nn.RMSNorm(width, dtype=liger.BF16), torch.zeros(4096, 1, width, dtype=liger.BF16)
    return liger.with_new_gradient(norm, x.requires_grad_())


def megatron_swiglu(width: int) -> Callable:
    x = torch.zeros(2048, 4, 2 * width, dtype=liger.BF16, requires_grad=True)

    def gate(x):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    return liger.with_new_gradient(gate, x)


def relu_squared(width: int) -> Callable:
    x = torch.zeros(4096, width, dtype=liger.BF16, requires_grad=True)
    return liger.with_new_gradient(lambda x: F.relu(x).pow(2), x)


def softmax(dtype: str, width: int) -> Callable:
    kind = liger.BF16 if dtype == "torch.bfloat16" else torch.float32
    x = torch.zeros(2048, width, dtype=kind, requires_grad=True)
    return liger.with_new_gradient(lambda x: F.softmax(x, -1), x)


@cache
def _of_liger(operation: str, of: str, size: int, settings: str, name: str) -> tuple:
    row = SimpleNamespace(operation=operation, of=of, size=size, settings=settings)
    return operations(of_liger(row), name)


def one_of_liger(row, kernels: Kernels) -> float:
    """The predicted seconds of a row of kernels_liger.csv: of a full pass, or of its part."""
    found, phases = _of_liger(row.operation, row.of, int(row.size), row.settings, row.card)
    back = [phases[op.phase] == "backward" for op in found]
    whole = {"forward": [not b for b in back], "backward": back, "full": [True] * len(back)}
    # A gradient of the result is drawn before or anew: of a part it is none.
    wanted = [op for op, asked in zip(found, whole[row[3]], strict=True) if asked]
    if row[3] != "full":
        wanted = [op for op in wanted if op.name != "randn_like"]
    return seconds(wanted, kernels)


def rows() -> pd.DataFrame:
    """All rows with their prediction, empty where none is made."""
    found = []
    h100, of_others = pd.read_csv(H100), pd.read_csv(LIGER)
    for row in h100[h100["kind"] != "host"].itertuples():
        kernels = in_a_graph(row.card) if row.kind == "traffic" else Kernels(card(row.card))
        told = one_of_h100(row, kernels)
        shape = " ".join(filter(None, [row.shape, row.layout if row.kind == "product" else ""]))
        key = ["h100", row.what, "", row.type, shape, "", row.card]
        found.append([*key, row.seconds, row.role, told])
    for row in of_others.itertuples():
        told = None
        if row.operation not in NOT_WRITTEN:
            told = one_of_liger(row, Kernels(card(row.card)))
        size = f"{row.of} {row.size}"
        key = ["liger", row.operation, row[3], "", size, row.settings, row.card]
        found.append([*key, row.seconds, row.role, told])
    made = [libraries(), today()]
    return pd.DataFrame([[*row, *made] for row in found], columns=COLUMNS)


def write() -> None:
    """Predict all rows."""
    table = rows()
    told = table["predicted"].map("{:.4g}".format, na_action="ignore")
    replace_file(PREDICTED, table.assign(predicted=told))


def keep() -> None:
    """Keep the first predictions of the rows that judge.

    Raises:
        ValueError: they are kept already.
    """
    if FIRST.exists():
        raise ValueError(f"{FIRST.name} is there, and first predictions are made once")
    table = pd.read_csv(PREDICTED)
    judged = table[(table["role"] == "judged") & table["predicted"].notna()]
    replace_file(FIRST, judged.drop(columns=["seconds", "role"]))


if __name__ == "__main__":
    try:
        keep() if sys.argv[1:] == ["--first"] else write()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
