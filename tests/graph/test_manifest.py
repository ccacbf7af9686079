from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.codec import encode_canonical
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.graph.manifest import (
    Manifest,
    Port,
    get_blob_key,
    get_manifest_key,
    get_task_key,
    get_weights_key,
)
from splitup.graph.manifest_rules import load_manifest
from tests.builders import HANG_S, make_chain_manifest

X = {"name": "x", "dtype": "float32", "shape": [1, 4], "rows": ""}
Y = {"name": "y", "dtype": "float32", "shape": [1, 8], "rows": ""}


def make_task(index: int, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    return {
        "task_id": f"{index:064x}",
        "label": f"part {index}",
        "inputs": inputs,
        "outputs": outputs,
        "graph_bytes": 100,
        "weights_digest": "",
        "weights_bytes": 0,
        "state_bytes": 0,
        "vram_bytes": 4096,
        "flops": 10,
        "price_nano_usdc": 300 + index,
        "tolerances": [],
        "reference_digest": "",
        "reference_bytes": 0,
        "gate": None,
    }


def make() -> dict[str, Any]:
    """A diamond: 0 feeds 1 and 2, both feed 3, which also reads the model's input."""

    def read(name: str, task: int) -> dict[str, Any]:
        return {**Y, "name": name, "source": {"task": task, "port": 0}}

    given = {**X, "source": {"input": "x"}}
    return {
        "version": 1,
        "kind": "function",
        "tinygrad": "0.14.0",
        "inputs": [X],
        "outputs": [{**Y, "name": "result", "task": 3, "port": 0}],
        "tasks": [
            make_task(0, [given], [Y]),
            make_task(1, [read("a", 0)], [Y]),
            make_task(2, [read("a", 0)], [Y]),
            make_task(3, [read("a", 1), read("b", 2), given], [Y]),
        ],
        "text": None,
        "client": None,
    }


def load(value: dict[str, Any]) -> Manifest:
    """Load the canonical spelling, also of values that canonical bytes cannot hold."""
    return load_manifest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def test_what_may_be_left_out_has_one_spelling() -> None:
    value = make()
    del value["tasks"][0]["gate"]
    with pytest.raises(InvalidModel, match="a value has two spellings"):
        load(value)


def test_a_diamond() -> None:
    manifest = load(make())
    assert manifest.edges() == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert manifest.consumers(0, 0) == [(1, 0), (2, 0)]
    assert manifest.consumers(3, 0) == []
    assert load_manifest(manifest.to_bytes()) == manifest
    assert manifest.tasks[3].inputs[2].nbytes == 16


def test_a_client_pays_nanos_rounded_up_and_a_task_earns_them_rounded_down() -> None:
    manifest = load(make())  # 300 to 303 nano-USDC per step
    assert manifest.price_nano_usdc == 1_206
    assert [manifest.cost_micro_usdc(steps) for steps in (0, 1, 5, 1_000)] == [0, 2, 7, 1_206]
    assert [manifest.tasks[0].pay_micro_usdc(steps) for steps in (0, 3, 4, 1_000)] == [0, 0, 1, 300]


@given(
    st.lists(st.integers(1, 5_000) | st.integers(1, 2**53 - 1), min_size=4, max_size=4),
    st.integers(1, limits.MAX_STEPS),
    st.integers(0, limits.MAX_STEPS),
)
def test_a24_what_is_locked_covers_what_all_tasks_earn(
    prices: list[int], steps: int, fewer: int
) -> None:
    value = make()
    for task, price in zip(value["tasks"], prices, strict=True):
        task["price_nano_usdc"] = price
    manifest = load(value)
    earned = [task.pay_micro_usdc(max(0, steps - fewer)) for task in manifest.tasks]
    assert sum(earned) <= manifest.cost_micro_usdc(steps)
    assert 1_000 * (manifest.cost_micro_usdc(steps) - 1) < sum(prices) * steps
    # by rounding, a task loses less than a micro-USDC, whatever the steps
    whole = sum(task.pay_micro_usdc(steps) for task in manifest.tasks)
    assert manifest.cost_micro_usdc(steps) - whole <= len(prices)


def test_the_identity_covers_everything() -> None:
    other = make()
    other["tasks"][0]["price_nano_usdc"] = 4
    assert load(make()).model_id != load(other).model_id
    assert load(make()).model_id.startswith("0x") and len(load(make()).model_id) == 66


def change(path: str, value: Any) -> dict[str, Any]:
    root = place = json.loads(json.dumps(make()))
    *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parts:
        place = place[part]
    place[last] = value  # type: ignore[index]
    return root


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("version", True),
        ("kind", "other"),
        ("extra", 1),
        ("inputs", []),
        ("tasks", []),
        ("inputs.0.dtype", "float8"),
        ("inputs.0.shape", [0]),
        ("inputs.0.shape", [2**31]),
        ("inputs.0.shape", [1] * 17),
        ("inputs.0.shape", [1.5]),
        ("inputs.0.name", "a b"),
        ("inputs.0.name", "x\n"),
        ("tasks.0.task_id", "0" * 63),
        ("tasks.0.task_id", "A" * 64),
        ("tasks.0.flops", -1),
        ("tasks.0.flops", 1.0),
        ("tasks.0.price_nano_usdc", 0),
        ("tasks.0.weights_bytes", 5),
        ("tasks.0.state_bytes", 5000),
        ("tasks.0.outputs", []),
        ("tasks.0.inputs.0.source", {"input": "z"}),
        ("tasks.0.inputs.0.source", {"input": "x", "task": 0}),
        ("tasks.0.inputs.0.source", {"task": 0, "port": 0}),  # itself
        ("tasks.1.inputs.0.source", {"task": 3, "port": 0}),  # a cycle
        ("tasks.1.inputs.0.source", {"task": 9, "port": 0}),
        ("tasks.1.inputs.0.source", {"task": 0, "port": 1}),
        ("tasks.1.inputs.0.source", {"task": -1, "port": 0}),
        ("tasks.1.inputs.0.shape", [8, 1]),
        ("tasks.1.inputs.0.dtype", "int32"),
        ("tasks.3.inputs.1.name", "a"),
        ("outputs.0.task", 4),
        ("outputs.0.shape", [1, 4]),
        ("outputs", []),
        ("inputs", [X, {**X, "name": "unused"}]),
        ("text", {"vocab": 3}),
    ],
)
def test_a04_unsound_manifests_are_refused(path: str, value: Any) -> None:
    with pytest.raises(InvalidModel, match="manifest is invalid"):
        load(change(path, value))


