"""The page of ``splitup serve`` in a real browser, before a real network."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from splitup.chain.client import Chain
from splitup.client.connection import SplitUp
from splitup.devnet.processes import find_program
from tests.builders import HANG_S
from tests.e2e.conftest import Network
from tests.e2e.server import run_server
from tests.page_build import find_browser

HOSTILE_ID = "0x" + secrets.token_hex(32)
HOSTILE = f"<img src={HOSTILE_ID[2:8]} onerror=window.hacked=1>"
SECTIONS = ("chat", "nodes", "models", "executions", "committee")
WATCH = """
    window.lengths = [];
    new MutationObserver(() => {
        const texts = document.querySelectorAll('.assistant .text');
        if (texts.length) window.lengths.push(texts[texts.length - 1].textContent.length);
    }).observe(
        document.querySelector('.messages'), { subtree: true, childList: true, characterData: true }
    );
"""
# clicks Stop at the first text: a click from here may come after the last token
STOP = """
    new MutationObserver((_, observer) => {
        const text = document.querySelector('.assistant:last-child .text');
        const stop = document.querySelector('button.stop');
        if (!stop || text?.textContent === text?.querySelector('.given').textContent) return;
        observer.disconnect();
        stop.click();
    }).observe(document.querySelector('.messages').parentNode, { subtree: true, childList: true });
"""


@pytest.fixture(scope="module")
def hostile_model(network: Network) -> Iterator[None]:
    """Let a stranger's model stand on chain, under a name that would be a script in a bad page."""

    async def send(function: str, *args: Any) -> None:
        async with SplitUp.connect(network.config) as net:
            chain: Chain = net.chain
            await chain.send("models", function, HOSTILE_ID, *args)

    tasks = [(f"0x{index + 1:064x}", 1 << 30, 10**9, 100_000) for index in range(3)]
    asyncio.run(send("register", HOSTILE, tasks, [0 << 16 | 1, 0 << 16 | 2]))
    yield
    asyncio.run(send("retire"))


