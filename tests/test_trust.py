"""README.md says how far to trust a prediction, in words counted from the recorded rows."""

import re

import pandas as pd
import pytest

from evidence import trust

README = trust.README.read_text(encoding="utf-8")


def test_the_readme_says_what_the_rows_say():
    assert trust.rewrite(README) == README, "run evidence/trust.py"


def test_blind_figures_come_first_and_the_page_stays_short():
    words = trust.words()
    blind, mended = (words.index(name) for name in ("memory, blind", "memory, after mends"))
    assert blind < mended and words.index("time of a step, blind") < mended
    assert len(README.splitlines()) < 120
    first = README.split("\n## ")[0]
    assert "built without a GPU" in first and "median" not in first
    assert README.index("## Start") < README.index("## How far to trust it")


def test_a_row_is_counted_by_hand():
    rows = pd.DataFrame({"set": ["a", "a", "b"], "error": [0.01, -0.03, 0.002]})
    found = [cell.strip() for cell in trust.line("x", rows).split("|")[1:-1]]
    assert found == ["x", "3", "2", "1.0 %", "1.1 %", "2.6 %", "3.0 %"]


@pytest.mark.parametrize(
    ("share", "text"), [(0.0004, "0.04 %"), (0.032, "3.2 %"), (0.249, "25 %"), (2.54, "254 %")]
)
def test_percent_shows_the_digits_that_count(share, text):
    assert trust.percent(share) == text


def test_words_that_no_longer_hold_are_seen():
    """The planted defects: a better figure typed by hand, and a part that was taken out."""
    better = re.sub(r"(\*\*memory, blind\*\* \| \d+ \| \d+ \| )[\d.]+", r"\g<1>0.01", README)
    assert better != README and trust.rewrite(better) == README
    with pytest.raises(LookupError, match="no part"):
        trust.rewrite(README.replace(trust.BEGIN, ""))
