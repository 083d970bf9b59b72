"""Liger's own kernels on six cards, from the benchmarks of linkedin/Liger-Kernel.

Its table (benchmark/data/all_benchmark_data.csv) holds `max_memory_allocated` of one operation; the
eager rows of it are the set of `liger_operations`. Here the wrappers run as they were released: in
the version that a row names, or in the first release that has the operation, since most rows were
taken on the way to one. Shapes and what is kept are those of benchmark/scripts/ at that time.

The releases are looked for in build/liger:

    for v in 0.2.1 0.3.0 0.4.0 0.4.2 0.5.10 0.6.0 0.6.2 0.6.4 0.7.0 0.8.0 0.8.1 0.8.2; do
        python -m pip install --no-deps --target build/liger/$v liger-kernel==$v
    done
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest import mock

from evidence.liger_releases import RELEASES, released
from evidence.liger_wrappers import (
    Mlp,
    Near,
    add_rms_norm,
    complex_rope,
    cross_entropy,
    experts,
    group_norm,
    jensen_shannon,
    jensen_shannon_2026,
    kl_divergence,
    layer_norm,
    linear_cross_entropy,
    linear_jensen_shannon,
    megatron_cross_entropy,
    megatron_rms_norm,
    megatron_swiglu,
    mlp,
    neighbourhood,
    rms_norm,
    rope,
    several_tokens,
    sparsemax,
    total_variation,
)
from evidence.sources.liger_operations import (
    A100,
    B200,
    H100,
    H100_PCIE,
    RTX_3090,
    RTX_4090,
    peak_of_a_pass,
)
from fake_cuda.choices import triton

GATED = {"geglu": "geglu.LigerGEGLUMLP", "swiglu": "swiglu.LigerSwiGLUMLP"}
TILED = {"geglu": "LigerTiledGEGLUMLP", "swiglu": "LigerTiledSwiGLUMLP"}
MODES = {"": "full", " forward": "forward", " backward": "backward"}
TOKENS, WIDTHS = (1024, 2048, 4096, 8192), (1024, 2048, 4096, 8192, 16384)
CLASSES = (4096, 8192, 16384, 32768, 65536, 131072)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
NEAR = {
    "hidden 512, dilation 1": Near(2, 512, 8, 7, 1),
    "hidden 512, dilation 2": Near(2, 512, 8, 7, 2),
    "hidden 768, dilation 1": Near(4, 768, 12, 7, 1),
    "hidden 1024, dilation 1": Near(2, 1024, 16, 9, 1),
}


class Rows(NamedTuple):
    """Runs of one operation, by what varies."""

    release: str
    card: tuple[int, int, int]
    operation: Callable
    values: tuple[int, ...]


def of_mlps() -> Iterator[tuple[str, Rows]]:
    for word, mode in MODES.items():
        geglu = Mlp(GATED["geglu"], 8)
        yield f"geglu{word}, T", Rows("0.2.1", A100, partial(mlp, geglu, mode), TOKENS)
        for kind, name in GATED.items():
            plain = Mlp(name, 2, 2048, 4096)
            tiled = Mlp(f"tiled_mlp.{TILED[kind]}", 2, 2048, 4096, 4)
            for which, sizes in {"": plain, " tiled": tiled}.items():
                run = partial(mlp, sizes, mode)
                yield f"tiled_{kind}{which}{word}, T", Rows("0.6.4", RTX_4090, run, WIDTHS)
    swiglu = Mlp(GATED["swiglu"], 4)
    yield "swiglu, T", Rows("0.2.1", A100, partial(mlp, swiglu, "full"), TOKENS)


def of_experts() -> Iterator[tuple[str, Rows]]:
    tokens, numbers = tuple(2**k for k in range(7, 16)), (8, 16, 32, 64, 128)
    for word, mode in MODES.items():
        by_tokens = partial(_experts_by_tokens, mode)
        yield f"fused_moe{word}, T", Rows("0.8.0", H100, by_tokens, tokens)
        by_number = partial(experts, 8192, mode=mode)
        yield f"fused_moe{word}, E", Rows("0.8.0", H100, by_number, numbers)


def _experts_by_tokens(mode: str, tokens: int) -> Callable:
    return experts(tokens, 128, mode)


def of_attention() -> Iterator[tuple[str, Rows]]:
    for card, name in ((RTX_3090, "RTX 3090"), (H100, "H100")):
        for words, sizes in NEAR.items():
            run = f"fused_neighborhood_attention {words} on {name}, seq_len"
            yield run, Rows("0.6.0", card, partial(neighbourhood, sizes), LENGTHS)
    lengths = (32, 64, 128, 256, 512, 1024)
    for word, sparse in {"": False, "sparse_": True}.items():
        run = partial(several_tokens, sparse=sparse)
        yield f"{word}multi_token_attention, L", Rows("0.6.0", RTX_3090, run, lengths)


def _by_hidden(rotate: Callable) -> Callable:
    return lambda hidden: rotate(hidden, 2048)


def _by_length(rotate: Callable) -> Callable:
    return lambda length: rotate(8192, length)


OPERATIONS = (
    {
        "cross_entropy, V": Rows("0.2.1", A100, cross_entropy, CLASSES),
        "fused_linear_cross_entropy, BT": Rows(
            "0.4.2", A100, linear_cross_entropy, (4096, 8192, 16384, 32768)
        ),
        "kl_div, V": Rows("0.3.0", H100_PCIE, kl_divergence, CLASSES),
        "jsd, V": Rows("0.4.0", H100_PCIE, jensen_shannon, CLASSES),
        "jsd, BT": Rows("0.8.0", B200, jensen_shannon_2026, TOKENS),
        "fused_linear_jsd, BT": Rows("0.4.0", H100, linear_jensen_shannon, TOKENS),
        "tvd, V": Rows("0.7.0", H100, total_variation, CLASSES),
        "layer_norm on A100-80GB, N": Rows("0.3.0", A100, layer_norm, WIDTHS),
        "layer_norm on H100, N": Rows("0.6.1", H100, layer_norm, WIDTHS),
        "rms_norm, H": Rows("0.2.1", A100, rms_norm, (*WIDTHS, 32768)),
        "sparsemax, V": Rows("0.5.10", RTX_3090, sparsemax, (*WIDTHS, 32768)),
        "rope, H": Rows("0.2.1", A100, _by_hidden(rope), (512, 2048, 8192)),
        "rope, T": Rows("0.2.1", A100, _by_length(rope), WIDTHS),
        "llama4_rope, H": Rows("0.6.2", H100, _by_hidden(complex_rope), (512, 2048, 8192)),
        "llama4_rope, T": Rows("0.6.2", H100, _by_length(complex_rope), WIDTHS),
        "megatron_rms_norm, H": Rows("0.8.1", H100, megatron_rms_norm, WIDTHS),
        "megatron_cross_entropy, V": Rows("0.8.1", H100, megatron_cross_entropy, CLASSES),
        **{
            f"group_norm{word}, C": Rows(
                "0.7.0", B200, group_norm, tuple(2**k for k in range(5, 12))
            )
            for word in MODES  # the script takes no notice of the mode
        },
        **{
            f"fused_add_rms_norm {word}, H": Rows(
                "0.7.0", H100, partial(add_rms_norm, fused=fused), (*WIDTHS, 32768)
            )
            for word, fused in {"fused_add_rms_norm": True, "rms_norm": False}.items()
        },
        **{
            f"megatron_swiglu{word}, ffn_local": Rows(
                "0.8.2", H100, partial(megatron_swiglu, in_place=bool(word)), (*WIDTHS, 32768)
            )
            for word in ("", " in_place")
        },
    }
    | dict(of_mlps())
    | dict(of_experts())
    | dict(of_attention())
)


def runs() -> Iterator[tuple[str, Callable]]:
    """Each run's name, and a function that predicts what was allocated."""
    if not RELEASES.is_dir():
        raise ImportError("the releases of Liger are not in build/liger: see this module's text")

    def predict(rows: Rows, n: int):
        # Of ten passes the median counts: an autotuner tries its configurations in the first.
        with released(rows.release), mock.patch.object(triton, "TUNING_SCRATCH", 0):
            return {"allocated": peak_of_a_pass(lambda: rows.operation(n), rows.card)}

    for name, rows in OPERATIONS.items():
        for n in rows.values:
            yield f"{name} {n}", partial(predict, rows, n)


PEAKS = {"liger-kernels": runs}
