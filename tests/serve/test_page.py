"""The page at `/` in a headless browser: it shows what `/status` says, as text, and asks before it flushes.

After every test the browser's console must be clean and nothing may have been asked of another server.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from engine_harness import engine_of, wait_idle
from running_server import RunningServer, wait_until

from chromium import find_browser
from strata.engine import Engine, ServedModel
from strata.engine.api import Progress, TierReport, TokenSources, WaitingReport
from strata.models import tiny_random_model

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: `make setup` brings it"
)
BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="no chromium on this machine: install the package `chromium`, or run `make test` as root",
)
expect = sync_api.expect
HOSTILE = (
    "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&amp;'\u202e"
)
GIB = 1 << 30


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Root has no sandbox; the page of the tests is the project's own.
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """Opens the page of a server, and keeps what went wrong in it."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.errors: list[str] = []
        self.asked: set[str] = set()
        self.contexts: list[Any] = []

    def open(self, served: RunningServer, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = self._browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(10_000)
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked.add(request.url.removeprefix(served.url)))
        page.goto(served.url)
        return page


@pytest.fixture
def visit(browser: Any) -> Iterator[Visitor]:
    visitor = Visitor(browser)
    yield visitor
    for context in visitor.contexts:
        context.close()
    assert visitor.errors == []
    assert visitor.asked <= {
        "/",
        "/status",
        "/cache/flush",
        *(
            f"/page/{name}"
            for name in ("style.css", "script.js", "view.js", "chart.js", "format.js", "icon.svg")
        ),
    }


def ask(served: RunningServer, prompt: str, **fields: Any) -> None:
    served.http.post("/v1/completions", json={"prompt": prompt, **fields})


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def test_what_it_shows_is_what_status_says(serve: Callable[..., RunningServer], visit: Visitor) -> None:
    served = serve()
    both = "The same beginning of both, " * 4
    ask(served, both + "then one end. And more text.")
    served.engine.control.sources = TokenSources(device=16, host=96, computed=33)
    ask(served, both + "then another end. And more text.")
    page = visit.open(served)
    expect(page.locator("#state")).to_have_text("serving")
    status = served.http.get("/status").json()
    assert text(page, "#model") == "fake-model" and "context 4,096 tokens" in text(page, "#about")
    assert (text(page, "#running-count"), text(page, "#waiting-count")) == ("2", "1")
    assert text(page, "#waiting li .said") == status["waiting"][0]["why"]
    legend = page.locator("#legend dd").all_inner_texts()
    tokens = {name: f"{count:,} tokens" for name, count in status["prompt_tokens"].items()}
    assert [line.split(" tokens")[0] + " tokens" for line in legend] == list(tokens.values())
    assert text(page, "#cached-share") == "99.3%" and text(page, "#saved") == "3 s"
    assert page.locator("#latency .count").all_inner_texts() == ["0", "1", "0", "1", "4"]
    assert text(page, "#latency [data-source=host] .p99, #latency [data-source=host] .p50") == "0.25 s"
    tiers = page.locator("#tiers > li").all_inner_texts()
    assert "1 of 4 GiB (25%)" in tiers[0] and "--host-memory is 0" in tiers[1] and "0.5 of 10 GiB" in tiers[2]
    assert page.locator("#links .used").all_inner_texts()[0].endswith("of 2.33 GiB/s")
    rows = page.locator("#requests tr")
    assert rows.count() == 2 and page.locator("#alerts").is_hidden()
    assert rows.first.locator(".sentence").inner_text() == status["requests"][0]["why"]
    assert rows.first.locator(".sources").inner_text() == "16 device, 96 host, 33 computed"
    divergence = status["requests"][0]["divergence"]
    assert rows.first.locator(".here").inner_text() == divergence["here"] == "another "
    assert rows.first.locator(".there").inner_text() == divergence["there"] == "one end."
    assert page.evaluate("document.querySelectorAll('#chart rect').length") == 60 * 5


