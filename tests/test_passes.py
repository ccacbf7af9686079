"""Which failures may be the machine's."""

import pytest

from tests.passes import MOST, PROCESSES, ROOT, may_run_again


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
