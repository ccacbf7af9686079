"""Attacks on private splits: what they recover, and that they cannot know what is not there."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from splitup_deploy.cli.commands import app
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.publishing.privacy import attach_privacy
from splitup_private.attacks import measure
from splitup_private.attacks.attacks import TokenDecoder
from splitup_private.attacks.measure import Split, measure_split
from splitup_private.attacks.report import (
    make_file,
    parse_blocks,
    render_curves,
    render_splits,
)
from typer.testing import CliRunner

from splitup.client.private.privacy import describe_privacy
from splitup.core.errors import InvalidInput
from splitup.graph.manifest_rules import load_manifest
from tests.deploy.llamas import EXAMPLE

ROOT = Path(__file__).parents[4]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("bench/reports/*.md")])  # texts to try
TARGET = 10**9


@pytest.fixture(scope="module")
def compiled() -> CompiledModel:
    return build(str(EXAMPLE), TARGET, sizes=Sizes(chunk=32), private=1)


@pytest.fixture(scope="module")
def split(compiled: CompiledModel) -> Split:
    text = "".join(path.read_text() for path in PAGES)
    with pytest.MonkeyPatch.context() as patch:  # fewer, which is faster
        patch.setattr(measure, "PAIRS", (300, 900, 2_000))
        patch.setattr(measure, "_TESTED", 300)
        return measure_split(compiled, 1, text, inverted=16)


@pytest.mark.long  # in small: more pairs recover more tokens, below
def test_who_knows_the_weights_recovers_every_token(split: Split) -> None:
    assert (split.found.tested, split.found.with_weights_bps) == (16, 10_000)


def test_more_pairs_recover_more_tokens(split: Split) -> None:
    shares = [share for _, share in split.found.pairs]
    assert shares == sorted(shares) and shares[0] > 3_000 and shares[-1] > 7_000
    assert split.found.returned_bps > 5_000, "what comes back tells as much"
    assert 500 < split.found.next_token_bps < 6_000


def test_a_length_tells_texts_apart(compiled: CompiledModel) -> None:
    texts = ["a", "b", "a b c", "a", "", " \n", "word " * 500]  # the last one is never sent
    assert measure.recognise_lengths(compiled, "\n\n".join(texts), 256) == (3, 6_666)
    assert measure.recognise_lengths(compiled, "", 256) == (0, 0)


def test_activations_without_information_tell_nothing() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 50, 1_000)
    decoder = TokenDecoder(rng.standard_normal((1_000, 16)).astype(np.float32), tokens)
    others = rng.standard_normal((1_000, 16)).astype(np.float32)
    assert decoder.count_right(others, rng.integers(0, 50, 1_000)) < 60


def test_figures_become_a_label_of_the_model(
    compiled: CompiledModel, split: Split, tmp_path: Path
) -> None:
    path = tmp_path / "privacy.json"
    path.write_text(json.dumps(make_file([split])))
    labelled = attach_privacy(compiled, path)
    assert labelled.model_id != compiled.model_id
    client = load_manifest(labelled.manifest_bytes).client
    assert client is not None and client.privacy == split.found
    text = " ".join(describe_privacy(client))
    assert "usually reconstruct them" in text and "recovered 100 % with the model's weights" in text
    assert compiled.manifest.client is not None
    assert "has not measured" in describe_privacy(compiled.manifest.client)[-1]

    other = build(str(EXAMPLE), TARGET, sizes=Sizes(chunk=32), private=0)
    with pytest.raises(InvalidInput, match="is about other tasks"):
        attach_privacy(other, path)
    path.write_text('{"splits": 1}')
    with pytest.raises(InvalidInput, match="is no privacy file"):
        attach_privacy(compiled, path)
    with pytest.raises(InvalidInput, match="--private"):
        attach_privacy(build(str(EXAMPLE), TARGET), path)


def test_a_table_has_a_column_for_each_split(split: Split) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(render_splits([split, split]))
    assert out.getvalue().count("100.0 %") == 2
    assert "sent, after 900 pairs" in out.getvalue()
    assert f"which of {split.known} known texts, by its length" in out.getvalue()
    assert split.known > 500 and 100 < split.by_length_bps < 5_000


def test_a_picture_has_a_bar_for_each_number_of_pairs(split: Split) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(render_curves([split]))
    bars = {
        line.split()[-4]: line.count("█") for line in out.getvalue().splitlines() if "█" in line
    }
    assert list(bars) == [f"{pairs:,}" for pairs, _ in split.found.pairs]
    for length, (_, share) in zip(bars.values(), split.found.pairs, strict=True):
        assert abs(length - 50 * share / 10_000) <= 1


def test_bad_input_is_refused(compiled: CompiledModel) -> None:
    with pytest.raises(InvalidInput, match="give one of 1300 or more"):
        measure_split(compiled, 1, "too short", inverted=1)
    assert parse_blocks("2,0, 1") == [0, 1, 2]
    for text in ("", "1,", "-1", "one"):
        with pytest.raises(InvalidInput, match="list of numbers"):
            parse_blocks(text)


def test_a_text_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    for path, said in ((latin, "is no UTF-8 text"), (tmp_path / "none.txt", "No such file")):
        result = CliRunner().invoke(app, ["privacy", str(EXAMPLE), "--text", str(path)])
        assert result.exit_code == 2 and said in result.output
        assert result.output.count(path.name) == 1
