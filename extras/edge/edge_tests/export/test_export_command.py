"""``splitup-deploy export`` where the extra is not needed: sizes, ONNX files, and bad input."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from splitup_deploy.cli.commands import app
from splitup_edge.export.plan import plan_export
from splitup_edge.program import EdgeProgram, check_file, import_extra
from typer.testing import CliRunner

from splitup.core.errors import ConfigurationError, InvalidModel
from splitup.core.source_tree import compose_package_install
from tests.deploy.blocks import SDAR, save_blocks
from tests.deploy.ggufs import save_gguf
from tests.deploy.llamas import EXAMPLE, save_llama


def export(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["export", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def refuse(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert done.exit_code == 2 and done.stdout == "", done.output
    [line] = done.stderr.splitlines()
    return line


def save_config(path: Path, **change: object) -> Path:
    config = json.loads((EXAMPLE / "config.json").read_text())
    path.write_text(json.dumps({**config, **change}))
    return path


def test_sizes_are_known_without_weights(tmp_path: Path) -> None:
    """28 layers of 2048: 1.7 GB of weights, and a cache of 235 MB at two bytes."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    large = {"vocab_size": 151_936, "max_position_embeddings": 40_960}
    config = save_config(tmp_path / "config.json", **sizes, **heads, **large)
    table, layer = 151_936 * 2048, 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144)
    found = {d: export(config, "--max-len", 2048, "--dtype", d) for d in ("fp32", "fp16", "int4")}
    assert found["fp16"]["cache_bytes"] == 234_881_024
    plain = 2 * table + 28 * layer  # the table for products, and once more for rows
    assert found["fp32"]["weights_bytes"] == pytest.approx(4 * plain, rel=0.001)
    assert found["fp16"]["weights_bytes"] == pytest.approx(2 * plain, rel=0.001)
    narrow = (table + 28 * layer) * (0.5 + 2 / 32) + table
    assert found["int4"]["weights_bytes"] == pytest.approx(narrow, rel=0.005)  # and ropes, norms
    assert "put them beside config.json" in refuse(config, "--output", tmp_path / "m.pte")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_an_onnx_file_needs_no_extra(tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    report = export(tmp_path / "model", "--backend", "onnx", "--output", tmp_path / "m.onnx")
    assert report["file_bytes"] == (tmp_path / "m.onnx").stat().st_size
    assert report["rows"] == {"forward": 1}


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0"])
def test_a_gguf_file_is_exported_as_the_numbers_that_it_stands_for(
    form: str, tmp_path: Path
) -> None:
    config, weights = save_gguf(tmp_path / "m.gguf", {"intermediate_size": 64}, forms={"": form})
    save_llama(tmp_path / "model", config)
    save_file(weights, tmp_path / "model/model.safetensors")
    found, wanted = (
        plan_export(str(tmp_path / name), "fp32", None, None).models["forward"].graph
        for name in ("m.gguf", "model")
    )
    assert found.nodes == wanted.nodes and set(found.tensors) == set(wanted.tensors)
    for name, tensor in wanted.tensors.items():
        np.testing.assert_array_equal(
            np.frombuffer(found.tensors[name].read(), np.uint8),
            np.frombuffer(tensor.read(), np.uint8),
            name,
        )


def test_bad_input_is_one_sentence_and_nothing_is_written(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "m.pte"
    save_llama(model)
    save_blocks(tmp_path / "blocks", SDAR)
    assert "context 17 is not possible; the model takes 1 to 16" in refuse(model, "--max-len", 17)
    assert "a block of 3 rows does not divide" in refuse(model, "--block", 3)
    assert "multiple of 4 (the blocks that" in refuse(tmp_path / "blocks", "--block", 2)
    assert "call it 'm.onnx'" in refuse(model, "--backend", "onnx", "--output", file)
    assert "int8 needs --backend xnnpack" in refuse(
        model, "--backend", "onnx", "--dtype", "int8", "--output", tmp_path / "m.onnx"
    )
    assert "there is no directory" in refuse(model, "--output", tmp_path / "no" / "m.pte")
    assert "does not exist" in refuse(tmp_path / "nothing", "--output", file)
    (model / "model.safetensors").write_bytes(b"broken")
    assert refuse(model, "--backend", "onnx", "--output", tmp_path / "m.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks", "model"]


def test_without_the_extra_the_command_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.setitem(sys.modules, "executorch.exir", None)
    line = refuse(EXAMPLE, "--output", tmp_path / "m.pte")
    assert line.endswith(f"install it: {compose_package_install('edge')}")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match=r"pip install .*\[edge\]'"):
        import_extra("executorch.exir")


def test_a_file_that_is_no_program_is_refused_before_native_code_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "m.pte"
    with pytest.raises(InvalidModel, match="cannot read"):
        EdgeProgram(file)
    shutil.copy(EXAMPLE / "model.safetensors", file)
    with pytest.raises(InvalidModel, match=r"is no \.pte file"):
        EdgeProgram(file)
    sizes = np.array([512, 1024, 4096], "<u8").tobytes()  # program, start of data, data
    file.write_bytes(b"\x30\0\0\0ET12eh00\x20\0\0\0" + sizes + bytes(1_000))
    with pytest.raises(InvalidModel, match="has 1040 of 5120 bytes: it was cut off"):
        check_file(file)
