"""The reading site in a browser: search, phone, contrast. `make test-browser` after `make site`."""

import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "build" / "browser"
SITE = ROOT / "build" / "site"
AXE = next((ROOT / "build").glob("axe-core-*.tgz"), None)
PAGES = """index docs/look_up docs/teaching docs/will_it_fit notebooks/00_start_here
notebooks/02_where_memory_goes notebooks/07_optimizers notebooks/16_all_together
notebooks/17_will_it_fit notebooks/20_training_dynamics notebooks/measure_your_card
notebooks/solutions/02_where_memory_goes""".split()

if not (SITE / "index.html").exists():
    pytest.skip("no site in build/site: make site", allow_module_level=True)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_phone_and_axe_finds_nothing_serious(name, window, address):
    window.goto(f"{address}/{name}.html")
    assert window.locator("html").get_attribute("data-theme") == window.scheme
    root = "document.documentElement"
    assert window.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), "wider than a phone"
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = f"site-{name.replace('/', '-')}-{window.scheme}.png"
    window.screenshot(path=PICTURES / picture, full_page=True)
    if AXE is None:
        pytest.skip("no axe-core in build: cd build && npm pack axe-core")
    window.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    # What is opened fades in, and pale text is no finding.
    window.evaluate("Promise.all(document.getAnimations().map((one) => one.finished))")
    with tarfile.open(AXE) as archive:
        window.evaluate(archive.extractfile("package/axe.min.js").read().decode())
    found = window.evaluate("axe.run({exclude: ['.search-button__button']})")["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert not serious, [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in serious]


def test_the_search_finds_a_word_of_a_lesson(window, address):
    window.goto(f"{address}/search.html?q=stochastic+rounding")
    window.wait_for_selector("#search-results li a")
    hits = window.locator("#search-results li a").all_inner_texts()
    assert any("07." in hit for hit in hits), hits
