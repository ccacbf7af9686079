"""Exported models: what ExecuTorch computes is what the uncut model computes. Needs the extra."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cli.commands import app as deploy_app
from splitup_deploy.frontends.decoder import step_function
from splitup_deploy.frontends.onnx.onnx_graph import OnnxGraph, OnnxModel, OnnxNode
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from splitup_edge.program import EdgeProgram, EdgeSession
from typer.testing import CliRunner

from splitup.backend.runtime import TaskProgram
from splitup.cli.verbs import app
from splitup.client.text.generation import make_decoder
from splitup.core.errors import InvalidModel
from splitup.decode.prompt import Blocks, TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.step import Decoder, StepInput, make_arrays
from tests.client.text.test_tokenizer import make_word_tokenizers
from tests.deploy.blocks import BLOCK, MASK, SDAR, save_blocks
from tests.deploy.llamas import EXAMPLE, save_llama
from tests.deploy.moes import QWEN3_MOE, save_moe
from tests.deploy.steps import run_step

pytest.importorskip("executorch", reason="needs the extra [edge] (make test-edge)")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
BOUND = 1e-5


@pytest.fixture(scope="module", autouse=True)
def float32_caches() -> Iterator[None]:
    """Keys and values are float32 in a file, so in what it is compared with: bounds stay tight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_function, "choose_cache_dtype", lambda source: "float32")
        yield


def export(model: Path, file: Path, *flags: str) -> dict[str, Any]:
    """Run the command; return its report."""
    arguments = ["export", str(model), "--output", str(file), "--json", *flags]
    done = CliRunner().invoke(deploy_app, arguments)
    assert done.exit_code == 0, done.output
    assert [path.name for path in file.parent.glob("*.pte*")] == [file.name]  # no part is left
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    file = tmp_path_factory.mktemp("example") / "model.pte"
    return file, export(EXAMPLE, file)


def decode(decoder: Decoder, run: Any) -> list[int]:
    tokens: list[int] = []
    number = 0
    while not decoder.finished:
        step = decoder.next_step()
        assert step is not None
        tokens += decoder.receive_logits(number, run(step))
        number += 1
    return tokens


def decode_both(request: TextRequest, program: EdgeProgram, reference: TaskProgram) -> list[int]:
    """Return the tokens of the file, which are those of the uncut model."""
    session, state = EdgeSession(program), reference.new_state()

    def run_file(step: StepInput) -> np.ndarray:
        return session.step(make_arrays(step, request.chunk))

    def run_whole(step: StepInput) -> np.ndarray:
        return run_step(reference, state, step)

    tokens = decode(make_decoder(None, request), run_file)
    assert tokens == decode(make_decoder(None, request), run_whole)
    return tokens


def make_request(program: EdgeProgram, prompt: tuple[int, ...], most: int, **change: Any) -> Any:
    info = program.info.text
    values = {"sampler": Sampler(0.8, 3), "eos_ids": frozenset(), "vocab": info.vocab, **change}
    return TextRequest(
        prompt, max_tokens=most, context=info.context, chunk=program.info.chunk, **values
    )


def test_the_report_of_the_example(example: tuple[Path, dict[str, Any]]) -> None:
    file, report = example
    assert report["file_bytes"] == file.stat().st_size
    assert report["cache_bytes"] == 5 * 2 * 4 * 256 * 32 * 4
    extra = report["file_bytes"] - report["weights_bytes"]
    assert 0 < extra < 0.05 * report["file_bytes"]  # the tokenizer and the program
    for found in report["delegated"].values():
        assert found["delegated"] / found["operations"] > 0.95 and found["subgraphs"] == 1
    check = report["check"]
    assert max(check["logits_error"], *check["layer_errors"]) <= BOUND
    assert len(check["layer_errors"]) == 5 and check["same_likeliest_token"] == 1.0
    assert check["nats_per_token"] == pytest.approx(check["nats_per_token_of_the_model"], abs=1e-4)


def test_256_tokens_are_those_of_the_uncut_model(example: tuple[Path, dict[str, Any]]) -> None:
    program = EdgeProgram(example[0])
    reference = load_reference(str(EXAMPLE), Sizes(chunk=program.info.chunk))
    for sampler in (Sampler(), Sampler(0.8, 3)):
        request = make_request(program, (0,), 256, sampler=sampler)
        assert len(decode_both(request, program, reference)) == 256
    prompt = tuple(range(40, 110))  # chunks of 32, 32 and 6 rows
    assert len(decode_both(make_request(program, prompt, 10), program, reference)) == 10


