from __future__ import annotations

import pytest

from tests import faults
from tests.faults import Outcome, Recorder, find_tests, judge


def test_each_fault_and_attack_has_a_test_and_each_test_a_row() -> None:
    found = find_tests()
    assert set(found) == set(faults.ROWS)
    assert all(found.values())


def test_a_test_belongs_to_all_rows_that_its_name_begins_with() -> None:
    found = find_tests()
    name = "test_f03_f09_a_member_restarted_in_the_middle_signs_the_same_again"
    for row in ("F03", "F09"):
        assert f"tests/protocol/test_member.py::{name}" in found[row]
    assert "forge::test_a23_forced_ether_and_stray_tokens_change_nothing" in found["A23"]


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        ({"a": Outcome(ran=True), "b": Outcome(ran=True)}, "passed"),
        ({"a": Outcome(ran=True), "b": Outcome(ran=True, failed=True)}, "FAILED"),
        ({"a": Outcome(ran=True)}, "not run"),
        ({"a": Outcome(ran=True), "b": Outcome(skipped=True)}, "skipped"),
    ],
)
def test_a_row_passes_when_all_its_tests_ran_and_passed(
    outcomes: dict[str, Outcome], result: str
) -> None:
    assert judge(["a", "b"], outcomes)[0] == result
    assert judge([], outcomes)[0] == "no test"


def test_a_file_that_is_skipped_as_a_whole_keeps_no_other_from_running(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        test_optional="import pytest\npytest.skip('no such library', allow_module_level=True)",
        test_there="def test_f01_it_runs(): pass\ndef test_f02_another(): assert False",
    )
    wanted = ("test_optional.py::test_f01_it", "test_there.py::test_f01_it_runs")
    recorder = Recorder(frozenset(wanted))
    pytester.inline_run("-pno:asyncio", "test_optional.py", "test_there.py", plugins=[recorder])
    assert {name: (one.ran, one.skipped) for name, one in recorder.outcomes.items()} == {
        wanted[0]: (False, True),
        wanted[1]: (True, False),
    }


def test_the_command_of_the_makefile_means_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = (faults.ROOT / "Makefile").read_text().partition("-m tests.faults ")[2]
    assert faults.main([*recipe.partition("\n")[0].split(), "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{row}  {what}" in shown for row, what in faults.ROWS.items())


def test_a_row_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        faults.main(["F01", "auto"])
    assert "there is no row AUTO" in capsys.readouterr().err
