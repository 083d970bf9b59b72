"""Tables of what others measured, and of roles: filled by hand, with a source."""

import hashlib
import re

import pandas as pd

from evidence.schemas.checking import (
    ANY,
    CARD,
    DAY,
    FILLED,
    NUMBER,
    POSITIVE,
    WHOLE,
    cell,
    columns,
    fault,
    known_cards,
    needs,
    one_of,
    table,
    whole,
)

ROLE = cell(one_of("judged", "calibrates", "excluded"))
SOURCE = {"source": FILLED}
DATE = {"date": cell(DAY)}
VERSIONS = {"torch": FILLED, "transformers": FILLED}

NINE_RUNS = {  # of the table of the guides
    *("vanilla", "accumulation", "accumulation + checkpointing", "fp16", "Adafactor"),
    *("fp16 + accumulation + checkpointing", "8-bit Adam"),
    "Adafactor + fp16 + accumulation + checkpointing",
    "8-bit Adam + fp16 + accumulation + checkpointing",
}

NEEDS_REASON = needs(
    "reason", lambda rows: rows["role"] != "judged", "and a row that does not judge needs a reason"
)
ROLES_AND_WORDS = {"role": ROLE, **columns(ANY, "reason remark"), **SOURCE}

PEAKS = columns(FILLED, "set run") | {"card": cell(CARD, empty=True), "quantity": FILLED}
PEAKS |= {"measured": cell(POSITIVE), **columns(ANY, "torch transformers peft model settings")}
PEAKS |= ROLES_AND_WORDS
SPEEDS = columns(FILLED, "set run") | {"card": cell(CARD), "seconds": cell(POSITIVE)}
SPEEDS |= {"limited": cell(one_of("host"), empty=True), "torch": ANY}
SPEEDS |= columns(FILLED, "model settings") | ROLES_AND_WORDS


def rate_and_time_differ(rows: pd.DataFrame) -> pd.Series:
    """Of the guides' table, whose both numbers are printed to two decimals: 512 samples a run."""
    own = rows["set"] == "guide-2022"
    seconds, rate = (pd.to_numeric(rows[n], "coerce") for n in ("seconds", "samples_per_second"))
    return own & ~((512 / seconds - rate).abs() <= 0.005 + 512 * 0.005 / seconds**2)


def not_on_a_v100(rows: pd.DataFrame) -> pd.Series:
    """More than the CUDA context and the model, less than the card."""
    memory = pd.to_numeric(rows["memory"], "coerce")
    inside = memory.between(2631, 16160, inclusive="neither") & (rows["memory_unit"] == "MiB")
    return (rows["set"] == "guide-2022") & ~inside


def published():
    found = columns(FILLED, "set run") | columns(ANY, "gpu model settings")
    found |= columns(cell(POSITIVE, empty=True), "seconds samples_per_second tokens_per_second")
    found |= {"memory": cell(POSITIVE, empty=True)}
    found |= {"memory_unit": cell(one_of("MiB", "GB", "GiB"), empty=True)}
    found |= {"memory_kind": cell(one_of("allocated", "reserved", "used"), empty=True)}
    found |= columns(ANY, "torch transformers date") | SOURCE | {"note": ANY}
    has, unit = (lambda rows: rows["memory"] != ""), (lambda rows: rows["memory_unit"] != "")
    return table(
        found,
        "set run",
        fault("memory_unit", lambda rows: has(rows) != unit(rows), "and memory has or lacks one"),
        fault("seconds", rate_and_time_differ, "and 512 samples in it are not samples_per_second"),
        fault("memory", not_on_a_v100, "which is not between a model and a V100, in MiB"),
        whole(
            lambda rows: set(rows["run"][rows["set"] == "guide-2022"]) == NINE_RUNS,
            "the set guide-2022 is not the nine runs of the guides' table",
        ),
    )


def kernels():
    found = {"kernel": FILLED, "card": cell(CARD), "type": ANY}
    found |= columns(cell(WHOLE, empty=True), "batch rows columns inner bytes")
    return table(found | {"seconds": cell(POSITIVE)} | SOURCE)


def drawn(row: pd.Series) -> bool:
    """Whether a kernel of the H100 judges: its name's hash begins with an even digit."""
    name = " / ".join(row[["kind", "what", "type", "shape"]])
    return int(hashlib.sha256(name.encode()).hexdigest()[0], 16) % 2 == 0


