"""The minutes in README and lessons are those of `data/minutes.csv`."""

from types import SimpleNamespace

import pytest

import notebook_rules as rules
from tools import minutes

LESSONS = sorted((minutes.ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_readme_and_lesson_say_the_minutes_of_the_table(path):
    readme = (minutes.ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = (line for line in readme.splitlines() if line.startswith(f"| {path.name[:2]} |"))
    assert f"|{minutes.columns(path.stem)}|" in row
    opening = "\n".join(cell.source for cell in rules.read(path).cells[:3])
    assert minutes.sentence(path.stem) in opening


def test_a_t4_adds_the_time_of_the_samples_and_of_the_models():
    row = SimpleNamespace(seconds=60, samples=0, models=0, build_seconds=5)
    plain = minutes.t4_seconds(row)
    row.models, row.samples = 2, 100
    slower = 900 / 320  # GB/s of a V100 and a T4: more than the ratio of their fp32 rates
    assert plain == 60 and minutes.t4_seconds(row) == pytest.approx(70 + 100 / 8.86 * slower)
