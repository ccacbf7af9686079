"""Where ``splitup run`` writes what a stranger's model gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitup.cli.commands.run import name_file

NAMES = ("logits", "a/b", "a%2Fb", "../above", "/etc/above", "..", "/")


@pytest.mark.parametrize("name", NAMES)
def test_s68_an_output_is_written_into_the_directory_that_was_given(
    name: str, tmp_path: Path
) -> None:
    path = name_file(tmp_path / "given", name)
    assert path.parent == tmp_path / "given" and path.resolve() == path
    assert path.suffix == ".npy" or name in ("..", "/")


def test_s68_no_output_takes_the_file_of_another(tmp_path: Path) -> None:
    assert len({name_file(tmp_path, name) for name in NAMES}) == len(NAMES)
    assert name_file(tmp_path, "logits") == tmp_path / "logits.npy"
