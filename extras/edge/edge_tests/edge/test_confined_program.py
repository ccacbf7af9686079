"""What an exported model may do to the one who runs it: nothing but give logits, or an error."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from splitup_edge import confined_program
from splitup_edge.confined_program import EdgeTexts

from splitup.core.errors import InvalidModel
from splitup.decode.step import make_arrays, make_causal_step

HEAD = b"\x30\0\0\0ET12eh00\x20\0\0\0" + bytes(32) + b"\n"


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined_program, "_MODULE", "edge_tests.edge.hostile_program")


def save(path: Path, does: str) -> Path:
    path.write_bytes(HEAD + does.encode())
    return path


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("die", "ended its process: .*; do not trust this file"),
        ("no info", "gave no model"),
        ("one part", "gave no model"),
    ],
)
def test_s26_a_file_that_cannot_be_loaded_ends_its_own_process(
    does: str, error: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=error):
        EdgeTexts(save(tmp_path / "m.pte", does))


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("die at a step", "ended its process: .*; do not trust this file"),
        ("few", "gave no logits of 1 rows"),
        ("many", "ended its process: its answer cannot be read: it has 20 bytes"),
    ],
)
async def test_s26_a_step_gives_logits_of_its_size_or_an_error(
    does: str, error: str, tmp_path: Path
) -> None:
    with closing(EdgeTexts(save(tmp_path / "m.pte", does))) as texts:
        with pytest.raises(InvalidModel, match=error):
            await texts.submit(make_arrays(make_causal_step([1], 0), 1))
    with closing(EdgeTexts(save(tmp_path / "m.pte", "well"))) as texts:
        found = await texts.submit(make_arrays(make_causal_step([1], 0), 1))
    np.testing.assert_array_equal(found["logits"], np.zeros((1, 4), np.float32))


@pytest.mark.parametrize("does", ["long steps", "many tokens"])
def test_s132_the_arrays_of_a_step_are_bounded(does: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"gave no model: .* a step has arrays of"):
        EdgeTexts(save(tmp_path / "m.pte", does)).close()
