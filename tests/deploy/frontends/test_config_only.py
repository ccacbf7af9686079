"""A config.json without weights: how a large model would be cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from splitup_deploy.cli.commands import app
from splitup_deploy.cutting.build import build, parse_size, parse_sizes
from splitup_deploy.frontends.huggingface.directory import load_shapes
from splitup_deploy.frontends.source_model import Sizes
from typer.testing import CliRunner

from splitup.core.errors import ChainUnavailable, InvalidInput, InvalidModel
from tests.deploy.llamas import EXAMPLE, TINY

CONFIGS = Path(__file__).parents[1] / "configs"
MEASURE = """
import resource, sys
from splitup_deploy.cli.commands import app
code = app(sys.argv[1:], standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)
print([used.ru_utime, used.ru_maxrss * 1024])
raise SystemExit(code)
"""


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    return result.exit_code, result.stdout


@pytest.mark.long  # in small: eight of the eighty layers in test_every_kind_of_card_of_a_fleet…
def test_seventy_billion_parameters_in_seconds() -> None:
    """The bars: 30 s of one core, 2 GB, every task within the target, imbalance within 10 %."""
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-c",
                MEASURE,
                "register",
                "--model",
                str(CONFIGS / "llama-70b.json"),
            ),
            *("--name", "big", "--target-vram", "12GB", "--dry-run", "--json"),
        ],
        env={**os.environ, "PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    described, (cpu_s, peak_bytes) = map(json.loads, done.stdout.splitlines())
    assert cpu_s <= 30 and peak_bytes <= 2 * 10**9
    tasks = described["tasks"]
    assert len(tasks) == 13 and all(task["vram_bytes"] <= 12 * 10**9 for task in tasks)
    assert described["imbalance"] <= 0.1 and described["model_id"] is None
    weights = sum(task["weights_bytes"] for task in tasks)
    assert 2 * 70.5e9 <= weights <= 2 * 70.7e9 + 80 * 8192 * 128 * 4  # and the rope tables


@pytest.mark.parametrize(
    ("name", "layers", "parameters", "target"),
    [
        ("qwen3-235b-a22b", 94, 235.1e9, "12GB"),
        ("mixtral-8x22b", 56, 140.6e9, "4GB"),
    ],
)
def test_mixtures_of_experts(
    name: str, layers: int, parameters: float, target: str, tmp_path: Path
) -> None:
    """The first three layers: all of them take seconds."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    assert config["num_hidden_layers"] == layers
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    ends = 2 * config["vocab_size"] * config["hidden_size"]
    parameters = ends + (parameters - ends) * 3 / layers
    compiled = build(str(path), parse_size(target), sizes=Sizes(context=4096))
    tasks = compiled.manifest.tasks
    assert all(task.vram_bytes <= parse_size(target) for task in tasks)
    weights = sum(task.weights_bytes for task in tasks)
    assert weights == pytest.approx(2 * parameters, rel=0.01)
    groups = [task.label for task in tasks if "experts 1 of" in task.label]
    assert len(groups) == (3 if target == "4GB" else 0)  # a layer's experts take 4.8 GB
    assert not compiled.is_complete


