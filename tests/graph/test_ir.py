from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.codec import encode_canonical, parse_json
from splitup.core.errors import InvalidModel
from splitup.graph.ir import Graph, decode_float, encode_float, parse_graph
from splitup.graph.rules import load_graph
from tests.builders import HANG_S
from tests.graph.graphs import make_legal

GRAPH = make_legal()
BYTES = GRAPH.to_bytes()


def test_bytes_round_trip() -> None:
    assert load_graph(BYTES) == GRAPH
    assert GRAPH == load_graph(BYTES) and load_graph(BYTES) != replace(GRAPH, outputs=())
    assert load_graph(memoryview(BYTES)).to_bytes() == BYTES


def test_the_identity_covers_weights_and_nodes() -> None:
    other = replace(GRAPH, weights=(replace(GRAPH.weights[0], digest="0" * 64),))
    renamed = replace(GRAPH, outputs=(replace(GRAPH.outputs[0], name="z"),))
    assert len({graph.to_bytes() for graph in (GRAPH, other, renamed)}) == 3


@given(st.floats(allow_nan=False))
def test_floats_keep_every_bit(value: float) -> None:
    assert encode_float(decode_float(encode_float(value))) == encode_float(value)
    assert decode_float(encode_float(value)) == value


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidModel):
        load_graph(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(st.data())
def test_any_value_in_any_place_is_legal_or_refused(data: st.DataObject) -> None:
    """A changed field gives InvalidModel or another legal graph, never another exception."""
    value = json.loads(BYTES)
    place, key = value, data.draw(st.sampled_from(sorted(value)))
    while isinstance(place[key], list) and place[key] and data.draw(st.booleans()):
        place, key = place[key], data.draw(st.integers(0, len(place[key]) - 1))
    place[key] = data.draw(JSON)
    try:
        graph = load_graph(encode_canonical(value))
    except InvalidModel:
        return
    except Exception as error:
        if type(error).__name__ == "InvalidInput":  # the value itself is not canonical
            return
        raise
    assert isinstance(graph, Graph)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"format": "splitup.graph2"},
        {"nodes": {}},
        {"extra": 1},
        {"inputs": [["x", "float32"]]},
        {"outputs": [["y", "3"]]},
        {"weights": [["w", "float32", [4], 7]]},
        {"nodes": [["INPUT", "float32", [], [1, ["x"]]]]},
        {"nodes": [["INPUT", "float32", [True], 0]]},
    ],
)
def test_every_field_is_checked(change: dict[str, object]) -> None:
    with pytest.raises(InvalidModel, match="no graph"):
        parse_graph(encode_canonical({**json.loads(BYTES), **change}))


def test_another_spelling_is_refused() -> None:
    with pytest.raises(InvalidModel, match="canonical"):
        load_graph(BYTES.replace(b'"version":1', b'"version": 1'))
    with pytest.raises(InvalidModel, match="no graph"):
        load_graph(BYTES + b" " * limits.MAX_GRAPH_BYTES)


def test_a04_deep_nesting_is_refused_quickly(raised_recursion_limit: None) -> None:
    """Deep JSON overflows the C stack once a library has raised the limit, as web3 does."""
    start = time.process_time()
    for data in (b"[" * 1_000_000, b'{"a":' * 500_000, b"[" * 100_000 + b"]" * 100_000):
        with pytest.raises(InvalidModel):
            load_graph(data)
    assert time.process_time() - start < HANG_S


@given(JSON)
def test_the_depth_bound_refuses_nothing_else(value: object) -> None:
    """Brackets and quotes inside strings do not count."""
    tricky = ["[" * 99, '"' + "{" * 99, "\\" * 3 + '"' + "[" * 99, value]
    for form in (value, tricky):
        assert parse_json(json.dumps(form)) == form
    at_limit = "[" * limits.MAX_JSON_DEPTH + "]" * limits.MAX_JSON_DEPTH
    parse_json(at_limit)
    with pytest.raises(ValueError, match="nests deeper"):
        parse_json("[" + at_limit + "]")


@pytest.mark.parametrize("unit", ['\\"', "\\", '"', '"\\', "[", '["'])
def test_the_depth_check_is_linear(unit: str, raised_recursion_limit: None) -> None:
    """An unterminated string of 80 KB took 21 s while every quote was tried as a start."""
    start = time.process_time()
    with pytest.raises(ValueError):
        parse_json('"' + unit * (2_000_000 // len(unit)))
    assert time.process_time() - start < HANG_S