def test_a04_an_unread_task_is_refused() -> None:
    value = make()
    value["tasks"][3]["inputs"][1]["source"] = {"task": 1, "port": 0}
    with pytest.raises(InvalidModel, match="nothing reads task 2"):
        load(value)


def test_a04_too_many_tasks_and_nested_bytes_are_refused_quickly(
    raised_recursion_limit: None,
) -> None:
    value = make()
    head = value["tasks"][0]
    value["tasks"] = [head] * (limits.MAX_TASKS + 1)
    for data in (
        encode_canonical(value),
        json.dumps({**value, "tasks": [{}] * 1_000_000}).encode(),
        b"[" * 1_000_000,
        b"",
        b"\xff",
    ):
        start = time.process_time()
        with pytest.raises(InvalidModel):
            load_manifest(data)
        assert time.process_time() - start < HANG_S


def test_another_spelling_is_refused() -> None:
    with pytest.raises(InvalidModel, match="canonical"):
        load_manifest(json.dumps(make()).encode())


def test_keys() -> None:
    digest = "ab" * 32
    assert get_manifest_key("0x" + digest) == f"models/0x{digest}/manifest.json"
    assert get_task_key(digest) == f"tasks/{digest}.json"
    assert get_weights_key(digest) == f"weights/{digest}.safetensors"
    assert get_blob_key(digest) == f"blobs/{digest}"
    for bad in ("", "../x", "0x" + digest, digest.upper(), digest + "\n"):
        with pytest.raises(InvalidInput):
            get_task_key(bad)


def test_a_tolerance_and_a_reference_are_part_of_the_task() -> None:
    value = make()
    tolerance = {
        "dtype": "float32",
        "relative_l2_ppb": 50,
        "exponent_ppb": None,
        "mantissa_ppb": None,
        "max_ulp": None,
    }
    value["tasks"][1] |= {"tolerances": [tolerance], "reference_digest": "ab" * 32}
    value["tasks"][1]["reference_bytes"] = 700
    manifest = load_manifest(encode_canonical(value))
    assert manifest.tasks[1].tolerances[0].list_bounds() == {"relative_l2_ppb": 50}
    assert manifest.model_id != load_manifest(encode_canonical(make())).model_id
    for change, problem in (
        ({"reference_bytes": 0}, "reference without a digest"),
        ({"tolerances": [tolerance, tolerance]}, "two tolerances"),
        ({"tolerances": [{**tolerance, "relative_l2_ppb": None}]}, "bounds nothing"),
        ({"tolerances": [{**tolerance, "relative_l2_ppb": -1}]}, "tolerances"),
        ({"tolerances": [{**tolerance, "dtype": "int32"}]}, "tolerances"),
    ):
        wrong = make()
        wrong["tasks"][1] = {**value["tasks"][1], **change}
        with pytest.raises(InvalidModel, match=problem):
            load_manifest(encode_canonical(wrong))


