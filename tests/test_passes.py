"""Which failures may be the machine's, and that no other is forgotten."""

from pathlib import Path

import pytest

from tests import passes
from tests.passes import MOST, PROCESSES, ROOT, may_run_again

ONCE = """
from pathlib import Path

def test_once():
    seen = Path(__file__).with_suffix(".seen")
    is_first = not seen.exists()
    seen.touch()
    assert not is_first
"""


@pytest.mark.parametrize(
    ("failed", "may"),
    [
        (["tests/e2e/test_page.py::test_stop"], True),
        (["tests/chain/test_client.py::test_x[a/b]"] * MOST, True),
        (["tests/chain/test_client.py::test_x"] * (MOST + 1), False),
        (["tests/protocol/planning/test_selection.py::test_odds"], False),
        (["tests/e2e/test_page.py::test_stop", "tests/core/test_codec.py::test_floats"], False),
        ([], False),
    ],
)
def test_few_tests_of_real_processes_run_again(failed: list[str], may: bool) -> None:
    assert may_run_again(failed) is may


def test_the_folders_exist() -> None:
    assert [folder for folder in PROCESSES if not (ROOT / folder).is_dir()] == []


@pytest.mark.parametrize(("network", "code"), [(ONCE, 0), ("def test_always(): assert 0", 1)])
def test_what_fails_runs_again_wherever_it_is(
    network: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "ROOT", tmp_path)
    monkeypatch.setattr(passes, "CACHES", tmp_path / ".pytest_cache")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not long'\nmarkers = long\n")
    marked = f"import pytest\npytestmark = pytest.mark.long\n{network}\n"
    for path, text in (("tests/e2e/test_network.py", marked), ("tests/chain/test_rpc.py", ONCE)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    assert passes.main(["-q", "-p", "xdist.plugin", "-m", ""]) == code
