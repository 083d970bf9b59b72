"""Write into README.md how far to trust a prediction, counted from the recorded rows.

    python -m evidence readme

Blind errors come first: predictions that were committed before anything was changed for their rows.
The words between the two marks in the README are made here and never edited there.
"""

import re

import pandas as pd

from evidence import second_blind, web_calculators
from evidence.compare import errors
from evidence.tables import DATA, ROOT
from fake_cuda.constants import (
    ASSUMED,
    CALIBRATED,
    CONSTANTS,
    ELEVEN_HOSTS,
    FIRST_ROWS,
    SOURCED,
    listed,
)
from helpers.runs import load

README = ROOT / "README.md"
BEGIN, END = "<!-- made by evidence/trust.py -->\n", "<!-- to here -->\n"
KEY = ["set", "run", "quantity"]
KERNELS = "liger-kernels"  # one operation a row: many are exact, and they are no training runs
HEAD = (
    "| predicted | rows | sets | median error | median of the sets | nine of ten within "
    "| worst |\n|---|---|---|---|---|---|---|\n"
)


def percent(share: float) -> str:
    """Two digits that count: 0.04 %, 3.2 %, 25 %."""
    n = 100 * share
    return f"{n:.2f} %" if n < 1 else f"{n:.1f} %" if n < 10 else f"{n:.0f} %"


def line(what: str, rows: pd.DataFrame) -> str:
    """A row of the table; `rows` has set, error (predicted / measured - 1)."""
    sizes = rows["error"].abs()
    sources = sizes.groupby(rows["set"]).median()
    found = [sizes.median(), sources.median(), sizes.quantile(0.9), sizes.max()]
    return f"| {what} | {len(rows)} | {len(sources)} | {' | '.join(map(percent, found))} |\n"


def peaks() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Rows of memory without single kernels: all, those that judge, the blind ones as first
    predicted."""
    table = pd.read_csv(DATA / "real_cards.csv").query("set != @KERNELS")
    judged = table[table["role"] == "judged"]
    judged = judged.assign(error=judged["predicted"] / judged["measured"] - 1)
    return table, judged, _blind("blind_peaks", table)


def _blind(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """Rows of memory as they were first predicted, with their error."""
    blind = pd.read_csv(DATA / f"{name}.csv").merge(table[[*KEY, "measured"]], on=KEY)
    return blind.assign(error=blind["predicted"] / blind["measured"] - 1)


def kernels() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Memory of single Triton kernels: today's predictions, and the blind ones."""
    table = pd.read_csv(DATA / "real_cards.csv").query("set == @KERNELS")
    judged = table[table["role"] == "judged"]
    today = judged.assign(error=judged["predicted"] / judged["measured"] - 1)
    return today, _blind("blind_kernels", table)


def kernel_times() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Seconds of single kernels: today's predictions, and the blind ones, in the table's order."""
    names = ["set", "what", "pass", "type", "shape", "card"]
    table = pd.read_csv(DATA / "kernel_times.csv").rename(columns={"table": "set"})
    blind = pd.read_csv(DATA / "blind_kernel_times.csv").rename(columns={"table": "set"})
    judged = table[table["role"] == "judged"]
    of_blind = set(map(tuple, blind[names].astype(str).values))
    same = [tuple(row) in of_blind for row in judged[names].astype(str).values]
    blind = blind.assign(seconds=judged["seconds"][same].to_numpy())
    today = judged.dropna(subset="predicted")
    return tuple(t.assign(error=t["predicted"] / t["seconds"] - 1) for t in (today, blind))


def several() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Memory of one card among several: today's predictions, and the blind ones."""
    table = pd.read_csv(DATA / "several_cards.csv")
    judged = table[table["role"] == "judged"]
    today = judged.assign(error=judged["predicted"] / judged["measured"] - 1)
    return today, _blind("blind_several_cards", table)


def steps() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The judged rows of time, and the blind ones as they were first predicted."""
    table = pd.read_csv(DATA / "speeds.csv")
    judged = table[table["role"] == "judged"].dropna(subset="predicted")
    judged = judged.assign(error=judged["predicted"] / judged["seconds"] - 1)
    blind = pd.read_csv(DATA / "blind_speeds.csv").merge(
        table[["set", "run", "seconds"]], on=["set", "run"]
    )
    return judged, blind.assign(error=blind["predicted"] / blind["seconds"] - 1)


def own() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Runs of our own cards that were announced before: memory, and time where it was taken."""
    announced = pd.concat(pd.read_csv(path) for path in sorted(DATA.glob("announced_*.csv")))
    measured = load("measured").query("outcome == 'measured'")
    keys = ["section", "run", "torch", "transformers"]
    both = measured.merge(announced, on=keys, suffixes=("", "_before")).assign(set="own")
    memory = both.assign(error=both["predicted_allocated_before"] / both["peak_allocated"] - 1)
    timed = both.dropna(subset="samples_per_second")
    samples = timed["predicted_seconds"] * timed["predicted_samples_per_second_before"]
    timed = timed.assign(seconds=samples / timed["samples_per_second"])
    return memory, timed.assign(error=timed["predicted_seconds"] / timed["seconds"] - 1)


