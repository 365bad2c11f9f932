"""One Chromium for all tests of a run; without one they are skipped, and the page's text is tested in tests/report."""

import pytest

from smoe_cli.report.page import render
from tests.browser.chromium import Chromium, find_chromium
from tests.report.sample import sample_document

DRAWN = """(async () => {
  for (const place of document.querySelectorAll("div[data-chart]")) {
    place.scrollIntoView({ behavior: "instant" });
    while (!place.dataset.drawn) await new Promise((done) => setTimeout(done, 10));
  }
  scrollTo({ top: 0, behavior: "instant" });
})()"""
"""Done as soon as all charts are drawn, each when it is scrolled to."""


@pytest.fixture(scope="session")
def chromium():
    command = find_chromium()
    if command is None:
        pytest.skip("no Chromium on this machine (apt install chromium)")
    browser = Chromium(command)
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def sample_page(tmp_path_factory):
    """The hand-made document's page on disk."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(sample_document()), encoding="utf-8")
    return path
