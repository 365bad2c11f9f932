"""The report's page in a real headless Chromium: what is asked of it beyond its text.

`make shots` runs these and photographs the report of a real model; `make test` runs them where there is a Chromium.
"""

import os

import pytest

from tests.browser.conftest import DRAWN
from tests.report.sample import HOSTILE, sample_document

pytestmark = pytest.mark.browser


WHOLE = "SMOE_SHOTS" in os.environ
SCREENS = [(1400, "light"), (390, "dark")] + [(1400, "dark"), (390, "light")] * WHOLE
"""Width and scheme; `make shots` looks at all four, and at paper."""


@pytest.fixture(scope="module", params=SCREENS, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def drawn(request, chromium, sample_page):
    """The whole page with every chart drawn, at one width and in one scheme."""
    width, scheme = request.param
    page = chromium.open(sample_page, width, scheme=scheme)
    page.ask(DRAWN)
    yield page
    page.close()


def test_the_console_stays_empty_and_nothing_is_fetched(drawn, sample_page):
    assert drawn.faults() == []
    asked = [address for address in drawn.requests() if not address.startswith("data:")]
    assert asked == [sample_page.resolve().as_uri()]
    assert drawn.ask("document.getElementById('failure').hidden")


def test_every_chart_is_drawn_inside_the_page(drawn):
    places = drawn.ask(
        """[...document.querySelectorAll("div[data-chart]")].map((place) => {
          const box = place.querySelector("svg.main-svg").getBoundingClientRect();
          return [place.dataset.chart, box.width, box.height, box.right - innerWidth];
        })"""
    )
    assert len(places) >= 12
    assert [name for name, width, height, beyond in places if width < 200 or height < 200 or beyond > 0] == []


def test_the_page_does_not_scroll_sideways(drawn):
    assert drawn.ask("document.documentElement.scrollWidth <= innerWidth")
    outside = """[...document.querySelectorAll("main *")].filter((e) => !e.closest(".scroll, svg")
      && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
    assert drawn.ask(outside) == []


def test_hostile_text_does_not_run_and_is_seen(drawn):
    assert drawn.ask("document.title").startswith("Worth it")
    assert drawn.ask("document.querySelectorAll('img, iframe, object, .tokens a, .tokens svg').length") == 0
    assert HOSTILE[0] in drawn.ask("document.querySelector('.tables.tokens').textContent")
    hovered = drawn.ask(
        """(() => { const place = document.getElementById("chart-transfer-sources");
          Plotly.Fx.hover(place, { xval: 1, yval: 0.1 }, "xy");
          const found = place.querySelector(".hoverlayer");
          return [found.textContent, found.querySelectorAll("a, script, img").length]; })()"""
    )
    assert hovered[1] == 0
    assert HOSTILE[1][:20] in hovered[0]
    links = "[...document.querySelectorAll('a')].filter((a) => a.getAttribute('href')?.[0] !== '#').length"
    assert drawn.ask(links) == 0


def test_text_stands_out_from_its_ground(drawn):
    """WCAG 2.2, 1.4.3: 4.5 for text. https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""
    ratios = drawn.ask(
        """(() => {
          const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
          const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
            return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b); };
          const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
            if (c !== "rgba(0, 0, 0, 0)") return c; } return "rgb(255, 255, 255)"; };
          const poor = [];
          for (const e of document.querySelectorAll("header *, main *, nav *")) {
            if (e.closest("svg, .chart") || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
            const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
            if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(e.outerHTML.slice(0, 80));
          }
          return poor;
        })()"""
    )
    assert ratios == []


@pytest.fixture(scope="module")
def opened(chromium, sample_page):
    """The page as it opens in a window of usual size; what a test has drawn stays for the next."""
    page = chromium.open(sample_page)
    yield page
    page.close()


def test_the_first_screen_is_there_before_any_chart(opened):
    inside = "document.querySelector('.cards').getBoundingClientRect().bottom < innerHeight"
    assert opened.ask(inside)
    below = "document.querySelector('#chart-solver').dataset.drawn ?? null"
    assert opened.ask(below) is None


def test_the_first_screens_figures_equal_the_documents(opened):
    figures = sample_document()["verdict"]["figures"]
    values = "(card) => [...card.querySelectorAll('data')].map((shown) => +shown.value)"
    shown = opened.ask(f"[...document.querySelectorAll('.card')].map({values})")
    assert shown == [[figure["contiguous"], figure["load_balancer"], figure["value"]] for figure in figures]
    seen = opened.ask("[...document.querySelectorAll('.states data')].map((d) => [+d.value, d.innerText])")
    assert len(seen) > 30
    assert all(abs(float(text) - value) <= 0.0005 * max(1, abs(value)) for value, text in seen)
    widths = opened.ask("[...document.querySelectorAll('.card .bar')].map((b) => b.getBoundingClientRect().width)")
    assert widths[2] / widths[0] == pytest.approx(0.95, abs=0.02)


def test_choosing_a_layer_draws_it(opened):
    opened.ask("document.getElementById('coactivation').scrollIntoView()")
    opened.ask(
        """new Promise((done) => { const place = document.getElementById("chart-coactivation-placed");
          const look = () => place.dataset.drawn ? done() : setTimeout(look, 20); look(); })"""
    )
    cells = "document.getElementById('chart-coactivation-placed').data[0].z.flat()"
    before = opened.ask(cells)
    opened.ask(
        """(() => { const chooser = document.querySelector("select[data-section=coactivation]");
          chooser.value = "2"; chooser.dispatchEvent(new Event("change")); })()"""
    )
    after = opened.ask(cells)
    drawn = sample_document()["sections"]["coactivation"]["cells"]["placed"]
    expected = [[None if value < 0 else value for row in layer for value in row] for layer in drawn]
    assert [before, after] == [expected[0], expected[2]]
    texts = opened.ask("document.getElementById('chart-coactivation-placed').data[0].text[0][1]")
    assert "× chance" in texts  # noqa: RUF001
    assert opened.faults() == []


def test_colours_follow_the_scheme_while_the_page_is_open(drawn):
    colour = "document.getElementById('chart-solver').layout.font.color"
    before = drawn.ask(colour)
    drawn.scheme("dark" if before == "#1b1f24" else "light")
    drawn.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert {before, drawn.ask(colour)} == {"#1b1f24", "#e6edf3"}


def test_tables_scroll_under_the_keyboard(drawn):
    wide = """[...document.querySelectorAll(".scroll")]
      .filter((e) => e.checkVisibility({ contentVisibilityAuto: true }) && e.scrollWidth > e.clientWidth + 1)
      .every((e) => e.tabIndex === 0 && (e.focus(), document.activeElement === e))"""
    assert drawn.ask(wide)


@pytest.mark.skipif(not WHOLE, reason="every chart is drawn twice more; make shots does it")
def test_on_paper_every_chart_and_table_is_there_in_light_colours(opened):
    opened.scheme("dark")
    opened.ask("new Promise((done) => { const look = () => window.Plotly ? done() : setTimeout(look, 20); look(); })")
    opened.ask(
        """addEventListener("beforeprint", () => { window.onPaper = {
          drawn: [...document.querySelectorAll("div[data-chart]")].every((e) => e.querySelector("svg")),
          open: [...document.querySelectorAll("details")].every((e) => e.open),
          ink: getComputedStyle(document.documentElement).getPropertyValue("--ink").trim() }; })"""
    )
    assert opened.pdf().startswith(b"%PDF")
    assert opened.ask("window.onPaper") == {"drawn": True, "open": True, "ink": "#1b1f24"}
    assert opened.ask("document.querySelectorAll('details[open]').length") == 0
    assert opened.faults() == []