def rows_of_our_own(memory: pd.DataFrame, timed: pd.DataFrame) -> str:
    """What the announced runs say beyond their errors."""
    announced = sum(len(pd.read_csv(path)) for path in DATA.glob("announced_*.csv"))
    cards = " and ".join(sorted(memory["card"].unique()))
    reserved = (memory["predicted_reserved_before"] / memory["peak_reserved"] - 1).abs()
    off = memory[memory["error"].abs() > 0.03].sort_values("error", key=abs, ascending=False)
    low, high = timed["predicted_low"], timed["predicted_high"]
    inside = timed["seconds"].between(low, high).mean()
    slower = (timed["seconds"] / timed["predicted_seconds"]).groupby(timed["limited_by"]).median()
    text = f"On a machine of ours with an {cards.removeprefix('NVIDIA ')}, {len(memory)} of "
    text += f"{announced} announced runs were measured after their predictions were committed "
    text += "([announced](data/announced_h100.csv), "
    text += "[measured](data/measurements/h100-80gb-hbm3.csv)): allocated memory as in the table, "
    text += f"reserved memory {percent(reserved.median())} off in the median. More than 3 % off "
    text += f"are {len(off)}: {', '.join(off['run'])}. They showed two rules that were wrong (the "
    text += "loss under autocast, and attention with dropout in compiled code) and are mended, and "
    text += "three things that nothing here counts: what cuDNN tries, what its recurrent layers "
    text += "keep, and how compiled products are padded. The rows stay as they were predicted. The "
    text += "machine's host is slow: steps that wait for it took "
    text += f"{slower['host']:.1f} times as long as predicted in the median, the others "
    others = timed[timed["limited_by"] != "host"]
    text += f"{(others['seconds'] / others['predicted_seconds']).median():.1f} times, and "
    return text + f"{100 * inside:.0f} % lay in their range."


def rows_of_memory(table: pd.DataFrame, judged: pd.DataFrame) -> str:
    """Whose rows of memory these are, and what is not among them."""
    roles = table["role"].value_counts()
    peft = judged["set"].str.startswith("peft").sum()
    unnamed = judged["card"].isna().sum()
    runs = judged.groupby(["set", "run"]).ngroups
    cards = judged["card"].nunique()
    t4 = "T4" in set(judged["card"]) | set(steps()[0]["card"])
    text = "A set is what one source measured, mostly on one card. "
    text += f"The {len(judged)} rows of memory that judge are of {runs} runs on at least {cards} "
    text += f"kinds of card; {peft} are of one repository (PEFT's comparison, on an L40S), and "
    text += f"{unnamed} name no card. {'' if t4 else 'None, of memory or of time, is of a T4. '}"
    text += f"About as many, {roles['excluded']}, are left out, each with its reason, and "
    return text + f"{roles['calibrates']} chose a setting that their source leaves open."


def rows_of_ranks(judged: pd.DataFrame, blind: pd.DataFrame) -> str:
    """What reserved memory of one card among several is off by, and the rest after mends."""
    reserved = blind[blind["quantity"] == "reserved"]["error"]
    mended = judged[judged["quantity"] == "reserved"]["error"].abs()
    allocated = judged[judged["quantity"] != "reserved"]["error"].abs()
    text = f"{len(reserved)} rows of reserved memory of one card among several were "
    text += f"{percent(reserved.abs().median())} off in the median when first predicted, nine of "
    text += f"ten within {percent(reserved.abs().quantile(0.9))}, "
    text += f"{'all' if (reserved < 0).all() else 'not all'} of them too low: the simulation "
    text += "knew one stream. With the streams on which FSDP works, read in its source, they are "
    text += f"{percent(mended.median())} off in the median, nine of ten within "
    text += f"{percent(mended.quantile(0.9))}, and blind no more. What is allocated is "
    return text + f"within {percent(allocated.max())} after one mend."


def rows_of_time(judged: pd.DataFrame, blind: pd.DataFrame) -> str:
    """What else the rows of time say."""
    first, after = errors(blind), errors(judged)
    inside = blind["seconds"].between(blind["low"], blind["high"]).mean()
    text = f"Of the blind times {100 * inside:.0f} % lay in their range; a plain roofline is "
    text += f"{percent(errors(blind, 'roofline')['median'])} off in the median. Of the pairs of "
    text += f"one source that differ by 5 % or more {100 * first['in order']:.0f} % were put in "
    text += f"order ({100 * after['in order']:.0f} % after mends). "
    table = pd.read_csv(DATA / "speeds.csv")
    machines = table.query("limited == 'host' and role != 'excluded'")["set"]
    known = judged[judged["set"].isin(machines)].dropna(subset="told")
    told, untold = (errors(known, column) for column in ("told", "predicted"))
    text += "The largest unknown is the computer that issues the work, which no data sheet "
    text += f"describes: if one timed step tells its speed, {len(known)} other steps of these "
    text += f"machines are, after mends, {percent(told['median'])} off in the median, nine in ten "
    return text + f"within {percent(told['90 %'])} ({percent(untold['90 %'])} without it)."


