"""Run the forge tests, and check that the shipped artifacts and vectors are up to date."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.builders import HANG_S
from tests.contracts.vectors import FOLDER, make_files
from tests.faults import find_tests, judge, run_forge

CONTRACTS = Path(__file__).resolve().parents[2] / "contracts"

pytestmark = pytest.mark.skipif(
    not (CONTRACTS / "node_modules").is_dir(),
    reason="contracts/node_modules is missing; run: (cd contracts && npm ci --ignore-scripts)",
)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=CONTRACTS,
        capture_output=True,
        text=True,
        timeout=15 * HANG_S,
        check=False,
    )


@pytest.fixture(scope="module")
def compiler() -> Iterator[ModuleType]:
    """``contracts/compile.py``, with the contracts compiled once: that takes twelve seconds."""
    spec = importlib.util.spec_from_file_location("contracts_compile", CONTRACTS / "compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compiled = module.compile_contracts()
    module.compile_contracts = lambda: compiled  # type: ignore[attr-defined]
    yield module


def test_shipped_artifacts_are_those_of_the_sources(
    compiler: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiler.main(["--check"]) == 0, capsys.readouterr().out


def test_shared_vectors_are_those_that_python_computes() -> None:
    for name, text in make_files().items():
        assert (FOLDER / name).read_text() == text, "run: python -m tests.contracts.vectors"


def test_stale_artifact_is_noticed(
    compiler: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compiler, "ARTIFACTS", tmp_path / "artifacts")
    assert compiler.main([]) == 0
    artifact = tmp_path / "artifacts" / "TestUSDC.json"
    artifact.write_text(artifact.read_text().replace('"0x', '"0x00', 1))
    assert compiler.main(["--check"]) == 1
    assert "stale artifacts: TestUSDC; run: python contracts/compile.py" in capsys.readouterr().out


def test_forge_tests_pass() -> None:
    forge = CONTRACTS / "node_modules" / ".bin" / "forge"
    if not forge.exists():
        pytest.skip("forge is not published for this platform")
    result = run(forge, "test")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_a23_reentrancy_odd_tokens_and_forced_ether_leave_the_money_conserved() -> None:
    """Forge runs the cases: each checks at its end that all deposits and stakes are covered."""
    cases = [name for name in find_tests()["A23"] if name.startswith("forge::")]
    assert len(cases) >= 6
    outcomes = run_forge([name.removeprefix("forge::") for name in cases])
    if not outcomes and not (CONTRACTS / "node_modules" / ".bin" / "forge").exists():
        pytest.skip("forge is not published for this platform")
    assert judge(cases, outcomes)[0] == "passed"


def test_every_narrowing_cast_is_checked_or_explained() -> None:
    forge = CONTRACTS / "node_modules" / ".bin" / "forge"
    if not forge.exists():
        pytest.skip("forge is not published for this platform")
    result = run(forge, "lint", "src")
    assert result.returncode == 0, result.stderr[-4000:]


def test_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (CONTRACTS / "package-lock.json").read_text()
