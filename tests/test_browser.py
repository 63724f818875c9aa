"""The pages in Chromium, on a phone-sized and a desktop window.

Where there is no Chromium the tests are skipped, unless MIRRORDP_REQUIRE_BROWSER is set, as
`.ci/run` does.
"""

import os
import shutil
import time

import pytest

from mirrordp.report.comparison import Comparison
from mirrordp.report.page import comparison_page, report_page
from tests.test_page import HOSTILE, hostile_report, make_report
from tests.test_report_evaluation import make_report as evaluated_report

PAGES = ["report", "compare", "tested", "hostile", "hostile compare", "hostile tested"]
WINDOWS = {"phone": (390, 844), "desktop": (1440, 900)}
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def find_browser():
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    driver = shutil.which("chromedriver")
    try:
        from selenium import webdriver
    except ImportError:
        webdriver = None
    return browser, driver, webdriver


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary, driver, webdriver = find_browser()
    if not (binary and driver and webdriver):
        reason = "needs chromium and chromedriver (apt-get install chromium chromium-driver)"
        if os.environ.get("MIRRORDP_REQUIRE_BROWSER"):
            pytest.fail(f"{reason} and selenium, and MIRRORDP_REQUIRE_BROWSER is set")
        # CI sets the variable, and a missing browser fails there.
        pytest.skip(f"{reason}; CI looks at the pages with them")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def show(browser, path, window):
    """Opens a file; returns what the console says."""
    width, height = WINDOWS[window]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", metrics | {"mobile": window == "phone"}
    )
    browser.get(path.as_uri())
    # The log comes late on a busy machine; what was said before the last word is in front of it.
    last_word = "the page was read"
    browser.execute_script(f"console.info('{last_word}')")
    found = []
    deadline = time.monotonic() + 30
    while not any(last_word in entry["message"] for entry in found):
        assert time.monotonic() < deadline, "the browser's console says nothing"
        found += browser.get_log("browser")
    return [entry for entry in found if last_word not in entry["message"]]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    runs = {f"run-{number}": make_report(scale) for number, scale in enumerate((0.5, 1.0, 2.0))}
    hostile = hostile_report()
    texts = {
        "report": report_page(make_report(seed=1), run="run"),
        "compare": comparison_page(Comparison.of(runs)),
        "tested": report_page(evaluated_report(), run="run"),
        "hostile": report_page(hostile, run="run"),
        "hostile tested": report_page(evaluated_report(name=HOSTILE), run="run"),
        "hostile compare": comparison_page(Comparison.of({"a": hostile, "b" * 200: hostile})),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


WIDER = """
const right = document.documentElement.clientWidth;
return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg')
    && e.getBoundingClientRect().right > right + 0.5).map(e => e.tagName + '.' + e.className);
"""


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", PAGES)
def test_page_fits_and_is_silent(browser, pages, name, window):
    assert show(browser, pages[name], window) == []
    # Nothing sticks out to the right: no scrolling sideways, not even cut off.
    assert (
        browser.execute_script("return document.documentElement.scrollWidth")
        <= (WINDOWS[window][0])
    )
    assert browser.execute_script(WIDER) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    with pytest.raises(Exception, match="no such alert"):
        _ = browser.switch_to.alert.text


@pytest.mark.parametrize("window", WINDOWS)
def test_letters_and_charts_can_be_read(browser, pages, window):
    show(browser, pages["report"], window)
    sizes = browser.execute_script(
        """return [...document.querySelectorAll('figure svg[role=img] text')]
        .filter(e => e.getClientRects().length).map(e => {
            const svg = e.ownerSVGElement;
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
            return scale * parseFloat(getComputedStyle(e).fontSize); })"""
    )
    assert len(sizes) > 10
    assert min(sizes) >= 10
    visible = browser.execute_script(
        """return [...document.querySelectorAll('figure svg[role=img]')]
        .filter(e => e.getClientRects().length).length"""
    )
    # One of each pair: the budget and the learning curves.
    assert visible == 2
    small = browser.execute_script(
        """return [...document.querySelectorAll('p, li, td, th, figcaption, footer')]
        .filter(e => parseFloat(getComputedStyle(e).fontSize) < 13).length"""
    )
    assert small == 0


def test_text_on_charts_does_not_overlap(browser, pages):
    for window in WINDOWS:
        for name in ("report", "compare"):
            show(browser, pages[name], window)
            overlaps = browser.execute_script(
                """const found = [];
                for (const svg of document.querySelectorAll('figure svg[role=img]')) {
                    const boxes = [...svg.querySelectorAll('text')].map(
                        e => [e.textContent, e.getBoundingClientRect()]);
                    for (const [i, [s, a]] of boxes.entries())
                        for (const [t, b] of boxes.slice(0, i))
                            if (a.width && a.left < b.right && b.left < a.right
                                && a.top < b.bottom && b.top < a.bottom) found.push([s, t]);
                }
                return found;"""
            )
            assert overlaps == [], (window, name)


def test_contrast_of_text(browser, pages):
    """WCAG 2.2, level AA: 4.5 to 1."""
    show(browser, pages["report"], "desktop")
    pairs = browser.execute_script(
        """const ground = e => { for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor;
            if (c !== 'rgba(0, 0, 0, 0)') return c; } return 'rgb(255, 255, 255)'; };
        return [...document.querySelectorAll('p, li, td, th, b, span, h1, h2, h3, summary, footer')]
            .filter(e => e.textContent.trim())
            .map(e => [getComputedStyle(e).color, ground(e), e.textContent.slice(0, 30)]);"""
    )

    def luminance(colour):
        parts = [int(part) / 255 for part in colour.strip("rgba()").split(",")[:3]]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    assert len(pairs) > 50
    for ink, ground, text in pairs:
        light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, text


def test_the_checks_notice_broken_pages(browser, pages, tmp_path):
    """A page that is too wide, and one that loads something, are found."""
    text = pages["report"].read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(
        text.replace("<main>", '<main><img src="missing.png"><p style="width:2000px">wide</p>', 1),
        encoding="utf-8",
    )
    assert show(browser, broken, "phone") != []
    assert browser.execute_script(WIDER) == ["P."]
