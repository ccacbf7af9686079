"""Encrypted products: their error, their form, and what a host can and cannot do with them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from private_tests.adapters.weights import make_evaluation, make_random
from splitup_private.adapters import ckks
from splitup_private.adapters.ckks import (
    ClientKeys,
    Evaluation,
    Memory,
    compute_answer_bytes,
    compute_input_bytes,
    compute_key_bytes,
)
from splitup_private.adapters.client import RELATIVE_ERROR
from splitup_private.adapters.layout import SlotLayout, get_layout
from splitup_private.adapters.parameters import ANSWER_SCALE, INPUT_SCALE, choose_parameters
from splitup_private.adapters.weights import Adapter
from splitup_private.attacks.attacks import TokenDecoder

from splitup.core.errors import ConfigurationError, PeerFault

ADAPTER = make_random(1536, 16)
PARAMETERS = ADAPTER.info.parameters
LAYOUT = get_layout(ADAPTER.info)
RNG = np.random.default_rng(1)


@pytest.fixture(scope="module")
def keys() -> ClientKeys:
    return ClientKeys(PARAMETERS)


@pytest.fixture(scope="module")
def host(keys: ClientKeys) -> Evaluation:
    return make_evaluation(ADAPTER, keys)


def compute(adapter: Adapter, keys: ClientKeys, host: Evaluation, hidden: np.ndarray) -> np.ndarray:
    """Return W h through encryption, as ``EncryptedAdapter`` does."""
    length = np.linalg.norm(hidden) or 1.0
    layout = get_layout(adapter.info)
    answer, _ = host.apply(keys.encrypt(layout.pack(hidden / length)))
    return layout.unpack(keys.decrypt(answer)) * 2.0**adapter.info.answer_bits * length


def test_the_error_is_below_1e_5(keys: ClientKeys, host: Evaluation) -> None:
    changes, errors = [], []
    for _ in range(16):
        hidden = RNG.normal(size=1536)
        wanted = ADAPTER.compute(hidden)
        changes.append(np.abs(wanted).max())
        errors.append(np.abs(compute(ADAPTER, keys, host, hidden) - wanted).max())
    assert max(errors) <= 1e-5 and min(changes) > 0.1


@pytest.mark.parametrize("length", [1e-30, 1e-3, 1.0, 1e6, 1e15])
def test_the_error_is_a_fixed_part_of_what_is_possible(
    keys: ClientKeys, host: Evaluation, length: float
) -> None:
    aligned = RNG.normal(size=16) @ ADAPTER.a  # as much as the adapter can make of it
    spike = np.eye(1536)[RNG.integers(1536)]
    for direction in (aligned, spike, RNG.normal(size=1536), RNG.normal(size=1536) ** 5):
        hidden = direction / np.linalg.norm(direction) * length
        error = np.abs(compute(ADAPTER, keys, host, hidden) - ADAPTER.compute(hidden)).max()
        assert error <= RELATIVE_ERROR * length * 2.0**ADAPTER.info.gain_bits


def test_zero_gives_zero(keys: ClientKeys, host: Evaluation) -> None:
    bound = 2.0**ADAPTER.info.gain_bits * RELATIVE_ERROR
    assert np.abs(compute(ADAPTER, keys, host, np.zeros(1536))).max() <= bound


@pytest.mark.parametrize(("width", "rank"), [(1, 1), (37, 5), (256, 16), (768, 64), (4096, 3)])
def test_other_sizes(width: int, rank: int) -> None:
    adapter = make_random(width, rank, name=f"{width}")
    keys = ClientKeys(adapter.info.parameters)
    host = make_evaluation(adapter, keys)
    hidden = RNG.normal(size=width)
    error = np.abs(compute(adapter, keys, host, hidden) - adapter.compute(hidden)).max()
    assert error <= RELATIVE_ERROR * np.linalg.norm(hidden) * 2.0**adapter.info.gain_bits


def test_bytes_are_few(keys: ClientKeys, host: Evaluation) -> None:
    sent = keys.encrypt(LAYOUT.pack(RNG.normal(size=1536)))
    answer, _ = host.apply(sent)
    assert len(sent) + len(answer) <= 260_000
    assert len(sent) <= compute_input_bytes(PARAMETERS)
    assert len(answer) <= compute_answer_bytes(PARAMETERS)
    rotations = keys.make_rotation_keys(LAYOUT.steps)
    assert len(rotations) <= compute_key_bytes(PARAMETERS, LAYOUT)


def test_equal_ciphertexts_give_equal_answers_and_ciphertexts_are_fresh(
    keys: ClientKeys, host: Evaluation
) -> None:
    slots = LAYOUT.pack(RNG.normal(size=1536))
    first, second = keys.encrypt(slots), keys.encrypt(slots)
    assert first != second
    other = make_evaluation(ADAPTER, keys)  # another host, with keys made for it
    other._keys = host._keys
    assert host.apply(first)[0] == host.apply(first)[0] == other.apply(first)[0]
    assert host.apply(second)[0] != host.apply(first)[0]


def test_the_host_cannot_decrypt_with_all_that_it_receives(keys: ClientKeys) -> None:
    """It takes every object that it has for a secret key."""
    seal = keys.seal
    hidden = RNG.normal(size=1536)
    slots = LAYOUT.pack(hidden / np.linalg.norm(hidden))
    received = [keys.make_rotation_keys(LAYOUT.steps), *(keys.encrypt(slots) for _ in range(3))]
    host = make_evaluation(ADAPTER, keys)
    received += [host.apply(data)[0] for data in received[1:]]
    memory = Memory()
    for data in received:
        with pytest.raises(PeerFault, match="not valid for these parameters"):
            memory.read(seal.SecretKey, host.context, data, "a secret key")
    cipher = memory.read(seal.Ciphertext, host.context, received[1], "")
    assert not hasattr(host, "_decryptor") and not hasattr(host, "_generator")
    stranger = ClientKeys(PARAMETERS)  # a secret key that the host makes itself
    plain = seal.Plaintext()
    stranger._decryptor.decrypt(cipher, plain)
    guessed = np.array(stranger.encoder.decode_double(plain))
    assert abs(np.corrcoef(guessed, slots)[0, 1]) < 0.1
    assert np.abs(guessed).max() > 1e3  # noise as large as the modulus
    keys._decryptor.decrypt(cipher, plain)
    np.testing.assert_allclose(keys.encoder.decode_double(plain), slots, atol=1e-8)
    for data in received:  # nor does the hidden state lie in them openly
        assert hidden.tobytes()[:64] not in data and slots.tobytes()[:64] not in data


def test_the_host_learns_nothing_from_pairs(keys: ClientKeys) -> None:
    """It knows which of eight hidden states a ciphertext holds, and learns from 160 of them."""
    states = RNG.normal(size=(8, 1536))
    states /= np.linalg.norm(states, axis=1)[:, None]
    labels = np.arange(320) % 8
    memory, seen = Memory(), []
    for label in labels:
        data = keys.encrypt(LAYOUT.pack(states[label]))
        cipher = memory.read(keys.seal.Ciphertext, keys.context, data, "")
        found = cipher.dyn_array()  # first part, first prime; then first part, second prime
        polynomials = [found.at(start + place) for start in (0, 8192) for place in range(48)]
        seen.append([*polynomials, len(data)])
    noise = np.array(seen, np.float64)
    noise = (noise - noise.mean(axis=0)) / noise.std(axis=0)
    plain = np.column_stack([noise, states[labels, :16] * 40])  # so that something can be found
    shares = []
    for features in (noise, plain):
        learnt = TokenDecoder(features[:160].astype(np.float32), labels[:160])
        shares.append(learnt.count_right(features[160:].astype(np.float32), labels[160:]) / 160)
    assert shares[0] < 0.3 and shares[1] > 0.9  # chance is 0.125, with a deviation of 0.026


def spoil(data: bytes) -> dict[str, bytes]:
    """Return hostile variants of SEAL's bytes."""
    middle = len(data) // 2
    return {
        "nothing": b"",
        "short": data[:8],
        "header": data[:16],
        "truncated": data[:middle],
        "padded": data + bytes(64),
        "no mark": b"\0" * len(data),
        "lying length": data[:8] + (2**62).to_bytes(8, "little") + data[16:],
        "truncated, length adjusted": data[:8] + (middle).to_bytes(8, "little") + data[16:middle],
        "uncompressed": data[:5] + b"\0" + data[6:],
        "other compression": data[:5] + b"\1" + data[6:],
    }


