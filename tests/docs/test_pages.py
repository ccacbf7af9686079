"""The documentation's links, anchors, paths, programs and line lengths are right."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
from splitup_deploy.cli.commands import app as deploy_app
from splitup_node.cli.app import app as node_app
from splitup_oracle.cli.app import app as oracle_app
from typer import Context
from typer.core import TyperGroup as Group
from typer.main import get_command

from splitup.cli.verbs import app as user_app
from splitup.core import limits, tuning

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
REPORTS: Final = ROOT / "bench/reports"  # what commands measured
PAGES: Final = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *REPORTS.glob("*.md")])
GUIDES: Final = [page for page in PAGES if page.parent.name != "adr"]  # decisions are history
PROSE_COLUMNS: Final = 120
README_LINES: Final = 100
# Folders that a path in backticks may begin with, and the packages that are named without theirs.
FOLDERS: Final = "splitup|node|oracle|deploy|contracts|tests|docs|bench|examples|scripts"
PACKAGES: Final = {
    "splitup": "splitup",
    "splitup_node": "node/splitup_node",
    "splitup_oracle": "oracle/splitup_oracle",
    "splitup_deploy": "deploy/splitup_deploy",
}
OTHER_SOURCES: Final = ("contracts/src", "contracts/test", "page/src", "tests", "extras", "bench")
# What only exists on the machine of a reader or in the store.
ELSEWHERE: Final = re.compile(r"contracts/(node_modules|out|cache)|executions/")

APPS: Final = {
    "splitup": user_app,
    "splitup-deploy": deploy_app,
    "splitup-node": node_app,
    "splitup-oracle": oracle_app,
}

FENCE: Final = re.compile(r"^ *(`{3,}|~{3,})")
CONSOLE: Final = re.compile(r"^ *```console[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"`([^`]+)`")
LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING: Final = re.compile(r"^#{1,6} +(.+?) *#*$")
PATH: Final = re.compile(rf"^(?:{FOLDERS}|{'|'.join(PACKAGES)})(?:/[\w.,{{}}-]+)+/?$")
MODULE: Final = re.compile(rf"^({'|'.join(PACKAGES)})((?:\.\w+)+)$")
NAMED_PAGE: Final = re.compile(r"(?<![\w/])(?:docs|bench/reports)/[\w/-]+\.(?:md|svg)")
NAVIGATED: Final = re.compile(r"^ +- [^:]+: (\S+\.md|\S+/)$", re.MULTILINE)  # of mkdocs.yml
BRACES: Final = re.compile(r"\{([^{}]*)\}")
DECISION: Final = re.compile(r"\bADR[ \n]+(\d+)(?:, (\d+))*\b")
CONSTANT: Final = re.compile(r"`(limits|tuning)\.([A-Z]\w+)`")
CONSTANTS: Final = {"limits": limits, "tuning": tuning}


def iter_prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page that are not in a block of code."""
    fence = ""
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        found = FENCE.match(line)
        if found and (not fence or found[1].startswith(fence)):
            fence = "" if fence else found[1]
        elif not fence:
            yield number, line


def iter_blocks(page: Path, language: str) -> Iterator[str]:
    """Yield the blocks of code in one language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    yield from pattern.findall(page.read_text("utf-8"))


def make_anchor(heading: str) -> str:
    """Return a heading's anchor, as GitHub and mkdocs make it of plain text."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip())


def get_anchors(page: Path) -> set[str]:
    headings = (HEADING.match(line) for _, line in iter_prose(page))
    return {make_anchor(found[1]) for found in headings if found}


def expand_braces(text: str) -> list[str]:
    """Return "a/b.c" and "a/d.c" for "a/{b,d}.c"."""
    parts = BRACES.split(text)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def find_path(name: str) -> Path:
    first, slash, rest = name.partition("/")
    return ROOT / (PACKAGES.get(first, first) + slash + rest)


def is_module(package: str, names: list[str]) -> bool:
    """Say whether the names are a module, or a module and what it defines."""
    for count in (len(names), len(names) - 1):
        path = ROOT / PACKAGES[package] / "/".join(names[:count])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return count == len(names) or names[-1] in (
                path.with_suffix(".py")
                if path.with_suffix(".py").is_file()
                else path / "__init__.py"
            ).read_text("utf-8")
    return False