@pytest.fixture(scope="module")
def url(network: Network, hostile_model: None) -> Iterator[str]:
    with run_server(network, "--lease-steps", "32") as url:
        yield url.removesuffix("/v1")


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Browser]:
    expect.set_options(timeout=HANG_S * 1_000)
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """An open page; whatever the browser complains about fails the test."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(HANG_S * 1_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.wait_for_selector("select option", state="attached")
    yield page
    context.close()
    assert not [text for text in complaints if "Failed to load resource" not in text]


def ask(page: Page, text: str, tokens: int) -> None:
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_label("Beginning of a text").fill(text)
    page.keyboard.press("Enter")


def test_a_text_streams_and_says_who_computed_it(page: Page, url: str) -> None:
    page.evaluate(WATCH)
    page.get_by_label("Temperature").fill("2")  # at which hardly a text ends by itself
    page.get_by_label("Seed").fill("7")
    ask(page, f"library for {HOSTILE}", 24)
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    lengths = page.evaluate("window.lengths")
    assert len(set(lengths)) >= 5 and lengths == sorted(lengths), "the text grew token by token"
    expect(page.locator(".given")).to_have_text(f"library for {HOSTILE}")
    expect(page.locator("#cost")).not_to_have_text("0 USDC")

    page.get_by_text("Who computed this?").click()
    expect(page.locator("plan-view .badge")).to_have_text(["checked", "root matches"])
    expect(page.locator("plan-view tbody tr")).not_to_have_count(0)
    # the lease is used up, so its execution ends: times, verdicts and payments follow
    expect(page.locator("timeline-view .bar")).not_to_have_count(0)
    expect(page.locator("verification-view tbody .badge").first).to_have_text("honest")
    expect(page.get_by_text("Committee's fee")).to_be_visible()

    execution = page.locator("execution-view a[href^='#/executions/']").get_attribute("title")
    assert execution is not None
    search = page.get_by_label("Search the network")
    search.fill(execution[:20])
    search.press("Enter")
    page.get_by_role("link", name=execution).click()
    expect(page.locator("h1")).to_contain_text("Execution")
    expect(page.locator(".badge", has_text="settled")).to_be_visible()
    expect(page.locator("gas-view tbody tr")).not_to_have_count(0)
    page.locator("plan-view tbody a").first.click()  # a node
    expect(page.locator("earnings-view tbody tr")).not_to_have_count(0)  # a row for each day
    expect(page.get_by_text("of the last 24 hours")).to_be_visible()
    page.go_back()
    page.locator("dl a[href^='#/accounts/']").first.click()  # its client
    expect(page.locator("executions-view").get_by_title(execution)).to_be_visible()
    for _ in range(3):
        page.go_back()
    expect(page.locator(".given")).to_be_visible()  # the text is still there


def test_a_plan_that_is_not_the_one_on_chain_is_shown_to_be_wrong(page: Page, url: str) -> None:
    """A server that lies about who was chosen: its answer gets another node on the way."""
    with urllib.request.urlopen(f"{url}/explorer/v1/executions") as reply:
        rows = json.load(reply)["executions"]
    execution = next(row["id"] for row in rows if row["state"] == "settled")

    def lie(route: Route) -> None:
        plan = route.fetch().json()
        task = plan["tasks"][0]
        task["executor"], task["fallbacks"][0] = task["fallbacks"][0], task["executor"]
        if "both" in page.url:
            candidates = plan["opening"]["tasks"][0]["candidates"]
            candidates[0], candidates[1] = candidates[1], candidates[0]
        route.fulfill(json=plan)

    page.route("**/plan", lie)
    page.goto(f"{url}/#/executions/{execution}")
    expect(page.get_by_role("alert")).to_contain_text("shows other nodes than the plan")
    page.goto(f"{url}/?both#/executions/{execution}")
    expect(page.get_by_role("alert")).to_contain_text("the chain has 0x")


def test_stop_ends_the_text_and_the_bill(page: Page) -> None:
    page.evaluate(STOP)
    page.get_by_label("Temperature").fill("2")  # at which hardly a text ends by itself
    page.get_by_label("Seed").fill("7")
    ask(page, "library for", 48)
    expect(page.locator(".assistant .facts")).to_contain_text("stopped")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".assistant")).to_have_count(0)


def test_strangers_words_are_shown_as_text(page: Page, url: str) -> None:
    page.goto(f"{url}/#/models")
    page.get_by_role("link", name=HOSTILE).click()
    expect(page.locator("h1")).to_have_text(HOSTILE)
    expect(page.locator("svg.dag .missing")).to_have_count(3)
    page.goto(f"{url}/#/search/{HOSTILE[:14]}")
    expect(page.locator(".results a")).to_have_text([HOSTILE])
    page.goto(f"{url}/#/executions/%22%3E{HOSTILE}")
    expect(page.get_by_role("alert")).to_be_visible()
    assert page.evaluate("window.hacked") is None and page.locator("main img").count() == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("executions/0x12", 400),
        (f"executions/0x{'77' * 32}", 404),
        (f"executions/0x{'77' * 32}/plan", 404),
        (f"executions/0x{'77' * 32}/verification", 404),
        (f"models/0x{'77' * 32}", 404),
        ("models/%00", 404),
        (f"accounts/0x{'77' * 20}", 404),
        ("accounts/..%2f", 404),
        ("executions?of=me", 400),
        ("executions?before=1", 400),
        (f"models?before={'9' * 40}.1", 400),
        ("nodes?start=-1", 400),
        ("nothing", 404),
    ],
)
def test_bad_questions_are_errors_of_the_api(url: str, path: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{url}/explorer/v1/{path}")
    with caught.value as reply:
        assert reply.status == status and json.load(reply)["error"]["message"]


def test_odd_questions_have_empty_answers(url: str) -> None:
    for path in ("search?q=%25", "search?q=0x", f"search?q={'%F0%9F%92%A9' * 80}", "search?q=%00"):
        with urllib.request.urlopen(f"{url}/explorer/v1/{path}") as reply:
            assert len(json.load(reply)["results"]) <= 10
    with urllib.request.urlopen(f"{url}/explorer/v1/nodes?start=999999999") as reply:
        assert json.load(reply)["nodes"] == []


def test_every_section_on_a_phone_in_the_dark_by_keyboard(browser: Browser, url: str) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 740}, color_scheme="dark", has_touch=True
    )
    page = context.new_page()
    page.set_default_timeout(HANG_S * 1_000)
    page.goto(url)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    for section in SECTIONS:
        link = page.locator(f"nav a[href='#/{section}']")
        link.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#prompt" if section == "chat" else "main tbody tr")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), section
        expect(link).to_have_attribute("aria-current", "page")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, back.removeprefix("rgb(").removesuffix(")").split(","))) < 60, back
    context.close()


@pytest.mark.long  # in small: test_api_keys.py of serve; the tab alone is here
def test_a_key_is_asked_for_and_forgotten_with_the_tab(
    browser: Browser, network: Network, tmp_path: Path
) -> None:
    database = f"sqlite:///{tmp_path / 'keys.sqlite'}"
    command = [find_program("splitup"), "keys", "new", "ann", "--keys", database, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    secret = json.loads(done.stdout)["key"]
    with run_server(network, "--keys", database, "--warm", "0") as api:
        page = browser.new_page()
        page.set_default_timeout(HANG_S * 1_000)
        for path in ("nodes", ""):  # nobody has given a wrong key yet
            page.goto(f"{api.removesuffix('/v1')}/#/{path}")
            expect(page.get_by_label("API key")).to_be_visible()
            expect(page.get_by_role("alert")).to_have_count(0)
        page.goto(f"{api.removesuffix('/v1')}/#/nodes")
        page.get_by_label("API key").fill(secret)
        page.get_by_role("button", name="Use").click()
        expect(page.locator("nodes-view tbody tr")).not_to_have_count(0)
        stored = page.evaluate("[localStorage.length, sessionStorage.length]")
        assert stored == [0, 1]
        page.close()
