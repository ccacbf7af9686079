"""The shipped pages in a real browser, before a server that says what a test tells it to."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from splitup_gateway.page_files import MARKET_PAGE

from tests.builders import HANG_S
from tests.page_build import PAGE, find_browser

ORIGIN = "http://localhost:9"  # browsers trust this name; nothing answers there
SHIPPED = PAGE.parent / "extras/gateway/splitup_gateway/page"
PRIVATE = "/api/v1/split/models"
NO_MODELS = {"models": [], "adapter_hosts": [], "adapter_signers": []}
GIVEN = "network monitoring"
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "splitup": {"cost_micro_usdc": 24}}


def make_model(name: str, *, takes_turns: bool, kind: str = "text-generation") -> dict[str, Any]:
    model = {"id": name, "kind": kind, "context_length": 256, "price_nano_usdc_per_step": 12}
    return {**model, "takes_images": False, "takes_turns": takes_turns}


TEXTS = make_model("texts", takes_turns=False)
CHATS = make_model("chats", takes_turns=True)
RANKS = make_model("ranks", takes_turns=False, kind="reranking")


def make_stream(finish: str, *texts: str) -> str:
    """Return the events of an answer, as a text and as a turn."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"text": text, "delta": {"content": text}, "finish_reason": None}]}
        for text in texts
    ]
    chunks[-1]["choices"][0]["finish_reason"] = finish
    chunks.append({"choices": [], "usage": USAGE})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        running = play.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield running
        running.close()


@contextlib.contextmanager
def open_page(
    browser: Browser, answers: Mapping[str, Any], path: str = "/", script: str = ""
) -> Iterator[Page]:
    """Open a page with these answers by path: texts are events, errors are 503, else JSON."""

    def answer(route: Route) -> None:
        asked = urlsplit(route.request.url).path
        if asked in MARKET_PAGE:
            name, kind = MARKET_PAGE[asked]
            route.fulfill(body=(SHIPPED / name).read_bytes(), content_type=kind)
        elif isinstance(answers[asked], str):
            kind = "text/event-stream"
            route.fulfill(body=answers[asked], content_type=kind)
        else:
            status = 503 if "error" in answers[asked] else 200
            route.fulfill(status=status, json=answers[asked])

    expect.set_options(timeout=HANG_S * 1_000)
    page = browser.new_page()
    page.set_default_timeout(HANG_S * 1_000)
    page.add_init_script(script)
    page.route("**/*", answer)
    page.goto(ORIGIN + path)
    yield page
    page.close()


def list_models(*models: dict[str, Any]) -> dict[str, Any]:
    return {"/v1/models": {"data": models}, "/health": {"status": "ok"}}


@pytest.mark.long  # in small: the first model is one that chats, below; e2e/test_page.py
def test_a_model_without_turns_continues_texts(browser: Browser) -> None:
    answers = list_models(TEXTS) | {"/v1/completions": make_stream("length", " tool", " that")}
    with open_page(browser, answers) as page:
        expect(page.get_by_label("Form")).to_have_value("text")
        expect(page.get_by_role("heading")).to_have_text("Begin a text")
        expect(page.get_by_label("System prompt")).to_have_count(0)
        field = page.get_by_label("Beginning of a text")
        field.fill(GIVEN)
        with page.expect_request("**/v1/completions") as asked:
            page.get_by_role("button", name="Continue").click()
        assert asked.value.post_data_json["prompt"] == GIVEN
        expect(page.locator(".text")).to_have_text([f"{GIVEN} tool that"])
        expect(page.locator(".given")).to_have_text(GIVEN)
        expect(page.locator(".user")).to_have_count(0)
        with page.expect_request("**/v1/completions") as asked:
            page.get_by_role("button", name="Go on").click()
        assert asked.value.post_data_json["prompt"] == f"{GIVEN} tool that"
        expect(page.locator(".text").last).to_have_text(f"{GIVEN} tool that tool that")


@pytest.mark.parametrize("models", [(TEXTS, CHATS), (RANKS, CHATS), (CHATS, TEXTS)])
def test_the_first_model_is_one_that_chats(
    browser: Browser, models: tuple[dict[str, Any], ...]
) -> None:
    answers = list_models(*models) | {"/v1/chat/completions": make_stream("stop", "hello")}
    with open_page(browser, answers) as page:
        expect(page.get_by_label("Model")).to_have_value("chats")
        expect(page.get_by_label("Form")).to_have_value("chat")
        page.get_by_label("Message").fill("hi")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".user .text")).to_have_text("hi")
        expect(page.locator(".assistant .text")).to_have_text("hello")


@pytest.mark.long  # in small: the first model is one that chats, above
def test_the_form_follows_the_model_and_the_choice(browser: Browser) -> None:
    with open_page(browser, list_models(CHATS, TEXTS)) as page:
        form = page.get_by_label("Form")
        page.get_by_label("Model").select_option("texts")
        expect(form).to_have_value("text")
        expect(form.locator("option[value=chat]")).to_be_disabled()
        page.get_by_label("Model").select_option("chats")
        expect(form).to_have_value("chat")
        form.select_option("text")  # a chat model can continue texts, too
        expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_a_network_that_goes_away_and_comes_back_is_told_without_a_reload(browser: Browser) -> None:
    nodes = {"sequence": 7, "total": 3, "nodes": [], "next": None}
    answers = list_models(TEXTS) | {"/explorer/v1/nodes": nodes}
    away = {"/health": {"status": "waiting"}, "/explorer/v1/nodes": {"error": {"message": "away"}}}
    ask_again = "document.dispatchEvent(new Event('visibilitychange'))"  # not after 5 s
    with open_page(browser, given := dict(answers), "/#/nodes") as page:
        expect(page.get_by_text("3 nodes")).to_be_visible()
        expect(page.get_by_role("status")).to_have_count(0)
        given |= away
        page.evaluate(ask_again)
        expect(page.get_by_role("status")).to_contain_text("what is shown may be out of date")
        expect(page.get_by_role("alert")).to_have_text(
            re.compile("^away; what is shown is of .*[0-9]")
        )
        given |= answers
        page.evaluate(ask_again)
        expect(page.get_by_role("status")).to_have_count(0)
        expect(page.get_by_role("alert")).to_have_count(0)


REGISTERED = "navigator.serviceWorker.register = async () => ({});"


@pytest.mark.parametrize(("script", "count"), [("", 1), (REGISTERED, 0)])
def test_a_page_that_cannot_be_installed_says_so(browser: Browser, script: str, count: int) -> None:
    """Without a server the browser refuses the worker, as it does with a strange certificate."""
    with open_page(browser, {PRIVATE: NO_MODELS}, "/private", script) as page:
        expect(page.get_by_text("offers no private model")).to_be_visible()
        notice = page.get_by_text("can neither be installed nor opened without a network")
        expect(notice).to_have_count(count)
    heading = "### A page to install"
    assert heading in (PAGE.parent / "docs/guides/private-inference.md").read_text("utf-8")