def test_a_hostile_prompt_is_text(serve: Callable[..., RunningServer], visit: Visitor) -> None:
    served = serve()
    ask(served, "ab" + HOSTILE)
    served.engine.control.sources = TokenSources(computed=50)
    ask(served, "ac" + HOSTILE)
    ask(served, "ab<img src=y>" + HOSTILE)
    served.engine.waiting = lambda: [WaitingReport(9, 0.1, HOSTILE)]
    served.engine.tiers = lambda: [TierReport("disk", True, GIB, 1, 0, 1, HOSTILE)]
    page = visit.open(served)
    expect(page.locator("#requests tr")).to_have_count(3)
    assert text(page, "#waiting .said") == HOSTILE
    assert HOSTILE in text(page, "#tiers .detail")
    assert text(page, "#requests .here") == "y><img s"
    assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert "broken" not in page.title()


def test_flush_asks_first_and_sends_only_what_was_confirmed(
    serve: Callable[..., RunningServer], visit: Visitor
) -> None:
    served = serve()
    page = visit.open(served)
    expect(page.locator("#state")).to_have_text("serving")
    dialog = page.locator("#flush-dialog")
    page.click("#flush")
    expect(dialog).to_be_visible()
    assert "1 GiB on device" in dialog.inner_text() and "cannot be undone" in dialog.inner_text()
    page.keyboard.press("Enter")  # the button that has the focus is the harmless one
    expect(dialog).to_be_hidden()
    page.click("#flush")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert served.engine.calls == []
    page.focus("#flush")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    wait_until(lambda: served.engine.calls == [("flush",)])
    expect(page.locator("#state")).to_have_text(
        "pages forgotten: 3 on device, 5 on disk; in use and kept: 2 on host"
    )
    assert page.evaluate("document.activeElement.id") == "flush"


def test_a_flush_that_fails_says_so_in_the_dialog(
    serve: Callable[..., RunningServer], visit: Visitor
) -> None:
    served = serve()
    page = visit.open(served)
    page.route(
        "**/cache/flush", lambda route: route.fulfill(status=503, json={"error": {"message": "busy disk"}})
    )
    page.click("#flush")
    page.click("#flush-confirm")
    expect(page.locator("#flush-error")).to_have_text("It was not flushed: busy disk")
    assert page.locator("#flush-dialog").is_visible() and page.locator("#flush-confirm").is_enabled()
    assert visit.errors.pop().startswith("Failed to load resource"), "what the browser itself says of a 503"


def test_progress_and_phases(serve: Callable[..., RunningServer], visit: Visitor) -> None:
    served = serve()
    control = served.engine.control
    control.pieces, control.hold = (), True
    control.progress = Progress(12_000, 4_096, 8.2, TokenSources(disk=2048, computed=9952))
    asking = threading.Thread(target=lambda: ask(served, "x" * 64))
    asking.start()
    wait_until(lambda: served.engine.streams)
    page = visit.open(served)
    expect(page.locator("#running .said")).to_have_text("4,096 of 12,000 tokens, about 8.2 s left")
    bar = page.locator("#running .bar")
    assert bar.get_attribute("aria-valuenow") == "34"
    assert bar.evaluate("bar => bar.firstElementChild.getBoundingClientRect().width / bar.clientWidth") == (
        pytest.approx(4096 / 12000, abs=0.02)
    )
    assert text(page, "#requests .end") == "running"
    control.progress = Progress(12_000, 12_000, 0.0, TokenSources(disk=2048, computed=9952))
    expect(page.locator("#running .bar")).to_have_attribute("aria-valuenow", "100")
    served.engine.streams[0].abort()
    asking.join(10)
    expect(page.locator("#running li")).to_have_count(0)
    expect(page.locator("#requests .end")).to_have_text("aborted")