@pytest.mark.parametrize(
    ("name", "layers", "weights"),
    [("gpt-oss-120b", 36, 63.0e9), ("glm-5", 78, 2 * 744e9)],
)
def test_quantised_and_sparse_models(
    name: str, layers: int, weights: float, tmp_path: Path
) -> None:
    """The first two layers: embedding and head weigh as in the whole model."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    assert config["num_hidden_layers"] == layers
    config |= {"num_hidden_layers": 2, "first_k_dense_replace": 0}
    if name == "gpt-oss-120b":
        del config["first_k_dense_replace"]
        config["layer_types"] = config["layer_types"][:2]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    tasks = build(str(path), parse_size("12GB"), sizes=Sizes(context=4096)).manifest.tasks
    assert all(task.vram_bytes <= parse_size("12GB") for task in tasks)
    ends = 4 * config["vocab_size"] * config["hidden_size"]
    wanted = ends + (weights - ends) * 2 / layers
    assert sum(task.weights_bytes for task in tasks) == pytest.approx(wanted, rel=0.05)


def test_single_rows_at_the_full_context(tmp_path: Path) -> None:
    """128 heads of 192 over 163,840 positions are more elements than an axis may have."""
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "num_hidden_layers": 2, "first_k_dense_replace": 1}))
    tasks = build(str(path), parse_size("20GB"), sizes=Sizes(chunk=1)).manifest.tasks
    assert all(task.vram_bytes <= parse_size("20GB") for task in tasks)


def test_shapes_give_the_cut_that_weights_give(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "config.json", tmp_path / "config.json")
    known = build(str(EXAMPLE), parse_size("1.3MB"), sizes=Sizes(chunk=8))
    for source in (tmp_path, tmp_path / "config.json"):
        shapes = build(str(source), parse_size("1.3MB"), sizes=Sizes(chunk=8))
        for ours, theirs in zip(shapes.manifest.tasks, known.manifest.tasks, strict=True):
            fields = ("label", "weights_bytes", "state_bytes", "vram_bytes", "flops")
            assert all(getattr(ours, field) == getattr(theirs, field) for field in fields)
        assert shapes.manifest.edges() == known.manifest.edges()
        assert shapes.times_ps == known.times_ps and not shapes.is_complete
    assert known.is_complete


def test_every_kind_of_card_of_a_fleet_finds_work(tmp_path: Path) -> None:
    """The first eight layers of 70 billion parameters: the largest cards alone would take all."""
    config = json.loads((CONFIGS / "llama-70b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "num_hidden_layers": 8}))
    targets = parse_sizes("4GB,6GB,12GB")
    tasks = build(str(path), targets, sizes=Sizes(context=4096)).manifest.tasks
    cards = [next(t for t in targets if task.vram_bytes <= t) for task in tasks]
    assert cards == [targets[turn % 3] for turn in range(len(tasks))] and len(tasks) >= 3


def test_nothing_can_be_read_or_registered(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**TINY, "dtype": "float16"}))
    compiled = build(str(path), 10**6)
    blob = next(blob for blob in compiled.blobs if blob.key.startswith("weights/"))
    with pytest.raises(InvalidModel, match="weights are not here"):
        b"".join(blob.open())


def test_a_dtype_that_weights_cannot_have(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**TINY, "torch_dtype": "float8_e4m3fn"}))
    with pytest.raises(InvalidModel, match="dtype 'float8_e4m3fn'"):
        build(str(path), 10**6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture .* is not supported"),
        ({"quantization_config": {"quant_method": []}}, "quant_method"),
        ({"n_shared_experts": 10**9}, "n_shared_experts = 1000000000; a positive integer of at"),
    ],
)
def test_what_a_config_cannot_say_is_named(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """The last one took 119 GiB."""
    table = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**table, **change}))
    with pytest.raises(InvalidModel, match=said):
        load_shapes(str(tmp_path), Sizes())


def test_lists_of_sizes() -> None:
    assert parse_sizes("24GB, 8GB,12GB,8GB") == (8 * 10**9, 12 * 10**9, 24 * 10**9)
    with pytest.raises(InvalidInput):
        parse_sizes("8GB,,12GB")


@pytest.mark.long  # in small: cutting/test_build.py; the lines below
def test_inspect_draws_and_sorts_into_classes(tmp_path: Path) -> None:
    target = ("--target-vram", "900kB,1.15MB", "--chunk", "8", "--no-reference")
    code, text = invoke("inspect", str(EXAMPLE), *target)
    assert code == 0 and "cards    900 kB: 6 tasks, 1.15 MB: 7 tasks" in text
    code, text = invoke("inspect", str(EXAMPLE), *target, "--json")
    classes: list[dict[str, Any]] = json.loads(text)["classes"]
    assert classes == [
        {"vram_bytes": 900_000, "tasks": 6},
        {"vram_bytes": 1_150_000, "tasks": 7},
    ]
    code, text = invoke("inspect", str(EXAMPLE), *target, "--format", "mermaid")
    assert code == 0 and text.startswith("flowchart TD\n")
    file = tmp_path / "tasks.dot"
    code, text = invoke("inspect", str(EXAMPLE), *target, "--format", "dot", "--output", str(file))
    assert (code, text) == (0, "") and file.read_text().startswith("digraph ")
    code, _ = invoke("inspect", str(EXAMPLE), *target, "--output", str(file))
    assert code == 2
    missing = str(tmp_path / "no" / "tasks.dot")
    code, _ = invoke("inspect", str(EXAMPLE), *target, "--format", "dot", "--output", missing)
    assert code == 2


def test_lines_are_whole_and_only_phases_are_said_beside_them() -> None:
    """Output that goes to a file or a pipe, where there is no width to wrap at."""
    target = ("--target-vram", "2MB,4MB,100MB", "--chunk", "8", "--private", "1")
    target += ("--no-reference",)
    result = CliRunner().invoke(app, ["inspect", str(EXAMPLE), *target], env={"COLUMNS": "40"})
    phases = [f"compiling {EXAMPLE}", "hashing weights", "hashing tasks", "completing the manifest"]
    assert result.exit_code == 0 and result.stderr.splitlines() == phases
    lines = result.stdout.splitlines()
    assert all(line.endswith(" card") for line in lines if "VRAM ·" in line)


def test_what_is_neither_here_nor_registered(tmp_path: Path) -> None:
    code, text = invoke("inspect", "no-such-model", "--json", "--config", str(tmp_path))
    assert code == 2 and "'no-such-model' is no file or directory here" in text


def test_what_is_not_here_and_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(_: Any) -> None:
        raise ChainUnavailable("the chain does not answer")

    monkeypatch.setattr("splitup_deploy.cli.inspect._fetch", fetch)
    code, text = invoke("inspect", "no-such-model", "--json")
    assert code == 1 and "'no-such-model' is no file or directory here" in text
    assert "the chain does not answer" in text


@pytest.mark.long  # in small: cutting/test_partition.py
def test_balance_and_the_number_of_tasks() -> None:
    target = ("--target-vram", "1.3MB", "--chunk", "8", "--no-reference", "--json")
    code, text = invoke("inspect", str(EXAMPLE), *target, "--max-tasks", "11")
    assert code == 2 and "at least 12 tasks; 11 are allowed" in text
    longest = []
    for most in ("12", "16", "30"):
        code, text = invoke(
            *("inspect", str(EXAMPLE), *target, "--max-tasks", most, "--balance", "throughput")
        )
        assert code == 0
        tasks = json.loads(text)["tasks"]
        assert len(tasks) <= int(most)
        longest.append(max(task["time_ps"] for task in tasks))
    assert longest == sorted(longest, reverse=True)
