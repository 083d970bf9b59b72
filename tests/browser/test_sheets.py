"""The sheets for a class, printed: each is one page. `make test-browser`."""

import re

import pytest

from tools import sheets

PAGE = re.compile(rb"/Type\s*/Page\b")
NAMES = ["cheat_sheet", "handout_the_half_day", "handout_one_day", "handout_two_days"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sheets")
    assert sheets.main(target=folder) == 0
    assert {path.stem for path in folder.iterdir()} == set(NAMES)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_sheet_prints_on_one_page(name, made, chromium):
    page = chromium.new_page()
    page.goto((made / f"{name}.html").as_uri())
    printed = page.pdf(prefer_css_page_size=True)
    assert len(PAGE.findall(printed)) == 1
    page.close()
