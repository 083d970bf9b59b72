"""What the browser tests share."""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def chromium():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium here: apt install chromium, say")
    reason = "needs Playwright: pip install -e '.[browser]'"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


@pytest.fixture(params=["light", "dark"])
def window(chromium, request):
    context = chromium.new_context(
        color_scheme=request.param,
        reduced_motion="reduce",  # a colour that still fades is not the page's
        viewport={"width": 400, "height": 800},
    )
    context.route(lambda url: "localhost" not in url, lambda route: route.abort())
    page = context.new_page()
    page.scheme = request.param
    yield page
    context.close()
