"""Pictures: alternative text, figures told apart without colour, sources as they are."""

import types

import matplotlib
import matplotlib.font_manager
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from evidence import picture
from helpers import show
from helpers.runs import CATEGORIES
from planner import report

GIB = 2**30


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, and each figure as it was when it was saved."""
    found = types.SimpleNamespace(displayed=[], figures=[])
    monkeypatch.setattr(show, "display", lambda obj, **rest: found.displayed.append((obj, rest)))
    close = plt.close
    monkeypatch.setattr(plt, "close", lambda fig: (found.figures.append(fig), close(fig)))
    return found


def test_a_figure_is_a_png_with_alternative_text_and_is_closed(shown):
    fig, _ = plt.subplots()
    show.figure(fig, "It falls.")
    (image, rest), _ = shown.displayed
    assert image.data.startswith(b"\x89PNG")
    assert rest == {"metadata": {"image/png": {"alt": "It falls."}}}
    assert not plt.fignum_exists(fig.number)


def test_the_words_also_follow_for_viewers_that_drop_them(shown):
    show.figure(plt.figure(), "Below 1 & above <0>.")
    words = shown.displayed[1][0].data
    assert words.startswith("<details>") and "Below 1 &amp; above &lt;0&gt;." in words


def test_pictures_ask_for_nothing_that_ipython_7_lacks(shown, monkeypatch):
    def image(  # the signature of IPython 7.34, which Colab brings
        data=None, url=None, filename=None, format=None, embed=None, width=None, height=None,
        retina=False, unconfined=False, metadata=None,
    ):  # fmt: skip
        return data

    monkeypatch.setattr(show, "Image", image)
    show.figure(plt.figure(), "It falls.")
    assert shown.displayed[0][0].startswith(b"\x89PNG")


def test_lines_are_told_apart_without_colour(shown):
    ax = pd.DataFrame(np.eye(6)).plot()
    dashes = {str(line._unscaled_dash_pattern) for line in ax.lines}  # "--" for all but solid
    assert len(dashes) == len({line.get_color() for line in ax.lines}) == 6
    show.figure(ax.figure, "Six lines.")


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, as WCAG 2.2 defines it."""
    values = [np.array(matplotlib.colors.to_rgb(colour)) for colour in (one, other)]
    linear = [np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4) for v in values]
    low, high = sorted(v @ (0.2126, 0.7152, 0.0722) for v in linear)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_definition():
    assert contrast("black", "white") == pytest.approx(21) == contrast("white", "black")
    assert contrast("#767676", "white") == pytest.approx(4.54, abs=0.01)  # the known grey


def test_every_colour_stands_out_from_the_white_that_pictures_are_drawn_on():
    for colour in {*show.COLOURS.values(), *show.LINES.by_key()["color"], *picture.PALETTE}:
        assert contrast(colour, "white") >= 3, colour  # 3:1 for graphical objects
    settings = plt.rcParams
    for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"):
        colour = settings["text.color"] if settings[name] == "auto" else settings[name]
        assert contrast(colour, settings["figure.facecolor"]) >= 4.5, name


def test_no_text_of_a_picture_is_smaller_than_8_points():
    sizes = {name: plt.rcParams[name] for name in plt.rcParams if name.endswith("size")}
    texts = {name: size for name, size in sizes.items() if "font" in name or "label" in name}
    points = matplotlib.font_manager.FontProperties
    small = [name for name, size in texts.items() if points(size=size).get_size_in_points() < 8]
    assert texts and not small


def test_each_source_of_the_real_cards_has_its_own_marker_and_colour():
    assert report.judged()["set"].str.split("-").str[0].nunique() <= len(picture.MARKERS)
    assert len(picture.MARKERS) == len(set(picture.MARKERS)) == len(set(picture.PALETTE))


def test_bars_stack_the_categories_and_name_the_total(shown):
    one = dict(zip(CATEGORIES, (n * GIB for n in range(1, 6)), strict=True))
    show.bars({"one": one, "two": {"parameters": GIB // 8}}, "One is longer.", limit=10 * GIB)
    (ax,) = shown.figures[0].axes
    widths = [[patch.get_width() for patch in group] for group in ax.containers]
    assert widths == [[1, 0.125], [2, 0], [3, 0], [4, 0], [5, 0]]
    assert [text.get_text().strip() for text in ax.texts] == ["15.00", "0.125"]
    assert ax.lines[0].get_xdata()[0] == 10
    assert len({group[0].get_hatch() for group in ax.containers}) == len(CATEGORIES)


def test_bars_can_share_an_axis(shown):
    for size in (1, 5):
        show.bars({"": {"parameters": size * GIB}}, "One bar.", end=20 * GIB)
    assert [figure.axes[0].get_xlim() for figure in shown.figures] == [(0, 20)] * 2


def test_a_timeline_draws_each_category_and_names_the_phases(shown):
    bytes_now = np.arange(20).reshape(4, 5) * GIB
    phases = [(0, "forward"), (1, "backward"), (3, "optimizer step")]
    show.timeline(types.SimpleNamespace(timeline=bytes_now, phases=phases), "It rises.")
    (ax,) = shown.figures[0].axes
    assert [area.get_label() for area in ax.collections] == list(CATEGORIES)
    assert [text.get_text().strip() for text in ax.texts] == [name for _, name in phases]
    assert ax.get_ylim()[1] > bytes_now.sum(axis=1).max() / GIB
    assert ax.lines[0].get_marker() == "o" and ax.lines[0].get_xydata().tolist() == [[3, 85]]
    assert "births and deaths of tensors" in ax.get_xlabel()  # which operations are not


def test_a_timeline_can_be_drawn_to_the_scale_of_time(shown):
    bytes_now, phases = np.ones((3, 5)) * GIB, [(0, "forward"), (2, "backward")]
    step = types.SimpleNamespace(timeline=bytes_now, phases=phases, device="A100", note="")
    step.step_seconds, step.seconds = 0.4, np.array([0.0, 0.1, 0.4])
    show.timeline(step, "It lasts.", time=True)
    (ax,) = shown.figures[0].axes
    assert ax.get_xlim() == (0, 400)
    assert [line.get_xdata()[0] for line in ax.lines[1:]] == [0, 100]
    assert "predicted for A100" in ax.get_xlabel()
    step.step_seconds = None
    with pytest.raises(ValueError, match="name a card"):
        show.timeline(step, "It cannot.", time=True)


def test_two_timelines_can_have_one_height(shown):
    phases = [(0, "forward")]
    for peak in (10, 40):
        bytes_now = np.full((4, 5), peak // 5) * GIB
        step = types.SimpleNamespace(timeline=bytes_now, phases=phases)
        show.timeline(step, "One is higher.", top=40 * GIB)
    low, high = (figure.axes[0].get_ylim() for figure in shown.figures)
    assert low == high and 40 < high[1] < 50
