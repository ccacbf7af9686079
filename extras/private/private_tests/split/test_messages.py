"""No message that a device sends has room for text, token ids, logits or choices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from splitup_private.split import messages as split

from splitup.messages.base import Message

FORWARD = {"type": "forward", "model": "m", "seq_len": 1, "hidden_dim": 2}
# every field of every request; what each can say is below
FIELDS = {
    "ping": {"type"},
    "config": {"type", "model"},
    "end": {"type", "session_id"},
    "forward": {
        *("type", "model", "seq_len", "hidden_dim", "session_id", "incremental", "position"),
        *("expert_name", "use_he"),
    },
}
TOLD = (
    *("text", "prompt", "messages", "token_ids", "tokens", "input_ids", "ids", "logits"),
    *("logprobs", "choices", "choice", "temperature", "top_k", "top_p", "seed", "outputs"),
    *("layout", "attention_mask", "labels", "stop", "pre_activations"),
)


def list_allowed(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a field's JSON schema."""
    return schema.get("anyOf", [schema])


def test_the_fields_are_these_and_none_holds_a_text_or_a_list() -> None:
    assert {name: set(kind.model_fields) for name, kind in split.REQUESTS.items()} == FIELDS
    for kind in split.REQUESTS.values():
        schema = kind.model_json_schema()
        assert schema["additionalProperties"] is False and "$defs" not in schema
        for name, field in schema["properties"].items():
            for allowed in list_allowed(field):
                if "const" in allowed or allowed["type"] in ("null", "boolean"):
                    continue
                if allowed["type"] == "integer":
                    assert name in ("seq_len", "hidden_dim", "position")
                    continue
                assert allowed["type"] == "string"  # a name that the server offered, or random
                assert (
                    name in ("model", "session_id")
                    and allowed["maxLength" if name == "model" else "pattern"]
                )
    properties = split.Forward.model_json_schema()["properties"]
    assert properties["expert_name"]["type"] == "null"  # which adapter fits is the device's secret
    assert properties["use_he"]["const"] is False


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("kind", ["ping", "config", "end", "forward"])
def test_what_a_device_keeps_to_itself_is_refused(kind: str, name: str) -> None:
    session = {"session_id": "x" * 32} if kind == "end" else {}
    fields = {**(FORWARD if kind == "forward" else {"type": kind, **session}), name: "canary"}
    text = json.dumps({**fields, "hidden_states": ""} if kind == "forward" else fields)
    for decode, message in ((split.decode_text, text), (split.decode_binary, make_binary(fields))):
        with pytest.raises(split.SplitError) as caught:
            decode(message)
        assert caught.value.code == "bad_message" and name in str(caught.value)
        assert "canary" not in str(caught.value), "errors do not repeat what was sent"


def make_binary(fields: dict[str, Any], tensor: bytes = b"") -> bytes:
    header = json.dumps(fields).encode()
    return len(header).to_bytes(4, "little") + header + tensor


def test_a_message_survives_both_forms() -> None:
    request = split.Forward.from_value(FORWARD)
    tensor = bytes(range(8))
    assert split.decode_text(split.encode_text(request, tensor, "hidden_states")) == (
        request,
        tensor,
    )
    assert split.decode_binary(split.encode_binary(request, tensor)) == (request, tensor)
    assert split.decode_rows(request, tensor).tobytes() == tensor


@pytest.mark.parametrize("use_he", [True, 1, "yes", None, False])
def test_encryption_is_never_left_out_silently(use_he: Any) -> None:
    text = json.dumps({**FORWARD, "use_he": use_he, "hidden_states": ""})
    if use_he is False:
        split.decode_text(text)
        return
    with pytest.raises(split.SplitError) as caught:
        split.decode_text(text)
    assert caught.value.code == ("bad_message" if use_he is None else "adapter_host")


def test_answers_say_that_nothing_was_encrypted() -> None:
    assert split.Forwarded.model_fields["he_active"].default is False
    assert issubclass(split.Forwarded, Message)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(FIELDS["forward"])), VALUES, st.binary(max_size=40))
def test_whatever_is_sent_is_read_or_refused(name: str, value: Any, noise: bytes) -> None:
    fields = {**FORWARD, "hidden_states": "AAAAAAAAAAA=", name: value}
    messages = [noise, len(noise).to_bytes(4, "little") + noise, make_binary(fields, noise)]
    fields.pop("hidden_states")
    messages.append(make_binary(fields, noise))
    for message in messages:
        for decode in (split.decode_binary, split.decode_text):
            try:
                request, tensor = decode(message)
                if isinstance(request, split.Forward):
                    split.decode_rows(request, tensor)
            except split.SplitError:
                pass