def test_the_command_streams_the_text_and_refuses_one_without_room(
    example: tuple[Path, dict[str, Any]],
) -> None:
    arguments = ["edge", "run", str(example[0]), "--prompt", "The package", "--max-tokens"]
    done = CliRunner().invoke(app, [*arguments, "8", "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert len(answer["tokens"]) == 8 and answer["text"]
    plain = CliRunner().invoke(app, [*arguments, "8", "--decoder", "lookahead"])
    assert plain.stdout.startswith("The package" + answer["text"].rstrip("\n"))
    done = CliRunner().invoke(app, [*arguments, "300"])
    assert done.exit_code == 2 and "the model has 256 positions" in done.stderr
    done = CliRunner().invoke(app, [*arguments, "8", "--decoder", "diffusion"])
    assert done.exit_code == 2 and "diffusion" in done.stderr


def test_a_damaged_file_is_one_sentence(
    example: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    data = example[0].read_bytes()
    file = tmp_path / "cut.pte"
    for length in (0, 7, 39, 40, 1_000, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(InvalidModel, match=r"is no \.pte file|was cut off"):
            EdgeProgram(file)
    file.write_bytes(data[:64] + bytes(4_000) + data[4_064:])  # zeros in the program
    with pytest.raises(InvalidModel, match=r"cannot be read|is a program of ExecuTorch"):
        EdgeProgram(file)


def test_s26_native_code_that_ends_its_process_ends_no_other(
    example: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Nobody verifies what XNNPACK reads: another byte there aborts the process."""
    data = bytearray(example[0].read_bytes())
    data[data.index(b"XH00")] ^= 0xFF
    file = tmp_path / "changed.pte"
    file.write_bytes(data)
    done = CliRunner().invoke(app, ["edge", "run", str(file), "--prompt", "a"])
    assert done.exit_code == 2 and "do not trust this file" in done.stderr, done.output


def test_an_unknown_operation_is_named() -> None:
    from splitup_edge.export.torch_module import StaticModule

    node = OnnxNode("Erf", "", "the curve", ("x",), ("y",), {})
    with pytest.raises(InvalidModel, match=r"node 'the curve' \(Erf\) is an operation that models"):
        StaticModule(OnnxModel(OnnxGraph((node,), {}, (), ()), {"": 23}))


@pytest.mark.parametrize(
    ("dtype", "backend", "bound"),
    [
        ("fp32", "portable", 1e-5),
        ("fp16", "xnnpack", 0.01),
        ("int8", "xnnpack", 0.05),
        ("int4", "xnnpack", 0.3),
    ],
)
def test_other_dtypes_and_back_ends(dtype: str, backend: str, bound: float, tmp_path: Path) -> None:
    """Narrow weights make a smaller file, with an error that the report states."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 512}
    save_llama(tmp_path / "model", sizes, scale=0.1)
    report = export(tmp_path / "model", tmp_path / "m.pte", "--dtype", dtype, "--backend", backend)
    assert report["check"]["logits_error"] <= bound
    assert report["weights_bytes"] < report["file_bytes"]
    delegated = [found["delegated"] for found in report["delegated"].values()]
    assert all(delegated) if backend == "xnnpack" else not any(delegated)


def test_experts_are_chosen_as_the_uncut_model_chooses_them(tmp_path: Path) -> None:
    """The product of a router stays float32 where the others are integers."""
    save_moe(tmp_path / "model", QWEN3_MOE)
    report = export(tmp_path / "model", tmp_path / "m.pte")
    assert max(report["check"]["logits_error"], *report["check"]["layer_errors"]) <= BOUND
    narrow = export(tmp_path / "model", tmp_path / "m.pte", "--dtype", "int8")
    assert narrow["check"]["logits_error"] <= 0.1
    assert narrow["weights_bytes"] < narrow["file_bytes"]


def test_a_model_of_blocks_writes_the_same_blocks(tmp_path: Path) -> None:
    save_blocks(tmp_path / "model", {**SDAR, "num_hidden_layers": 1})
    tokenizer = make_word_tokenizers()["llama"].to_str()
    (tmp_path / "model" / "tokenizer.json").write_text(tokenizer)
    report = export(tmp_path / "model", tmp_path / "m.pte", "--max-len", "16")
    assert report["rows"] == {"forward": BLOCK, "prefill": 16}
    assert report["check"]["logits_error"] <= BOUND
    program = EdgeProgram(tmp_path / "m.pte")
    reference = load_reference(str(tmp_path / "model"), Sizes(16, program.info.chunk))
    blocks = Blocks(BLOCK, MASK, False)
    request = make_request(program, (3, 17, 29, 5, 8, 9), 10, blocks=blocks)
    assert len(decode_both(request, program, reference)) == 10