def name_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for number, line in iter_prose(page):
        for target in LINK.findall(CODE.sub("", line)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            assert linked.exists(), f"line {number}: there is no {target}"
            if page.is_relative_to(DOCS):  # `make docs` fails on other links
                assert linked.is_relative_to(DOCS), f"line {number}: the site has no {target}"
            if anchor:
                assert anchor in get_anchors(linked), f"line {number}: no heading for {target}"


def test_the_site_has_every_page_and_no_other() -> None:
    named = NAVIGATED.findall((ROOT / "mkdocs.yml").read_text("utf-8"))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(named) == {page for page in pages if not page.startswith("adr/0")}


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_named_paths_and_modules_exist(page: Path) -> None:
    for number, line in iter_prose(page):
        for code in CODE.findall(line):
            if PATH.match(code) and not ELSEWHERE.match(code):
                for name in expand_braces(code):
                    assert find_path(name).exists(), f"line {number}: there is no {name}"
            if found := MODULE.match(code):
                names = found[2].strip(".").split(".")
                assert is_module(found[1], names), f"line {number}: there is no {code}"


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_prose_fits_its_columns(page: Path) -> None:
    before, is_code = "", False
    for number, line in iter_prose(page):
        is_code = line.startswith("    ") and (is_code or not before.strip())
        if not is_code and not line.lstrip().startswith("|"):  # a table's row cannot be wrapped
            assert len(line) <= PROSE_COLUMNS, f"line {number} has {len(line)} columns"
        before = line


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_python_in_pages_is_python(page: Path) -> None:
    for place, block in enumerate(iter_blocks(page, "python")):
        compile(block, f"{name_page(page)}, block {place}", "exec")


@pytest.mark.parametrize("page", GUIDES, ids=name_page)
def test_commands_on_the_pages_exist(page: Path) -> None:
    """Every command of ours, with all its verbs and options, in consoles and in backticks."""
    lines = [code for _, line in iter_prose(page) for code in CODE.findall(line)]
    lines += [
        line for block in CONSOLE.findall(page.read_text("utf-8")) for line in block.split("$ ")
    ]
    for line in lines:
        words = re.split(r"[|<>#;]| && ", line.replace("\n", " "))[0].split()
        while words and "=" in words[0] and not words[0].startswith("-"):
            words.pop(0)  # VARIABLE=value
        program = words[0].removeprefix(".venv/bin/") if words else ""
        if program in APPS and len(words) > 1:
            check_command(get_command(APPS[program]), words[1:], line)


def check_command(command: Any, words: list[str], line: str) -> None:
    known = {"--help", "-h"}
    for place, word in enumerate(words):
        known |= {name for parameter in command.params for name in parameter.opts}
        known |= {name for parameter in command.params for name in parameter.secondary_opts}
        if word.startswith("-") and not re.fullmatch(r"-|-?[\d.]+", word):
            assert word.partition("=")[0] in known, f"no option {word} in: {line}"
        elif isinstance(command, Group):
            found = command.get_command(Context(command), word)
            assert found is not None or place, f"no command {word} in: {line}"
            if found is None:
                return
            command = found


@functools.cache
def read_sources() -> list[tuple[Path, str]]:
    return [
        (path, path.read_text("utf-8"))
        for folder in (*PACKAGES.values(), *OTHER_SOURCES)
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".sol", ".ts", ".toml")
    ]


def test_pages_named_in_the_code_exist() -> None:
    for path, text in read_sources():
        for name in NAMED_PAGE.findall(text):
            assert (ROOT / name).is_file(), f"{name_page(path)}: there is no {name}"


def test_named_decisions_exist() -> None:
    decisions = {int(page.name[:4]) for page in (ROOT / "docs/adr").glob("0*.md")}
    for path, text in (*((page, page.read_text("utf-8")) for page in PAGES), *read_sources()):
        for found in DECISION.finditer(text):
            numbers = {int(number) for number in re.findall(r"\d+", found[0])}
            assert numbers <= decisions, f"{name_page(path)}: there is no {found[0]}"


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_named_constants_exist(page: Path) -> None:
    for module, name in CONSTANT.findall(page.read_text("utf-8")):
        assert hasattr(CONSTANTS[module], name), f"splitup.core.{module} has no {name}"


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= README_LINES


def test_every_decision_is_in_the_index() -> None:
    index = " ".join((ROOT / "docs/adr/README.md").read_text("utf-8").split())
    for page in sorted((ROOT / "docs/adr").glob("0*.md")):
        title = page.read_text("utf-8").splitlines()[0].split(". ", 1)[1]
        assert f"[{title}]({page.name})" in index
