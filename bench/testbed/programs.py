"""Programs of the product and pages in Chromium, as a benchmark uses them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, Page, async_playwright, expect

from splitup.devnet.processes import find_program
from tests.page_build import find_browser

PATIENCE_MS: Final = 240_000


class Failed(Exception):
    """A use did not do what it should; the text says how."""


def check(holds: bool, said: str) -> None:
    """Raise Failed unless it holds."""
    if not holds:
        raise Failed(said)


def squeeze(text: str) -> str:
    """Return a text as a page shows it: without the white space that HTML folds."""
    return " ".join(text.split())


@asynccontextmanager
async def run_line(pattern: str, *command: str | Path) -> AsyncIterator[str]:
    """Run a program until it is no longer needed; give what it says of its address."""
    process = await asyncio.create_subprocess_exec(
        find_program("splitup"), *map(str, command), stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        lines = []
        while line := (await process.stderr.readline()).decode():
            lines.append(line)
            if found := re.search(pattern, line):
                yield found[1]
                return
        raise Failed("".join(lines))
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.communicate()


@asynccontextmanager
async def run_server(directory: Path, model: str, *flags: str) -> AsyncIterator[str]:
    """Run ``splitup serve``; give its address."""
    command = ("serve", model, "--port", "0", "--lease-steps", "1000", *flags)
    async with run_line(r"base URL: (\S+)/v1", *command, "--config", directory) as url:
        yield url


@asynccontextmanager
async def run_host(folder: Path) -> AsyncIterator[str]:
    """Run ``splitup adapter-host``; give its address."""
    async with run_line(r"adapter host: (\S+)", "adapter-host", folder, "--port", "0") as url:
        yield url


@asynccontextmanager
async def open_page(url: str) -> AsyncIterator[Page]:
    """Open a page in Chromium."""
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as play:
        browser: Browser = await play.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_MS)
            await page.goto(url)
            yield page
        finally:
            await browser.close()


async def run_json(program: str, *arguments: str | Path) -> dict[str, Any]:
    """Run a program of the product; return the JSON object that it prints, or raise Failed."""
    process = await asyncio.create_subprocess_exec(
        *(find_program(program), *map(str, arguments), "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    check(process.returncode == 0, err.decode()[-400:])
    found: dict[str, Any] = json.loads(out)
    return found
