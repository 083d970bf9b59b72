"""Tables of what we predicted: only `make evidence` writes them."""

from evidence.schemas.checking import (
    ANY,
    CARD,
    DAY,
    FILLED,
    HASH,
    NUMBER,
    POSITIVE,
    WHOLE,
    cell,
    columns,
    needs,
    one_of,
    table,
)
from evidence.schemas.measured import DATE, NEEDS_REASON, PEAKS, SPEEDS, VERSIONS

LIMITS = ("host", "matrix products", "attention", "memory traffic", "copies")


def made(may_be_empty: bool) -> dict:
    """What made a row. Rows from before there were hashes have none."""
    known = {"predicted_with": cell(empty=may_be_empty), "date": cell(DAY, empty=may_be_empty)}
    return known | {"code_hash": cell(HASH, empty=True)}


def beside(measured: dict, after: str, **own) -> dict:
    """The columns of predictions beside what was measured; `own` stand behind `after`."""
    at = list(measured).index(after) + 1
    first, last = (
        dict(part) for part in (list(measured.items())[:at], list(measured.items())[at:])
    )
    return first | own | last | made(may_be_empty=True)


HAS_PREDICTION = needs(
    "predicted", lambda rows: rows["role"] != "excluded", "and only excluded rows have none"
)


def real_cards():
    found = beside(PEAKS, "measured", predicted=cell(WHOLE, empty=True))
    return table(found, "set run quantity", NEEDS_REASON, HAS_PREDICTION)


def speeds():
    seconds, share = cell(POSITIVE, empty=True), cell(NUMBER, empty=True)
    own = columns(seconds, "predicted low high") | {"limited_by": cell(one_of(*LIMITS), empty=True)}
    own |= {"host_share": share, **columns(seconds, "roofline fused host told")}
    own |= {"told_limited_by": cell(one_of(*LIMITS), empty=True)}
    found = beside(SPEEDS, "source", **own)
    return table(found, "set run", NEEDS_REASON, HAS_PREDICTION)


def blind_kernel_times():
    found = columns(FILLED, "table what") | columns(ANY, "pass type") | {"shape": FILLED}
    found |= {"card": cell(CARD), "predicted": cell(POSITIVE), "predicted_with": FILLED}
    return table(found | DATE)


def kernel_times():
    found = columns(FILLED, "table what") | columns(ANY, "pass type") | {"shape": FILLED}
    found |= {"settings": ANY, "card": cell(CARD), "seconds": cell(POSITIVE)}
    found |= {"role": cell(one_of("judged", "calibrates")), "predicted": cell(POSITIVE, empty=True)}
    keys = "table what pass type shape settings card"
    return table(found | {"predicted_with": FILLED} | DATE, keys)


def predictions():
    share, seconds = cell(NUMBER, empty=True), cell(POSITIVE, empty=True)
    found = columns(FILLED, "set run") | {"variant": ANY}
    found |= columns(FILLED, "device workload") | {"settings": ANY}
    found |= {"peak_allocated": cell(POSITIVE)}
    found |= columns(cell(NUMBER, empty=True), "peak_reserved used context")
    parts = "parameters gradients optimizer_states activations temporaries"
    found |= columns(cell(NUMBER), parts) | columns(
        seconds, "samples_per_second step_seconds step_low step_high"
    )
    found |= {"limited_by": cell(one_of(*LIMITS), empty=True)}
    found |= columns(share, "host matrix_products attention memory_traffic copies utilisation")
    found |= {"update": share, "fused_seconds": seconds} | VERSIONS | DATE
    return table(found | {"code_hash": cell(HASH, empty=True)}, "set run variant device")


def fits():
    found = columns(FILLED, "model gpu") | columns(cell(WHOLE), "length batch")
    found |= {"fits": cell(one_of("True", "False")), **columns(FILLED, "recipe kind")}
    found |= columns(cell(WHOLE), "micro_batch accumulation need memory peak_allocated parameters")
    found |= dict.fromkeys(["gradients", "optimizer states", "activations"], cell(WHOLE))
    found |= {"temporaries": cell(WHOLE)}
    found |= columns(cell(POSITIVE), "tokens_per_second tokens_low tokens_high")
    found |= {"limited_by": cell(one_of(*LIMITS)), "largest_micro_batch": cell(WHOLE)}
    found |= {"smallest_card": ANY, "price": FILLED, "remedy": ANY, "code": FILLED} | VERSIONS
    miss = needs("remedy", lambda rows: rows["fits"] == "False", "and a miss needs one")
    return table(found | DATE | {"code_hash": cell(HASH, empty=True)}, "model gpu recipe", miss)


def atlas_check():
    found = columns(FILLED, "model family recipe card")
    found |= columns(cell(WHOLE), "length micro_batch accumulation")
    for what in ("allocated_mib", "reserved_mib"):
        found |= columns(cell(WHOLE), f"atlas_{what} full_{what}")
    found |= columns(cell(POSITIVE), "atlas_seconds full_seconds") | VERSIONS | DATE
    keys = "model family recipe length micro_batch accumulation card"
    return table(found | {"code_hash": cell(HASH)}, keys)


def blind(keys: str, **own):
    found = columns(FILLED, keys) | own
    return table(found | {"predicted_with": FILLED} | DATE, keys)


def speed_constants():
    errors = ["rows", "median", "90 %", "ratios", "ratios, 90 %", "pairs", "in order"]
    found = {"constant": FILLED, **dict.fromkeys([*errors, "seconds in all"], cell(NUMBER))}
    words = {"status": cell(one_of("sourced", "calibrated", "assumed"), empty=True), "source": ANY}
    return table(found | {"value": cell(NUMBER, empty=True)} | words, "constant")


def calculators():
    found = columns(FILLED, "set run model") | {"kind": cell(one_of("full", "LoRA"))}
    guesses = "measured predicted accelerate deepspeed sixteen_bytes formula"
    guesses += " kitsune anatomy nairr smirnov eleuther escobar"
    found |= {"mem_tracker": cell(POSITIVE, empty=True)}  # it refuses frozen weights
    return table(found | columns(cell(POSITIVE), guesses), "set run")


def blind_peaks():
    return blind("set run quantity", predicted=cell(WHOLE))


def announced():
    """What `make gpu` will be held to, written down before."""
    found = columns(FILLED, "section run torch transformers workload") | {"card": cell(CARD)}
    found |= {"date": cell(DAY), **columns(ANY, "outcome settings limited_by note context")}
    numbers = "predicted_allocated predicted_reserved predicted_seconds predicted_low "
    numbers += "predicted_high predicted_samples_per_second"
    found |= columns(cell(POSITIVE, empty=True), numbers)
    return table(found, "section run torch transformers")


def blind_speeds():
    seconds = columns(cell(POSITIVE), "predicted low high") | {"limited_by": cell(one_of(*LIMITS))}
    seconds |= {"told": cell(POSITIVE, empty=True), "roofline": cell(POSITIVE)}
    return blind("set run", **seconds)
