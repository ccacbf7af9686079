"""Which classes a member computes in: one test per device, whatever nodes name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from splitup_oracle.member.recomputation import RecomputeCapabilities, Recomputer

from splitup.backend.compiler.kernel_cache import KernelCache

OWN = "tinygrad 0.14.0/CPU:CLANG/x86_64-aa/clang 14"


async def test_s05_invented_classes_cost_no_further_tests_and_displace_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def find_class(determinism: str) -> str:
        asked.append(determinism)
        return OWN

    recomputer = Recomputer(KernelCache(tmp_path))
    monkeypatch.setattr(recomputer, "find_class", find_class)
    capabilities = RecomputeCapabilities(recomputer)
    invented = [f"tinygrad 0.14.0/CPU:CLANG/x86_64-{number}/mine" for number in range(200)]
    assert capabilities.can_recompute(invented[0]), "not tested yet"
    await asyncio.gather(*capabilities._tests.tasks)
    assert not any(capabilities.can_recompute(name) for name in invented)
    assert capabilities.can_recompute(OWN)
    for name in ("tinygrad 0.14.0/PYTHON:PYTHON/None", "tinygrad 0.14.0/NULL:CLANG/None", ""):
        assert not capabilities.can_recompute(name)
    assert len(asked) == 1
    await capabilities.close()
