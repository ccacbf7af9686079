"""Cuts through attention, whose tasks send each other more than the model weighs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from splitup_deploy.cutting.advice import count_crossing_bytes, describe_waste, is_wasteful
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import Sizes

from splitup.graph.manifest import Manifest
from tests.deploy.llamas import TINY, save_llama

CONTEXT = 2**17  # whose cache is 17 MB a layer; all weights are 75 kB
TARGET = 60_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, {**TINY, "max_position_embeddings": CONTEXT})
    return directory


def cut(model: Path, targets: Collection[int], context: int) -> Manifest:
    return build(str(model), targets, sizes=Sizes(context=context, chunk=8)).manifest


def test_a_cut_through_attention_is_named_and_what_to_give_instead(model: Path) -> None:
    wasteful = cut(model, [TARGET], CONTEXT)
    assert count_crossing_bytes(wasteful) > 16_000_000 and is_wasteful(wasteful)
    tried: list[tuple[tuple[int, ...], int]] = []

    def rebuild(targets: Collection[int], context: int) -> Manifest:
        tried.append((tuple(targets), context))
        return cut(model, targets, context)

    text = describe_waste(wasteful, [TARGET], rebuild)
    (_, context), (targets, _) = next(t for t in reversed(tried) if t[0] == (TARGET,)), tried[-1]
    assert text.endswith(f"give --context {context} or --target-vram {targets[0] // 10**6}MB")
    assert not is_wasteful(cut(model, [TARGET], context))
    assert not is_wasteful(cut(model, targets, CONTEXT))


def test_a_model_in_one_piece_is_none(model: Path) -> None:
    assert not is_wasteful(cut(model, [10**9], CONTEXT))
