"""The private page in a real browser, before a real network: the same tokens, and nothing told."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright
from splitup_private.adapters.client import AdapterOptions
from splitup_private.split.messages import Forward, encode_binary, split_binary
from tokenizers import Tokenizer

from splitup.client.connection import SplitUp
from splitup.config import NetworkConfig
from splitup.devnet.processes import find_program
from tests.builders import HANG_S, find_free_port
from tests.e2e.conftest import EXAMPLE, MODEL, PRIVATE, PRIVATE_0, Network
from tests.e2e.recorder import Recorder, run_recorder
from tests.e2e.server import run_server
from tests.page_build import find_browser

pytestmark = pytest.mark.long  # in small: gateway_tests/split and /page, without a network

ADAPTER = EXAMPLE.parent / "packages-4m-python-docs"
QUESTION = "Return the"
PROMPT = "zebra7719 library for quartz"
TOKENS = 10
PROMISE = (
    "Text and token ids stay on your device. Nodes that receive activations can usually "
    "reconstruct them if they know the model."
)

COUNT_FILES = """async () => {
    const root = await navigator.storage.getDirectory();
    const folder = await root.getDirectoryHandle("splitup-private");
    let bytes = 0;
    for await (const file of folder.values()) bytes += (await file.getFile()).size;
    return bytes;
}"""


@pytest.fixture(scope="module")
def recorder(private: Network) -> Iterator[Recorder]:
    with run_recorded(private, PRIVATE) as found:
        yield found


@pytest.fixture(scope="module")
def adapter_link() -> Iterator[Recorder]:
    """What the browser sends to an adapter host, which the test starts."""
    with run_recorder(f"http://127.0.0.1:{find_free_port()}") as found:
        yield found


@pytest.fixture(scope="module")
def recorder_0(private: Network, private_0: Network, adapter_link: Recorder) -> Iterator[Recorder]:
    """The same with a second model, and a host of adapters."""
    flags = ("--adapter-host", adapter_link.url, "--adapter-signer")
    key = NetworkConfig.load(private.config).load_user().signing_key_hex
    with run_recorded(private, PRIVATE, PRIVATE_0, *flags, key) as found:
        yield found


@contextmanager
def run_recorded(network: Network, *flags: str) -> Iterator[Recorder]:
    """Run a server of private models; give what stands between it and the browser."""
    flags += ("--private", "--warm", "0", "--lease-steps", "600", "--split-sessions", "2")
    model, *others = flags
    with (
        run_server(network, *others, model=model) as url,
        run_recorder(url.removesuffix("/v1")) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    expect.set_options(timeout=HANG_S * 1_000)
    with sync_playwright() as play:
        browser: Browser = play.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser.new_context()
        browser.close()


@pytest.fixture
def page(context: BrowserContext, recorder: Recorder) -> Iterator[Page]:
    with open_page(context, recorder) as page:
        yield page


@pytest.fixture
def page_0(context: BrowserContext, recorder_0: Recorder) -> Iterator[Page]:
    """The same page, where there is a second model to choose."""
    with open_page(context, recorder_0) as page:
        yield page


@contextmanager
def open_page(context: BrowserContext, recorder: Recorder) -> Iterator[Page]:
    """The page with the model on the device; what the browser complains about fails the test."""
    page = context.new_page()
    page.set_default_timeout(HANG_S * 1_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{recorder.url}/private")
    load(page)
    yield page
    page.close()
    assert not [text for text in complaints if "Failed to load resource" not in text]


def load(page: Page) -> None:
    """Put the model on the device; one that is there is opened without being asked for."""
    offered, ready = find_buttons(page)
    expect(offered.or_(ready)).to_be_visible()
    if offered.is_visible():
        offered.click()
    expect(ready).to_be_visible()


def find_buttons(page: Page) -> tuple[Locator, Locator]:
    """Return the button that offers to load so many bytes, and the one of a loaded model."""
    offered = page.get_by_role("button", name=re.compile(r"^Load onto this device \(.*B\)$"))
    return offered, page.get_by_role("button", name="On this device", exact=True)


def ask(page: Page, text: str, tokens: int, **settings: float | str) -> str:
    """Let the model continue a text; return the continuation."""
    page.get_by_label("Form").select_option("text")
    page.get_by_label("Most tokens").fill(str(tokens))
    for label, value in settings.items():
        page.get_by_label(label.replace("_", " ").capitalize()).fill(str(value))
    page.get_by_label("Beginning of a text").fill(text)
    page.get_by_label("Beginning of a text").press("Enter")
    expect(page.get_by_role("button", name="Continue")).to_be_enabled()
    answer = page.locator(".assistant").last
    assert answer.locator(".error").count() == 0, answer.inner_text()
    return answer.locator(".text").inner_text()


def list_encodings(text: str, tokens: list[int]) -> dict[str, bytes]:
    """Return what a text or its tokens would look like if they were sent."""
    quoted = urllib.parse.quote(text).encode()
    found = {"utf-8": text.encode(), "URL": quoted, "hex": text.encode().hex().encode()}
    found |= {form: text.encode(form) for form in ("utf-16-le", "utf-16-be")}
    for skipped in range(3):  # base64 at each alignment, without the ends that depend on neighbours
        body = text.encode()[skipped:]
        found[f"base64 {skipped}"] = base64.b64encode(body)[: len(body) // 3 * 4]
    for separator in (",", ", ", " "):
        found[f"numbers '{separator}'"] = separator.join(map(str, tokens)).encode()
    for form in ("<i2", ">i2", "<i4", ">i4", "<i8", ">i8", "<f4", "<f8"):
        found[form] = np.array(tokens, form).tobytes()
    return found


def test_the_tokens_are_those_of_the_uncut_model(page: Page, private: Network) -> None:
    expect(page.get_by_role("note")).to_contain_text(PROMISE)  # before anything is sent
    with SplitUp.connect_sync(private.config) as net:
        for temperature, seed, top_p in ((0.0, 0, 1.0), (0.8, 5, 1.0), (1.5, 2**63, 0.9)):
            options = {"temperature": temperature, "seed": seed, "top_p": top_p}
            wanted = net.generate(MODEL, PROMPT, max_tokens=TOKENS, **options)
            text = "".join(token.text for token in wanted)
            assert ask(page, PROMPT, TOKENS, **options).strip() == text.strip(), options
    expect(page.locator("#cost")).not_to_have_text("0 USDC")


def test_without_a_block_on_the_device_they_are_the_same(page_0: Page, private: Network) -> None:
    page_0.locator("select").first.select_option(PRIVATE_0)
    load(page_0)
    with SplitUp.connect_sync(private.config) as net:
        wanted = net.generate(MODEL, PROMPT, max_tokens=TOKENS)
        text = "".join(token.text for token in wanted)
    assert ask(page_0, PROMPT, TOKENS, temperature=0).strip() == text.strip()


def test_an_adapter_is_applied_under_encryption_or_not_at_all(
    page_0: Page, private: Network, recorder_0: Recorder, adapter_link: Recorder
) -> None:
    page = page_0
    command = [find_program("splitup"), "adapter-host", ADAPTER, "--origin", recorder_0.url]
    command += ["--port", adapter_link.target.rpartition(":")[2]]
    command += ["--sign", "--config", private.config]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as host:
        try:
            assert host.stderr is not None
            lines = [host.stderr.readline() for _ in range(3)]
            assert adapter_link.target in lines[2], lines
            page.locator("select").first.select_option(PRIVATE_0)
            load(page)
            with SplitUp.connect_sync(private.config) as net:
                options = AdapterOptions(adapter_link.target, ADAPTER.name)
                wanted = net.generate(PRIVATE_0, QUESTION, max_tokens=TOKENS, adapter=options)
                text = "".join(token.text for token in wanted)
                plain = net.generate(PRIVATE_0, QUESTION, max_tokens=TOKENS)
                assert "".join(token.text for token in plain) != text
            page.get_by_label("Adapter").select_option("words")  # the question chooses it
            assert ask(page, QUESTION, TOKENS, temperature=0).strip() == text.strip()
            facts = page.locator(".assistant").last.locator(".facts")
            expect(facts).to_contain_text(f"adapter {ADAPTER.name}")
            expect(facts).to_contain_text("under encryption: ")
            expect(facts).to_contain_text("kB received")
            ask(page, "quartz", 2)
            expect(facts).to_contain_text("no adapter has a word of the question")
            page.get_by_label("Adapter").select_option(label=ADAPTER.name)
            ask(page, "quartz", 2)
            expect(facts).to_contain_text("under encryption: 2 hidden states")
        finally:
            host.kill()
    everything = b"\n".join(map(bytes, adapter_link.sent))
    assert len(everything) > TOKENS * 100_000, "keys and ciphertexts"
    tokens = Tokenizer.from_file(str(EXAMPLE / "tokenizer.json")).encode(text).ids
    for part in (tokens[:4], tokens[-4:]):
        for name, canary in list_encodings(QUESTION, part).items():
            assert len(canary) < 4 or canary not in everything, name
    page.get_by_label("Beginning of a text").fill(QUESTION)
    page.get_by_label("Beginning of a text").press("Enter")
    answer = page.locator(".assistant").last
    expect(answer.get_by_role("alert")).to_contain_text("no text with an adapter without its host")
    assert answer.locator(".text").inner_text() == ""


def test_an_evicted_session_is_fed_again(page: Page, recorder: Recorder) -> None:
    wanted = ask(page, PROMPT, 4, temperature=0)
    start = len(recorder.list_frames())

    def evict() -> None:
        """Begin as many sessions as the server keeps, before it gets the third forward."""
        if len(recorder.list_frames()) - start < 3:
            return
        recorder.before = None
        order = Forward(type="forward", model=PRIVATE, seq_len=1, hidden_dim=256)
        body = encode_binary(order, np.ones(256, "<f4").tobytes())
        for _ in range(2):
            url = f"{recorder.target}/api/v1/split/forward"
            headers = {"Content-Type": "application/octet-stream"}
            request = urllib.request.Request(url, body, headers)
            with urllib.request.urlopen(request, timeout=HANG_S) as reply:
                assert reply.status == 200

    recorder.before = evict
    assert ask(page, PROMPT, 4, temperature=0) == wanted
    headers = [split_binary(frame)[0] for frame in recorder.list_frames()[start:]]
    first, *_ = headers
    assert [h.get("position") for h in headers] == [
        *(0, first["seq_len"], first["seq_len"] + 1),
        *(0, first["seq_len"] + 2, None),  # all rows again, then on; None: the end
    ]
    assert headers[3]["seq_len"] == first["seq_len"] + 2
    assert headers[2]["session_id"] != headers[4]["session_id"]


def test_noise_is_added_and_accounted(page: Page) -> None:
    ask(page, "network", 3, **{"noise:_epsilon": 1_000, "temperature": 0})
    facts = page.locator(".assistant").last.locator(".facts")
    expect(facts).to_contain_text("noise: ε")
    expect(facts).to_contain_text("δ 1e-6")
    spent = float(facts.inner_text().partition("ε ")[2].partition(",")[0])
    assert 100 < spent <= 1_000, "the model may end the text early"
    ask(page, "network", 3, **{"noise:_epsilon": ""})
    expect(page.locator(".assistant").last.locator(".facts")).not_to_contain_text("noise")


def test_nothing_that_leaves_the_browser_holds_text_or_tokens(
    page: Page, recorder: Recorder
) -> None:
    answer = ask(page, PROMPT, TOKENS, temperature=0.8, seed=11)
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "tokenizer.json"))
    everything = recorder.read_all()
    for text in (PROMPT, answer.strip()):
        tokens = tokenizer.encode(text).ids
        for part in (tokens[:4], tokens[-4:]):
            words = tokenizer.decode(part).strip()
            for name, canary in list_encodings(words, part).items():
                assert len(canary) < 4 or canary not in everything, (name, words)
    forwards = 0
    for frame in recorder.list_frames():
        header, tensor = split_binary(frame)
        if header["type"] == "end":
            assert set(header) == {"type", "session_id"} and not tensor
            continue
        forwards += 1
        known = {"type", "model", "seq_len", "hidden_dim", "session_id", "incremental", "position"}
        assert set(header) <= known and header["model"] == PRIVATE
        assert len(tensor) == 4 * header["seq_len"] * header["hidden_dim"]
        assert np.isfinite(np.frombuffer(tensor, "<f4")).all()
    assert forwards >= TOKENS
    paths = {head.split(b" ")[1] for head in recorder.list_heads()}
    assert all(path.startswith((b"/api/v1/split/", b"/private")) or b"." in path for path in paths)
    assert not any(head.startswith(b"POST") or b"cookie" in head for head in recorder.list_heads())


def test_without_websockets_the_page_uses_http(
    context: BrowserContext, page: Page, recorder: Recorder
) -> None:
    wanted = ask(page, PROMPT, 4, temperature=0)
    recorder.refused = b"GET /api/v1/split/stream"
    try:
        page.reload()
        load(page)
        before = len(recorder.list_frames())
        assert ask(page, PROMPT, 4, temperature=0) == wanted
        assert len(recorder.list_frames()) == before
    finally:
        recorder.refused = None


def test_after_the_first_visit_only_forward_needs_the_network(
    context: BrowserContext, page: Page
) -> None:
    page.evaluate("navigator.serviceWorker.ready.then(() => 0)")
    context.set_offline(True)
    try:
        page.reload()
        expect(page.get_by_text("offline", exact=True)).to_be_visible()
        load(page)
        page.get_by_label("Beginning of a text").fill("hello")
        page.get_by_label("Beginning of a text").press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("the server does not answer")
        expect(page.get_by_role("button", name="Continue")).to_be_enabled()
    finally:
        context.set_offline(False)
    assert ask(page, "hello", 2)
    page.get_by_role("button", name="Delete all models").click()
    expect(find_buttons(page)[0]).to_be_visible()  # it takes a moment
    load(page)  # from the server again
    manifest = json.loads(page.evaluate("fetch('/private.webmanifest').then((r) => r.text())"))
    assert manifest["start_url"] == "/private" and manifest["display"] == "standalone"


def test_what_is_loaded_is_said_before_and_opened_again_after(
    context: BrowserContext, recorder: Recorder
) -> None:
    assert context.browser is not None
    fresh = context.browser.new_context()
    page = fresh.new_page()
    page.set_default_timeout(HANG_S * 1_000)
    page.goto(f"{recorder.url}/private")
    offered, ready = find_buttons(page)
    said = offered.inner_text()
    offered.click()
    expect(ready).to_be_visible()
    held = page.evaluate(COUNT_FILES) + (EXAMPLE / "tokenizer.json").stat().st_size
    assert said == f"Load onto this device ({held / 1e6:.2g} MB)"
    page.reload()
    expect(ready).to_be_visible()  # nobody clicked
    assert ask(page, PROMPT, 2)
    page.get_by_role("button", name="Delete all models").click()
    expect(offered).to_have_text(said)
    fresh.close()


def test_on_a_phone_in_the_dark_by_keyboard(context: BrowserContext, recorder: Recorder) -> None:
    assert context.browser is not None
    phone = context.browser.new_context(
        viewport={"width": 360, "height": 740}, color_scheme="dark", has_touch=True, is_mobile=True
    )
    page = phone.new_page()
    page.set_default_timeout(HANG_S * 1_000)
    page.goto(f"{recorder.url}/private")
    expect(button := page.get_by_role("button", name="Load onto this device")).to_be_enabled()
    button.press("Enter")  # of one that is disabled it would do nothing
    expect(page.get_by_label("Beginning of a text")).to_be_focused()
    page.keyboard.type("library for")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").press("Enter")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    expect(page.get_by_role("note")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, back.removeprefix("rgb(").removesuffix(")").split(","))) < 60, back
    phone.close()
