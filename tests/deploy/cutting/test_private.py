"""What stays with the client: the same model, in two parts, one of which nodes never see."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console
from splitup_deploy.cutting.build import CompiledModel, build, parse_size
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.showing.drawing import draw_dot, draw_mermaid
from splitup_deploy.showing.profile import compute_profile
from splitup_deploy.showing.report import describe_model, render_model
from splitup_deploy.uncut_model import load_reference

from splitup.client.private.private_tasks import ClientPrograms
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import array_to_bytes
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.manifest import get_task_key, get_weights_key
from splitup.graph.manifest_rules import load_manifest
from tests.deploy.execution import CutModel
from tests.deploy.llamas import EXAMPLE, TINY, save_llama
from tests.deploy.moes import MIXTRAL, save_moe

TARGET = parse_size("1.3MB")
CHUNK = 8
SIZES = Sizes(chunk=CHUNK)
RAW = {"tokens", "outputs", "logits"}


def write_client_files(compiled: CompiledModel, folder: Path) -> list[tuple[Path, Path | None]]:
    """Write what a client would fetch."""
    assert compiled.manifest.client is not None
    stored = {blob.key: blob for blob in compiled.blobs}
    files: list[tuple[Path, Path | None]] = []
    for index, task in enumerate(compiled.manifest.client.tasks):
        graph, weights = folder / f"{index}.json", folder / f"{index}.safetensors"
        graph.write_bytes(b"".join(stored[get_task_key(task.task_id)].open()))
        weights.write_bytes(b"".join(stored[get_weights_key(task.weights_digest)].open()))
        files.append((graph, weights))
    return files


# 1 is in tests/client/private and tests/e2e/test_private_page.py, too; 2 is like 1
FEW: Final = (0, *(pytest.param(blocks, marks=pytest.mark.long) for blocks in (1, 2)))


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_raw_inputs_and_outputs_are_the_clients_alone(blocks: int) -> None:
    manifest = build(str(EXAMPLE), TARGET, sizes=SIZES, private=blocks).manifest
    client = manifest.client
    assert client is not None
    labels = [task.label for task in manifest.tasks]
    assert labels[0].startswith(f"block {blocks} ")
    assert labels[-1].startswith(f"block {4 - blocks} ")
    for task in manifest.tasks:
        assert not RAW & {port.name for port in (*task.inputs, *task.outputs)}
    assert not RAW & {port.name for port in (*manifest.inputs, *manifest.outputs)}
    assert {port.name for port in (*client.inputs, *client.outputs)} == RAW | {"layout"}


@pytest.mark.parametrize("blocks", FEW)
async def test_both_parts_together_are_the_whole_model(blocks: int, tmp_path: Path) -> None:
    model = str(EXAMPLE)
    if not blocks:  # which no more than one block is needed for
        save_llama(tmp_path, {**TINY, "num_hidden_layers": 1})
        model = str(tmp_path)
    compiled = build(model, TARGET, sizes=SIZES, private=blocks)
    manifest = load_manifest(compiled.manifest_bytes)
    client = manifest.client
    assert client is not None and len(compiled.times_ps) == len(manifest.tasks)
    whole, nodes = load_reference(model, SIZES), CutModel(compiled)
    state, states = whole.new_state(), nodes.new_states()
    files = write_client_files(compiled, tmp_path)
    with closing(await ClientPrograms.load(manifest, files)) as programs:
        run = programs.new_run()
        for start, count in ((0, 5), (5, 1), (6, 8)):
            arrays = make_arrays(make_causal_step(range(7, 7 + count), start), CHUNK)
            raw = {
                port.name: array_to_bytes(port.spec, arrays[port.name]) for port in client.inputs
            }
            begun = await run.begin([raw[port.name] for port in client.inputs])
            sent = {
                port.name: data for port, data in zip(manifest.inputs, begun.sends, strict=True)
            }
            given = nodes.step(states, sent)
            outputs = [given[port.name] for port in manifest.outputs]
            results = await run.complete(begun, outputs)
            assert results == whole.run(state, [raw[spec.name] for spec in whole.inputs])


def test_experts_stay_with_nodes(tmp_path: Path) -> None:
    save_moe(tmp_path / "m", {**MIXTRAL, "num_hidden_layers": 3})
    compiled = build(str(tmp_path / "m"), 40_000, sizes=Sizes(chunk=2), private=1)
    client = compiled.manifest.client
    assert client is not None
    assert sum(task.gate is not None for task in compiled.manifest.tasks) == 4
    assert [task.label[:7] for task in client.tasks] == ["embed .", "block 2"]


def test_what_cannot_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="5 blocks: --private 3 leaves none"):
        build(str(EXAMPLE), TARGET, sizes=SIZES, private=3)
    with pytest.raises(InvalidInput, match="language models"):
        (tmp_path / "halves.py").write_text(
            "from tinygrad import Tensor\ndef halve(x: Tensor) -> Tensor: return x * 0.5\n"
            "halve.inputs = {'x': ('float32', (4,))}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        build("halves:halve", TARGET, private=0)


def test_a_table_of_both_ends_is_one_whatever_fits_a_card(tmp_path: Path) -> None:
    """Divided, it would be other parts for the embedding than for the head, and fetched twice."""
    save_llama(tmp_path / "m", {"num_hidden_layers": 6, "vocab_size": 2_048})
    client = build(str(tmp_path / "m"), 60_000, sizes=Sizes(chunk=2), private=1).manifest.client
    assert client is not None
    labels = [task.label for task in client.tasks]
    assert len(labels) == 2 and not any(" of " in label for label in labels), labels


@pytest.mark.long  # in small: both parts together, above
async def test_ports_are_those_of_the_graph(tmp_path: Path) -> None:
    compiled = build(str(EXAMPLE), TARGET, sizes=SIZES, private=0)
    manifest = compiled.manifest
    assert manifest.client is not None
    files = write_client_files(compiled, tmp_path)
    first, *rest = manifest.client.tasks
    wrong = first.model_copy(
        update={"outputs": tuple(p.model_copy(update={"name": "y"}) for p in first.outputs)}
    )
    client = manifest.client.model_copy(update={"tasks": (wrong, *rest)})
    with pytest.raises(InvalidModel, match="other ports"):
        await ClientPrograms.load(manifest.model_copy(update={"client": client}), files)


def test_inspect_says_whose_task_is_whose_and_what_it_hides() -> None:
    compiled = build(str(EXAMPLE), TARGET, sizes=SIZES, private=1)
    profile = compute_profile(compiled.manifest, compiled.times_ps)
    described = describe_model(profile, "m")
    assert {task["place"] for task in described["tasks"]} == {"node"}
    client = described["client"]
    assert {task["place"] for task in client["tasks"]} == {"client"}
    assert {port["name"] for port in client["outputs"]} == {"logits"}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_model(profile, "m"))
    text = console.export_text()
    assert "client   embed ... block 0 MLP · before the nodes" in text
    assert (
        "client   block 4 attention ... head · after the nodes" in text
        and "reconstruct them" in text
    )
    whole = build(str(EXAMPLE), TARGET, sizes=SIZES)
    assert describe_model(compute_profile(whole.manifest), "m")["client"] is None


def test_drawings_show_the_client_s_tasks_around_those_of_nodes() -> None:
    compiled = build(str(EXAMPLE), TARGET, sizes=SIZES, private=1)
    profile = compute_profile(compiled.manifest, compiled.times_ps)
    lines = draw_mermaid(profile).splitlines()
    assert '  c0 -->|"8.19 kB"| t0' in lines and '  t5 -->|"8.19 kB"| c1' in lines
    assert '  c1 -->|"65.5 kB"| out0' in lines and "  in0 -.-> c0" in lines
    assert lines[-1] == "  class c0,c1 client"
    assert '  c1 [label="client block 4 attention ... head\\n' in draw_dot(profile)