def make_private() -> dict[str, Any]:
    """The diamond behind a task of the client that hides x, and before one that shows the result.

    The last task of the client reads what the first one kept, too.
    """
    value = make()
    hidden = {**X, "name": "hidden"}
    keys = ("task_id", "label", "graph_bytes", "weights_digest", "weights_bytes")
    keys += ("state_bytes", "vram_bytes", "flops")

    def make_client_task(index: int, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
        task = make_task(index, inputs, outputs)
        return {key: task[key] for key in (*keys, "inputs", "outputs")}

    first = make_client_task(7, [{**X, "source": {"input": "x"}}], [hidden, {**Y, "name": "kept"}])
    result = {**Y, "name": "r", "source": {"output": "result"}}
    kept = {**Y, "name": "k", "source": {"task": 0, "port": 1}}
    value["client"] = {
        "inputs": [X],
        "outputs": [{**Y, "name": "shown", "task": 1, "port": 0}],
        "tasks": [first, make_client_task(8, [result, kept], [Y])],
        "sends": [{"task": 0, "port": 0}],
    }
    return value


def test_tasks_of_the_client_stand_around_those_of_nodes() -> None:
    manifest = load(make_private())
    assert manifest.client is not None and manifest.client.find_early() == (0,)
    assert [port.name for port in manifest.user_outputs] == ["shown"]
    assert [port.name for port in manifest.outputs] == ["result"]
    assert manifest.price_nano_usdc == load(make()).price_nano_usdc
    assert load_manifest(manifest.to_bytes()) == manifest


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("sends.0", {"task": 1, "port": 0}, "'x'"),  # what nodes compute, sent to nodes
        ("sends.0", {"input": "y"}, "no earlier source"),
        ("sends", [], "other inputs"),
        ("sends", [{"input": "x"}, {"input": "x"}], "other inputs"),
        ("tasks.1.inputs.0.source", {"output": "other"}, "no earlier source"),
        ("tasks.1.inputs.0.source", {"task": 0, "port": 1}, "no the client's task reads"),
        ("tasks.0.inputs.0.source", {"output": "result"}, "'x'"),
        ("tasks.0.inputs.0.source", {"task": 1, "port": 0}, "no earlier source"),
        ("tasks.0.weights_bytes", 5, "weights without a digest"),
        ("tasks.0.price_nano_usdc", 5, "price_nano_usdc"),
        ("outputs.0.task", 2, "no earlier source"),
        ("tasks", [], "client.tasks"),
    ],
)
def test_a04_unsound_parts_of_the_client_are_refused(path: str, value: Any, problem: str) -> None:
    root = place = make_private()
    *parts, last = ["client", *path.split(".")]
    for part in parts:
        place = place[int(part) if isinstance(place, list) else part]  # type: ignore[index]
    place[int(last) if isinstance(place, list) else last] = value  # type: ignore[index]
    with pytest.raises(InvalidModel, match=problem):
        load(root)


def test_gates_are_inputs_of_tasks_without_state() -> None:
    value = make()
    value["tasks"][3]["gate"] = 1
    assert load(value).tasks[3].gate == 1
    for change in ({"gate": 3}, {"gate": -1}, {"gate": True}, {"gate": 1, "state_bytes": 4}):
        wrong = make()
        wrong["tasks"][3] |= change
        with pytest.raises(InvalidModel, match="gate"):
            load(wrong)


def test_s20_a_refused_manifest_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'{"version":1,"why":"a manifest that this test alone reads"}'
    with pytest.raises(InvalidModel, match="Field required"):
        load_manifest(data)
    monkeypatch.setattr("splitup.graph.manifest_rules.decode_canonical", None)
    with pytest.raises(InvalidModel, match="Field required"):
        load_manifest(data)


def test_s67_the_values_of_a_manifest_are_counted() -> None:
    """Reading many ports would hold up the event loop, also from a thread."""
    [task] = make_chain_manifest(1).tasks
    outputs = tuple(Port(name=str(place), dtype="int8", shape=()) for place in range(240))
    tasks = tuple(
        task.model_copy(update={"task_id": f"{place:064x}", "outputs": outputs})
        for place in range(240)
    )
    many = make_chain_manifest(1).model_copy(update={"tasks": tasks}).to_bytes()
    assert len(many) < limits.MAX_MANIFEST_BYTES
    with pytest.raises(InvalidModel, match="values; the limit is"):
        load_manifest(many)


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_s74_a_task_has_no_more_bytes_at_once_than_a_node_keeps(what: str) -> None:
    """Each of 256 ports may have 1 GiB; whoever computes the task has all of them in memory."""
    row = {**X, "shape": [1, limits.MAX_TENSOR_BYTES // 4]}
    read = {**row, "source": {"input": "x"}}
    inputs = [read] if what == "outputs" else [read, {**read, "name": "again"}]
    outputs = [Y] if what == "inputs" else [row, {**row, "name": "y"}]
    value = make() | {
        "inputs": [row],
        "outputs": [{**outputs[0], "task": 0, "port": 0}],
        "tasks": [make_task(0, inputs, outputs)],
    }
    value["tasks"][0]["vram_bytes"] = 2**40
    with pytest.raises(InvalidModel, match=f"the {what} of .* have {2 * limits.MAX_TENSOR_BYTES} "):
        load_manifest(encode_canonical(value))
    value["tasks"][0][what].pop()
    load_manifest(encode_canonical(value))