def not_as_drawn(rows: pd.DataFrame) -> pd.Series:
    judged = (rows["kind"] != "host") & rows.apply(drawn, axis=1)
    return (rows["role"] == "judged") != judged


def kernels_h100():
    found = {"kind": cell(one_of("product", "traffic", "attention", "host")), "what": FILLED}
    found |= columns(ANY, "layout type shape") | {"seconds": cell(POSITIVE)}
    found |= {"work": cell(POSITIVE, empty=True), "role": ROLE, "reason": ANY, "card": cell(CARD)}
    found |= columns(FILLED, "torch cuda") | DATE | SOURCE
    work = needs("work", lambda rows: rows["kind"] != "host", "though no row of the host")
    roles = fault("role", not_as_drawn, "which was not drawn")
    return table(found, "kind what layout type shape", work, roles, NEEDS_REASON)


def kernels_liger():
    found = columns(FILLED, "operation provider pass of size settings") | {"card": cell(CARD)}
    found |= {"seconds": cell(POSITIVE), "role": ROLE, "reason": ANY, "liger_version": FILLED}
    keys = "operation provider pass of size settings card"
    return table(found | DATE | SOURCE, keys, NEEDS_REASON)


def methods():
    found = columns(FILLED, "run method") | {"gpu": cell(CARD)} | columns(FILLED, "model settings")
    found |= columns(cell(POSITIVE), "seconds reserved") | {"accuracy": cell(NUMBER)}
    found |= {"trained": cell(WHOLE)} | VERSIONS | {"peft": FILLED} | DATE | SOURCE
    return table(found, "run")


def gpus():
    rates = "fp32_tflops tf32_tflops fp16_tflops bf16_tflops fp32_reached_tflops "
    rates += "tf32_reached_tflops fp16_reached_tflops bf16_reached_tflops cuda_context_mib"
    found = {"name": FILLED, **columns(cell(POSITIVE), "memory_mib compute_capability")}
    found |= columns(cell(POSITIVE, empty=True), "sms bandwidth_gb_s bandwidth_reached_gb_s")
    return table(found | columns(cell(POSITIVE, empty=True), rates) | SOURCE, "name")


def of_roles(**more):
    keys = {"table": cell(one_of("peaks", "speeds", "several_cards")), **columns(FILLED, "set run")}
    return table(keys | {"quantity": ANY} | more, "table set run quantity")


def first_roles():
    return of_roles(role=ROLE)


def role_changes():
    return of_roles(was=ROLE, role=ROLE, date=cell(DAY), why=FILLED)


def out_of_memory():
    found = columns(FILLED, "cause asked capacity free allocated reserved_unallocated")
    return table(found | DATE | SOURCE)


def peaks():
    return table(PEAKS, "set run quantity", NEEDS_REASON)


def speeds():
    return table(SPEEDS, "set run", NEEDS_REASON)


# ------------------------------------------------------------------- what make gpu measured
OUTCOMES = ("measured", "out of memory", "failed", "skipped")  # then a colon and more


def on_a_card(names: list[str]):
    """The rows of the kit, whose columns are `names`, as somebody contributes them."""
    numbers = ("peak", "seconds", "samples", "tokens")
    found = {n: cell(POSITIVE, empty=True) if n.startswith(numbers) else ANY for n in names}
    found |= {"card": cell(A_GPU, KNOWN_CARD), "torch": FILLED, "transformers": FILLED}
    found |= {"date": cell(DAY), "outcome": cell(OUTCOME)}
    peak = needs("peak_allocated", lambda rows: rows["outcome"] == "measured", "though measured")
    return table(found, "section run torch transformers date", peak)


def _words(name: str) -> set[str]:
    return set(re.split("[ -]", name.upper()))


def _known(card: str) -> bool:
    """Whether the driver's name of a card has all words of a name in data/gpus.csv."""
    return not _a_gpu(card) or any(_words(name) <= _words(card) for name in known_cards())


def _a_gpu(card: str) -> bool:
    return not _words(card) <= {"", "CPU"}


A_GPU = (_a_gpu, "is no card: rows of a CPU are not taken")
KNOWN_CARD = (_known, "is not in data/gpus.csv: add its line there, with a source")
OUTCOME = (lambda text: text.split(":")[0] in OUTCOMES, "is none of the kit's")