def test_faults_show_only_where_there_are_any(serve: Callable[..., RunningServer], visit: Visitor) -> None:
    served = serve()
    page = visit.open(served)
    expect(page.locator("#state")).to_have_text("serving")
    assert page.locator("#alerts").is_hidden()
    stats = served.engine.stats()
    served.engine.stats = lambda: {**stats, "corrupt_records": 3}
    served.engine.tokenizer.template_writes_date = True
    served.engine.control.dead = True
    expect(page.locator("#alerts li")).to_have_count(3)
    texts = page.locator("#alerts li").all_inner_texts()
    assert texts[0] == "the engine thread ended" and texts[1].startswith("3 damaged records")
    assert "--chat-template-date" in texts[2] and text(page, "#state") == "the engine has stopped"
    faded = "[...document.querySelectorAll('main, main *')].filter((one) => getComputedStyle(one).opacity < 1).length"
    assert page.evaluate(faded) == 0, "what was last known can still be read"
    assert page.evaluate("getComputedStyle(document.querySelector('#alerts')).filter") == "none"
    assert page.evaluate("getComputedStyle(document.querySelector('section.now')).filter") == "grayscale(1)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_both_schemes(
    serve: Callable[..., RunningServer], visit: Visitor, scheme: str
) -> None:
    served = serve()
    served.engine.tokenizer.template_writes_date = True
    ask(served, "some prompt or other")
    page = visit.open(served, color_scheme=scheme)
    expect(page.locator("#requests tr")).to_have_count(1)
    lightness = page.evaluate(
        f"() => {{{LUMINANCE} return luminance(colorOf(document.body, 'backgroundColor'))}}"
    )
    assert lightness > 0.8 if scheme == "light" else lightness < 0.05
    worst = page.evaluate(f"() => {{{LUMINANCE} return worstContrast()}}")
    assert worst["contrast"] >= 4.5, worst  # WCAG 2.2 AA for text of any size


LUMINANCE = """
function luminance(color) {
  const [red, green, blue] = color.match(/[\\d.]+/g).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
const colorOf = (node, kind) => getComputedStyle(node)[kind];
function worstContrast() {
  let worst = { contrast: 99 };
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".skip, .unseen, svg")) continue;
    let behind = node;
    while (colorOf(behind, "backgroundColor") === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const pair = [node, behind].map((each, index) =>
      luminance(colorOf(each, index ? "backgroundColor" : "color")) + 0.05);
    const contrast = Math.max(...pair) / Math.min(...pair);
    if (contrast < worst.contrast) worst = { contrast, text: node.textContent, tag: node.outerHTML.slice(0, 80) };
  }
  return worst;
}
"""


TOUCHING = """
function touching(selector) {
  return [...document.querySelectorAll(selector)].flatMap((row) => {
    const texts = document.createTreeWalker(row, NodeFilter.SHOW_TEXT), boxes = [];
    while (texts.nextNode()) {
      const { currentNode: text } = texts, range = document.createRange();
      range.selectNodeContents(text);
      if (!text.data.trim() || !text.parentElement.checkVisibility() || text.parentElement.closest(".unseen")) continue;
      boxes.push([text.data, range.getBoundingClientRect()]);
    }
    boxes.sort((one, other) => one[1].left - other[1].left);
    return boxes.slice(1).flatMap(([text, box], index) =>
      box.left < boxes[index][1].right + 2 ? [`${boxes[index][0]} | ${text}`] : []);
  });
}
"""


@pytest.mark.parametrize("width", [360, 390, 800, 1100, 1600])
def test_numbers_beside_each_other_do_not_touch(
    serve: Callable[..., RunningServer], visit: Visitor, width: int
) -> None:
    served = serve()
    served.engine.control.sources = TokenSources(host=64)
    ask(served, "x" * 64)
    page = visit.open(served, width, 780)
    expect(page.locator("#latency [data-source=host] .count")).to_have_text("1")
    page.locator("#latency .p50").evaluate_all(
        "cells => cells.forEach((cell) => (cell.textContent = '120 µs'))"
    )
    page.locator("#latency .p99").evaluate_all(
        "cells => cells.forEach((cell) => (cell.textContent = '2 min 20 s'))"
    )
    assert page.evaluate(f"() => {{{TOUCHING} return touching('.latency tr')}}") == []
    # The four figures stand in one line.
    tops = page.locator(".now .figures dd").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect().top)"
    )
    assert max(tops) - min(tops) < 1