def test_hostile_ciphertexts_are_refused(keys: ClientKeys, host: Evaluation) -> None:
    data = keys.encrypt(LAYOUT.pack(np.ones(1536)))
    good, _ = host.apply(data)
    for bad in spoil(data).values():
        with pytest.raises(PeerFault, match="the ciphertext: "):
            host.apply(bad)
    for bad in spoil(good).values():
        with pytest.raises(PeerFault, match="the adapter host's answer: "):
            keys.decrypt(bad)
    with pytest.raises(PeerFault, match="bytes are too many"):
        host.apply(bytes(compute_input_bytes(PARAMETERS) + 1))
    with pytest.raises(PeerFault, match="bytes are too many"):
        keys.decrypt(bytes(compute_answer_bytes(PARAMETERS) + 1))
    assert host.apply(data)[0] == good


def test_changed_bytes_give_an_error_or_another_answer_and_nothing_else(
    keys: ClientKeys, host: Evaluation
) -> None:
    data = keys.encrypt(LAYOUT.pack(np.ones(1536)))
    good, _ = host.apply(data)
    refused = 0
    for place in RNG.integers(16, len(data), 40):
        bad = bytearray(data)
        bad[place] ^= int(RNG.integers(1, 256))
        try:
            assert host.apply(bytes(bad))[0] != good
        except PeerFault:
            refused += 1
    assert refused < 40  # else nothing of this was tested
    assert host.apply(data)[0] == good


