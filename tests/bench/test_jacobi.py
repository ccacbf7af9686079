"""The benchmark's Jacobi decoder gives the sequential decoder's tokens, in fewer steps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.testbed.jacobi import JacobiDecoder
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from tests.decode.models import VOCAB, SequenceModel, decode
from tests.decode.test_lookahead import make_request


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    temperature=st.sampled_from([0.0, 0.7]),
    chunk=st.integers(1, 20),
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=1),
    max_tokens=st.integers(1, 40),
)
def test_tokens_are_those_of_sequential_decoding(
    prompt: list[int], temperature: float, chunk: int, eos: set[int], max_tokens: int
) -> None:
    sampler = Sampler(temperature, 7, 0)
    request = make_request(prompt, sampler, max_tokens, chunk=chunk, eos_ids=frozenset(eos))
    wanted, most = decode(SequentialDecoder(request), SequenceModel(chunk, 2))
    tokens, steps = decode(JacobiDecoder(request), SequenceModel(chunk, 2))
    assert tokens == wanted and steps <= most