def test_short_times_have_a_unit_of_their_own(serve: Callable[..., RunningServer], visit: Visitor) -> None:
    page = visit.open(serve())
    shown = page.evaluate(
        "async (values) => { const { seconds } = await import('/page/format.js'); return values.map(seconds); }",
        [0, 2e-7, 2.3e-5, 9.94e-4, 9.96e-4, 0.0052, 0.028, 0.61, 12.2, 200, 3900],
    )
    assert shown == [
        *("0 s", "1 µs", "23 µs", "994 µs", "1 ms"),
        *("5.2 ms", "28 ms", "0.61 s", "12 s", "3 min 20 s", "1 h 05 min"),
    ]


@pytest.mark.parametrize("width", [360, 620, 1000, 1600])
def test_no_width_scrolls_sideways(serve: Callable[..., RunningServer], visit: Visitor, width: int) -> None:
    served = serve(served_model_name="organisation/" + "a-very-long-name-" * 8)
    ask(served, "W" * 90 + HOSTILE)
    served.engine.control.sources = TokenSources(device=1000, host=1000, disk=1000, computed=1000)
    ask(served, "W" * 80 + "M" * 90)
    served.engine.waiting = lambda: [WaitingReport(9, 7000.0, "W" * 300)]
    served.engine.tiers = lambda: [TierReport("disk", True, GIB, GIB, GIB // 2, 10**9, "/path" * 60)]
    page = visit.open(served, width, 780)
    expect(page.locator("#requests tr")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every((node) => node.scrollWidth <= node.clientWidth)"
    )
    outside = page.evaluate(
        "(width) => [...document.querySelectorAll('main *')].filter((node) => node.checkVisibility()"
        " && !node.closest('.unseen') && node.getBoundingClientRect().right > width + 1).map((node) => node.outerHTML)",
        width,
    )
    assert outside == []


def test_everything_is_reached_by_keyboard(serve: Callable[..., RunningServer], visit: Visitor) -> None:
    served = serve()
    page = visit.open(served)
    expect(page.locator("#state")).to_have_text("serving")
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.getAttribute('href')")
        )
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached
    assert reached == ["#main", "pause", "flush", "chart", "/status", "/metrics"]
    page.focus("#chart")
    page.keyboard.press("ArrowLeft")
    assert text(page, "#chart-read").startswith("now: ")
    page.keyboard.press("ArrowLeft")
    assert text(page, "#chart-read").startswith("5 s ago: ")
    page.focus("#pause")
    page.keyboard.press("Space")
    assert (text(page, "#pause"), text(page, "#state")) == ("Resume", "paused")
    page.keyboard.press("Space")
    expect(page.locator("#state")).to_have_text("serving")


def test_a_server_that_cannot_be_reached_is_said_to_be(
    serve: Callable[..., RunningServer], visit: Visitor
) -> None:
    served = serve()
    page = visit.open(served)
    expect(page.locator("#state")).to_have_text("serving")
    page.route("**/status", lambda route: route.abort())
    expect(page.locator("#state")).to_have_text(re.compile(r"unreachable since \d\d:\d\d:\d\d"))
    assert page.evaluate("document.body.classList.contains('stale')")
    page.unroute("**/status")
    expect(page.locator("#state")).to_have_text("serving")
    assert all(error.startswith("Failed to load resource") for error in visit.errors)
    visit.errors.clear()


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(
    serve: Callable[..., RunningServer], visit: Visitor
) -> None:
    served = serve(api_key="secret")
    page = visit.open(served)
    expect(page.locator("#key-dialog")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "key" and page.locator("#key-error").is_hidden()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_be_visible()
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("serving")
    assert page.locator("#key-dialog").is_hidden() and text(page, "#model") == "fake-model"
    page.click("#flush")
    page.click("#flush-confirm")
    wait_until(lambda: served.engine.calls == [("flush",)])
    assert page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
    page.click("#forget")
    expect(page.locator("#key-dialog")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0
    assert all("401" in error for error in visit.errors)
    visit.errors.clear()


def test_bars_do_not_move_for_those_who_asked_for_less_motion(
    serve: Callable[..., RunningServer], visit: Visitor
) -> None:
    served = serve()
    durations = []
    for motion in ("no-preference", "reduce"):
        page = visit.open(served, reduced_motion=motion)
        page.wait_for_selector("#tiers .bar i", state="attached")
        durations.append(
            page.evaluate("getComputedStyle(document.querySelector('#tiers .bar i')).transitionDuration")
        )
    assert durations == ["0.4s", "0s"]


class TinyTokenizer:
    """Shows token ids as numbers."""

    eos_token_ids: frozenset[int] = frozenset()
    template_writes_date = False

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))

    def token_text(self, token_id: int) -> str:
        return f"{token_id} "

    def detokenizer(self, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> Any:
        return self

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def finish(self) -> str:
        return ""


@pytest.fixture
def tiny_engine(tmp_path: Any) -> Iterator[Engine]:
    served = ServedModel(tiny_random_model(0), TinyTokenizer(), "tiny", "tiny")  # type: ignore[arg-type]
    engine = engine_of(tmp_path / "kv", served=served, write_policy="through")
    yield engine
    engine.shutdown(drain_s=0.0, demote_s=0.0)


def test_with_a_real_engine(serve: Callable[..., RunningServer], visit: Visitor, tiny_engine: Engine) -> None:
    served = serve(engine=tiny_engine, page_size=4)
    prompt = [(5 * place + 1) % 97 for place in range(70)]
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for ids in (prompt, prompt[:50] + [96, 95, 94, 93] * 5):
        served.http.post("/v1/completions", json={"prompt": ids, **body}).raise_for_status()
        wait_idle(tiny_engine)
    page = visit.open(served)
    expect(page.locator("#requests tr")).to_have_count(2)
    status = served.http.get("/status").json()
    assert status["prompt_tokens"] == {"device": 48, "host": 0, "disk": 0, "computed": 92}
    assert sum(status["series"]["device"]) == pytest.approx(48) and sum(
        status["series"]["computed"]
    ) == pytest.approx(92)
    assert status["generated_tokens"] == 8 and status["ttft"]["device"]["count"] == 1
    assert text(page, "#requests .sentence") == "diverged at token 50 from request 1"
    assert text(page, "#requests .sources") == "48 device, 22 computed"
    assert text(page, "#requests .here") == "96 95 94 93 96 95 94 93"
    assert text(page, "#legend [data-source=computed] dd") == "92 tokens 66%"
    assert f"{status['tiers'][0]['used_tokens']} tokens kept" in text(page, "#tiers .facts").replace(
        "\xa0", " "
    )
    page.click("#flush")
    page.click("#flush-confirm")
    expect(page.locator("#state")).to_have_text(re.compile(r"pages forgotten: \d+ on device"))
    expect(page.locator("#tiers .facts").first).to_have_text(re.compile(r"^0\stokens\skept"))


def test_its_files_and_their_policy(served: RunningServer) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/page/script.js", "text/javascript"),
        ("/page/style.css", "text/css"),
    ):
        answer = served.http.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert (
            policy.startswith("default-src 'none'")
            and "unsafe" not in policy
            and "frame-ancestors 'none'" in policy
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), (
            "nothing comes from elsewhere"
        )
        assert "innerHTML" not in answer.text and "style=" not in answer.text
    for name in ("nothing.js", "../status.py", "..%2fstatus.py", "%2e%2e%2fauth.py"):
        assert served.http.get(f"/page/{name}").status_code == 404