def test_ciphertexts_of_another_level_or_scale_are_refused(
    keys: ClientKeys, host: Evaluation
) -> None:
    first, last = keys.context.first_parms_id(), keys.context.last_parms_id()
    slots = LAYOUT.pack(np.ones(1536))
    answer, _ = host.apply(keys.encrypt(slots))
    for scale, level in ((INPUT_SCALE, last), (2.0**41, first), (1.0, first)):
        plain = keys.encode(slots, scale, level)
        data = keys.memory.write(keys._encryptor.encrypt_symmetric(plain))
        with pytest.raises(PeerFault, match="another level, or of scale"):
            host.apply(data)
        with pytest.raises(PeerFault, match=r"another level, or of scale|too many"):
            keys.decrypt(data)
    with pytest.raises(PeerFault, match=r"of scale 2\^58.0 instead of 2\^40"):
        host.apply(answer)
    assert ANSWER_SCALE == 2.0**58


def test_hostile_keys_are_refused(keys: ClientKeys, host: Evaluation) -> None:
    fresh = Evaluation(SlotLayout(256, 16, 4096), *_weights(256), total_bits=60)
    good = keys.make_rotation_keys(fresh._layout.steps)
    for bad in spoil(good).values():
        with pytest.raises(PeerFault, match="the keys for rotations: "):
            fresh.load_keys(bad)
    with pytest.raises(PeerFault, match="bytes are too few"):
        fresh.load_keys(keys.make_rotation_keys(fresh._layout.steps[:-2]))
    with pytest.raises(PeerFault, match="they are not those of the rotations by"):
        fresh.load_keys(keys.make_rotation_keys([3, *fresh._layout.steps[1:]]))
    with pytest.raises(PeerFault, match="bytes are too few"):
        fresh.load_keys(keys.encrypt(np.zeros(4096)))
    with pytest.raises(PeerFault, match="bytes are too many"):
        fresh.load_keys(keys.make_rotation_keys([*fresh._layout.steps, 3, 5]))
    other = ClientKeys(choose_parameters(5_000))
    with pytest.raises(PeerFault, match="not valid for these parameters"):
        fresh.load_keys(
            other.make_rotation_keys(fresh._layout.steps[: len(fresh._layout.steps) // 2])
        )
    fresh.load_keys(good)


def test_without_the_library_a_sentence_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tenseal").mkdir()
    (tmp_path / "tenseal" / "__init__.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "tenseal"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigurationError, match=r"pip install .*\[adapters\]'"):
        ckks.import_seal()


def _weights(width: int) -> tuple[np.ndarray, np.ndarray]:
    adapter = make_random(width, 16)
    assert math.isclose(np.linalg.norm(adapter.a[0]), 1)
    return adapter.a, adapter.b
