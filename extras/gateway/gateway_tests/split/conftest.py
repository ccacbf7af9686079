"""A private model, cut and compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_tests.split.local_nodes import CHUNK, LocalNodes
from splitup_deploy.cutting.build import CompiledModel, build, parse_size
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.publishing.prices import set_price

from tests.deploy.execution import CutModel
from tests.deploy.llamas import EXAMPLE


@pytest.fixture(scope="package")
def compiled() -> CompiledModel:
    built = build(str(EXAMPLE), parse_size("2.5MB"), sizes=Sizes(chunk=CHUNK), private=1)
    return set_price(built, 2_000)  # 2 micro-USDC per step: its own price would be less than one


@pytest.fixture(scope="package")
def cut(compiled: CompiledModel) -> CutModel:
    return CutModel(compiled)


@pytest.fixture
async def nodes(compiled: CompiledModel, cut: CutModel, tmp_path: Path) -> LocalNodes:
    return LocalNodes(compiled, cut, tmp_path)
