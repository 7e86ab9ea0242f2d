"""The dashboard in a real browser, over a real server of two workers under load that wants API keys."""

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.debian_tools import program
from tests.server_process import ServerProcess, serving
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ADMIN_KEY, KEY = "sk-admin-of-the-page", "sk-of-a-client"
NUM_CLIENTS = 4
#: one drawing of 5,000 steps, beside the server and its load: the next one is due after this time
MAX_DRAW_MS = 1000.0
WAIT_S = 20.0


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")
    chromium = program("chromium")
    with sync_api.sync_playwright() as playwright:
        # Without its sandbox, which does not start for root.
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("dashboard")
    model = save_tiny_tokenizer(save_tiny_model(folder / "tiny", "llama"))
    keys = folder / "keys.json"
    keys.write_text(json.dumps([{"key": ADMIN_KEY, "admin": True}, {"key": KEY, "tenant": "shop"}]))
    options = ["--model", str(model), "--num-workers", "2", "--num-threads", "1", "--api-key-file", str(keys)]
    with serving(folder / "stderr", *options) as running, load(running.url):
        yield running


@contextmanager
def load(url: str) -> Iterator[None]:
    """Clients that ask one request after another."""
    is_over = threading.Event()
    failures: list[Exception] = []

    def ask(place: int) -> None:
        # Prompts that are new each time: the router sends one that it knows to where it knows it from.
        numbers = random.Random(place)
        try:
            with httpx.Client(headers={"x-api-key": KEY}, timeout=60) as http:
                while not is_over.is_set():
                    prompt = [numbers.randrange(3, 60) for _ in range(20 + 90 * (place % 2))]
                    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
                    http.post(f"{url}/v1/completions", json=body).raise_for_status()
                    time.sleep(0.05)
        except httpx.HTTPError as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


@dataclass
class Visit:
    """A page with everything that went wrong on it, and whom it asked."""

    page: "Page"
    problems: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def until(self, expression: str) -> None:
        """Asks from outside: the page's own policy forbids what Playwright would have it evaluate."""
        deadline_s = time.monotonic() + WAIT_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline_s, (expression, self.text("#state"), self.number_of_last_step())
            self.page.wait_for_timeout(50)

    def number_of_last_step(self) -> int:
        newest: int = self.page.evaluate("charts.rows.length ? charts.rows[charts.rows.length - 1][0] : -1")
        return newest


@contextmanager
def visit(browser: "Browser", url: str, *, with_key: bool = True, **options: Any) -> Iterator[Visit]:
    context = browser.new_context(**options)
    visited = Visit(context.new_page())
    page = visited.page
    # A refusal for want of a key is a line on the console that no script can prevent.
    page.on("console", lambda line: visited.problems.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: visited.problems.append(str(error)))
    page.on("request", lambda request: visited.hosts.add("/".join(request.url.split("/", 3)[:3])))
    page.goto(f"{url}/dashboard")
    if with_key:
        page.locator("#key").fill(ADMIN_KEY)
        page.locator("#key").press("Enter")
        page.locator("#workers tr").nth(1).wait_for()
        visited.problems = [problem for problem in visited.problems if "status of 401" not in problem]
    yield visited
    context.close()


def test_it_asks_for_a_key_and_says_if_it_is_the_wrong_one(browser: "Browser", server: ServerProcess):
    with visit(browser, server.url, with_key=False) as visited:
        page = visited.page
        page.locator("#key").fill(KEY)
        page.locator("#key").press("Enter")
        page.get_by_text("That key does not open this page.").wait_for()
        assert page.locator("#main").is_hidden()
        page.locator("#key").fill(ADMIN_KEY)
        page.locator("#key").press("Enter")
        page.locator("#workers tr").nth(1).wait_for()
        assert page.locator("#key-form").is_hidden()


def test_it_shows_a_server_under_load_and_goes_on_doing_so(browser: "Browser", server: ServerProcess):
    with visit(browser, server.url) as visited:
        page = visited.page
        visited.until("charts.rows.length > 20")
        first = visited.number_of_last_step()
        visited.until(f"charts.rows[charts.rows.length - 1][0] > {first}")
        assert visited.text("#model") == "tiny"
        assert page.locator("#state").inner_text() == "live"
        assert page.locator("#workers tr").count() == 2
        page.locator("#tiles div", has_text="workers up").get_by_text("2 of 2").wait_for()
        visited.until(
            "Number([...document.querySelectorAll('#tiles div')].find((tile) => tile.textContent.includes('tokens/s'))"
            "?.querySelector('dd').textContent.replaceAll(',', '')) > 0"
        )
        # What is drawn is what the server's steps were.
        assert page.evaluate("charts.rows.every((row) => row[3] + row[4] <= row[5])")
        assert page.evaluate("charts.charts[0].plot.data[1].every((budget) => budget > 0)")
        page.locator("#worker").select_option("1")
        visited.until("charts.rows === history_.last(1, 1) || charts.rows.length > 0")
        assert visited.problems == []
        assert visited.hosts == {server.url}