def single_kernels() -> str:
    """How far single kernels were off when they were first predicted, and after mends."""
    today, rows = kernel_times()
    sizes, later = rows["error"].abs(), today["error"].abs()
    text = (
        f"{len(rows)} passes of single operations on {rows['card'].nunique()} kinds of card were "
    )
    text += f"{percent(sizes.median())} off in the median when first predicted, nine of ten within "
    text += f"{percent(sizes.quantile(0.9))}; {len(today)} of them are {percent(later.median())} "
    return text + f"off after mends, nine of ten within {percent(later.quantile(0.9))}."


def constants() -> str:
    """How many constants of time are measurements."""
    status = pd.Series([constant.status for constant in listed(CONSTANTS)]).value_counts()
    text = f"Of the {status.sum()} constants behind a predicted time {status[SOURCED]} are "
    ends = sum(constant.source == FIRST_ROWS for constant in listed(CONSTANTS))
    text += f"measured or documented by others, {status[ASSUMED]} are assumed, and "
    named = sum(constant.source.endswith(ELEVEN_HOSTS) for constant in listed(CONSTANTS))
    text += f"{status[CALIBRATED]} were chosen by named rows "
    text += "([data/speed_constants.csv](data/speed_constants.csv)). Such rows do not judge, with "
    text += f"two exceptions. The {ends} ends of a card's range were chosen on the first 70 rows "
    text += f"of time, most of which judge. {named} numbers of the host, its usual speed and its "
    return text + "range among them, were chosen by eleven rows, of which six judge."


def calculators() -> str:
    """The usual calculators on the same runs, and peers."""
    rows = pd.read_csv(DATA / "calculators.csv")
    ways = [
        "formula",
        "sixteen_bytes",
        "accelerate",
        "kitsune",
        "mem_tracker",
        *web_calculators.WAYS,
    ]
    sizes = (rows[[*ways, "predicted"]].div(rows["measured"], axis=0) - 1).abs()
    medians = sizes.median()
    middle, web = medians.map(percent), medians[[*web_calculators.WAYS]]
    text = f"On {len(rows)} runs of one card each the usual calculators are off in the median by "
    text += f"{middle['formula']} (a formula with activations), {middle['sixteen_bytes']} (16 "
    text += f"bytes a parameter), {middle['accelerate']} (`accelerate estimate-memory`, which "
    text += f"knows neither activations nor LoRA), {middle['kitsune']} (torch-kitsune, which knows "
    text += f"no length of a text), {percent(web.min())} to {percent(web.max())} (five of the web) "
    text += f"and {middle['mem_tracker']} (PyTorch's `MemTracker`, on the "
    text += f"{rows['mem_tracker'].count()} that train all weights). Predicting the real code is "
    text += f"at worst {percent(sizes['predicted'].max())} off. That was no blind test: some of "
    text += "these runs had exposed missing rules of ours. Lesson 17 says what each leaves out, "
    return text + "and what it has that the course has not."


def words() -> str:
    """What stands between the marks."""
    table, judged, blind = peaks()
    timed, blind_timed = steps()
    reserved = judged[judged["quantity"].str.startswith("reserved")]
    lines = HEAD + line("**memory, blind**", blind) + line("**time of a step, blind**", blind_timed)
    second = second_blind.rows()
    if second is not None:
        lines += line("**time of a step, second blind test**", second)
    memory, timed_here = own()
    lines += line("**memory, blind, on our own card**", memory)
    lines += line("**time of a step, blind, on our own card**", timed_here)
    triton, blind_triton = kernels()
    ranks, blind_ranks = several()
    allocated = blind_ranks[blind_ranks["quantity"] != "reserved"]
    lines += line("**allocated memory of one card of several, blind**", allocated)
    lines += line("**memory of one Triton kernel, blind**", blind_triton)
    lines += line("memory, after mends", judged) + line("of it, reserved memory", reserved)
    lines += line("time of a step, after mends", timed)
    lines += line("memory of one Triton kernel, after mends", triton)
    time = rows_of_time(timed, blind_timed)
    if second is not None:
        time += f" {second_blind.words(second, percent)}."
    about = {
        "Whose rows": rows_of_memory(table, judged),
        "Our own card": rows_of_our_own(memory, timed_here),
        "Time": f"{time} {single_kernels()} {constants()}",
        "One card of several, and calculators": f"{rows_of_ranks(ranks, blind_ranks)} "
        + calculators(),
    }
    points = [f"- **{name}.** {text}" for name, text in about.items()]
    return "\n".join([lines, *points]) + "\n"


def rewrite(text: str) -> str:
    """README.md with today's words; LookupError without the marks."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(text):
        raise LookupError(f"README.md has no part between {BEGIN.strip()} and {END.strip()}")
    return pattern.sub(lambda _: f"{BEGIN}{words()}{END}", text)


def write() -> None:
    README.write_text(rewrite(README.read_text(encoding="utf-8")), encoding="utf-8")