def test_a_request_is_opened_by_keyboard_and_says_where_its_time_went(browser: "Browser", server: ServerProcess):
    with visit(browser, server.url) as visited:
        page = visited.page
        page.locator("#requests button").first.wait_for()
        page.locator("#pause").press("Enter")
        first = page.locator("#requests button").first
        request_id = first.get_attribute("data-id")
        first.press("Enter")
        page.locator("#detail table").first.wait_for()
        assert visited.text("#detail-title") == request_id
        parts = page.locator("#detail table").first.locator("tbody tr td:first-child").all_inner_texts()
        assert {"prefill", "decode"} <= set(parts)
        shown = httpx.get(f"{server.url}/v1/requests/{request_id}/explain", headers={"x-api-key": ADMIN_KEY}).json()
        assert set(parts) == {part["name"] for part in shown["parts"] if part["ms"] > 0}
        steps = [chunk["step_id"] for chunk in shown["chunks"]]
        assert all(step >= 0 for step in steps)
        page.get_by_role("button", name=f"step {steps[0]:,}", exact=True).click()
        assert page.locator("#detail").is_hidden()
        assert visited.problems == []


def test_it_can_be_paused_and_read_by_keyboard(browser: "Browser", server: ServerProcess):
    with visit(browser, server.url) as visited:
        page = visited.page
        visited.until("charts.rows.length > 20")
        page.locator("#pause").press("Enter")
        visited.until("document.getElementById('state').textContent === 'paused'")
        page.wait_for_timeout(200)
        newest = visited.number_of_last_step()
        page.locator("#budget-chart").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        ids = page.evaluate("charts.rows.map((row) => row[0])")
        assert visited.text("#readout").startswith(f"step {ids[-2]} ")
        page.wait_for_timeout(1500)
        assert visited.number_of_last_step() == newest
        page.locator("#pause").press("Enter")
        visited.until(f"charts.rows[charts.rows.length - 1][0] > {newest}")
        assert visited.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(browser: "Browser", server: ServerProcess, scheme: str):
    size = {"width": 360, "height": 740}
    with visit(browser, server.url, viewport=size, color_scheme=scheme, is_mobile=True) as visited:
        visited.until("charts.rows.length > 20")
        assert visited.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        ground, ink = visited.page.evaluate("[color('ground'), color('ink')]")
        lightness = [sum(bytes.fromhex(value.lstrip("#"))) for value in (ground, ink)]
        assert (lightness[0] > lightness[1]) == (scheme == "light")
        assert visited.problems == []


def test_five_thousand_steps_are_drawn_in_no_time(browser: "Browser", server: ServerProcess):
    with visit(browser, server.url) as visited:
        page = visited.page
        visited.until("charts.rows.length > 20")
        page.locator("#pause").press("Enter")
        took_ms = page.evaluate(
            """async () => {
              const rows = [];
              for (let step = 0; step < 5000; step++) {
                const [decodes, prompts, waiting] = [step % 60, (step * 13) % 190, step % 9];
                const ms = step === 3210 ? 900 : 20 + (step % 7);
                rows.push([step, step * 20, ms, decodes, prompts, 256, waiting, 60, 3, 400, 0, "", [], 0, 0]);
              }
              history_.clear();
              history_.add("0", rows);
              document.getElementById("window").value = "5000";
              const took = [];
              for (let round = 0; round < 5; round++) {
                const began = performance.now();
                drawSteps();
                await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
                took.push(performance.now() - began);
              }
              return took.sort((a, b) => a - b)[2];
            }"""
        )
        assert took_ms < MAX_DRAW_MS
        # The one long step among them is seen.
        assert page.evaluate("charts.rows.some((row) => row[0] === 3210)")
        page.get_by_text("of every 7 steps the longest is drawn").wait_for()
        assert visited.problems == []


def test_a_trace_of_the_last_minute_can_be_saved(browser: "Browser", server: ServerProcess):
    with visit(browser, server.url) as visited:
        with visited.page.expect_download() as download:
            visited.page.locator("#trace").click()
        trace = json.loads(Path(download.value.path()).read_text())
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert any(event["name"].startswith("step ") for event in spans)
        assert any(event["name"].startswith("cmpl-") for event in spans)
        assert any(event["ph"] == "b" and event["name"] == "decode" for event in trace["traceEvents"])
        assert visited.problems == []


def test_a_server_that_is_gone_is_said_to_be(browser: "Browser", server: ServerProcess):
    with visit(browser, server.url) as visited:
        visited.page.route("**/dashboard/data*", lambda route: route.abort())
        visited.page.get_by_text("the server does not answer").wait_for()
        visited.page.unroute("**/dashboard/data*")
        visited.page.locator("#state").get_by_text("live").wait_for()


def test_the_page_is_one_file_of_modest_size(server: ServerProcess, tmp_path: Path):
    response = httpx.get(f"{server.url}/dashboard")
    assert response.headers["content-type"].startswith("text/html")
    assert len(response.content) < 120_000
