"""CKKS with TenSEAL's binding of Microsoft SEAL: the client's keys, and the host's evaluation.

The client encrypts with its secret key, so the host needs no public key, and half of a fresh
ciphertext is a seed. SEAL writes and reads files: here they lie in memory.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from splitup.core.errors import ConfigurationError, PeerFault, describe
from splitup.core.source_tree import compose_package_install
from splitup_private.adapters.layout import Complexes, Floats, SlotLayout
from splitup_private.adapters.messages import CkksParameters
from splitup_private.adapters.parameters import (
    ANSWER_BITS,
    ANSWER_SCALE,
    INPUT_SCALE,
    check_security,
    choose_parameters,
)

_HEADER_BYTES: Final = 1_024  # of SEAL's own headers, and what zstd adds to random bytes
_MAGIC: Final = b"\x5e\xa1\x10"  # SEAL's: its mark, and the length of its header
_EVALUATION: Final = 3  # counts the changes of `Evaluation` that change the bytes of answers
# Of A's scale before B's: its product is rescaled, which costs it these bits of precision.
_MORE_BITS_FOR_A: Final = 17


def import_seal() -> Any:
    """Return the library; raise ConfigurationError where it is missing."""
    try:
        import tenseal.sealapi
    except ImportError as error:
        raise ConfigurationError(
            f"encrypted adapters need TenSEAL ({error}); "
            f"install it: {compose_package_install('adapters')}"
        ) from None
    return tenseal.sealapi


def get_library() -> str:
    """Return what evaluates and its versions; equal ones give equal ciphertexts."""
    import_seal()
    import tenseal

    return f"tenseal {tenseal.__version__}, evaluation {_EVALUATION}"


def compute_input_bytes(parameters: CkksParameters) -> int:
    """Return the most bytes of a fresh ciphertext: one polynomial, and a seed."""
    return (len(parameters.prime_bits) - 1) * 8 * parameters.degree + _HEADER_BYTES


def compute_answer_bytes(parameters: CkksParameters) -> int:
    """Return the most bytes of an answer: two polynomials under one prime."""
    return 2 * 8 * parameters.degree + _HEADER_BYTES


def compute_key_bytes(parameters: CkksParameters, layout: SlotLayout) -> int:
    """Return the most bytes of the keys for rotations: one polynomial per prime and rotation."""
    primes, table_bytes = len(parameters.prime_bits), 8 * parameters.degree
    polynomial_bytes = primes * 8 * parameters.degree + _HEADER_BYTES
    return len(layout.steps) * (primes - 1) * polynomial_bytes + table_bytes


def check_rotation_keys(
    data: bytes | memoryview, parameters: CkksParameters, layout: SlotLayout
) -> None:
    """Raise PeerFault for bytes that cannot be keys for rotations, by their head and length.

    Their numbers below the primes are random, so that nothing makes them shorter.
    """
    what = "the keys for rotations"
    _check_head(data, what)
    most = compute_key_bytes(parameters, layout)
    polynomial_bytes = sum(bits - 1 for bits in parameters.prime_bits) * parameters.degree // 8
    least = len(layout.steps) * (len(parameters.prime_bits) - 1) * polynomial_bytes
    if not least <= len(data) <= most:
        raise PeerFault(
            f"{what}: {len(data)} bytes are too {'few' if len(data) < least else 'many'}"
        )


def _check_head(data: bytes | memoryview, what: str) -> None:
    head = bytes(data[:16])
    if head[:3] != _MAGIC or int.from_bytes(head[8:], "little") != len(data):
        raise PeerFault(f"{what}: {len(data)} bytes that are truncated, or not SEAL's")


class Memory:
    """A file in memory, through which SEAL's objects become bytes and bytes become objects."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Take an open file; by default make one."""
        self._file = os.memfd_create("ciphertext") if descriptor is None else descriptor
        self._path = f"/proc/self/fd/{self._file}"

    def write(self, thing: Any) -> bytes:
        """Return the bytes of an object."""
        thing.save(self._path)
        return os.pread(self._file, os.fstat(self._file).st_size, 0)

    def read(self, kind: Any, context: Any, data: bytes | memoryview, what: str) -> Any:
        """Return the object in bytes of a stranger; raise PeerFault. ``what`` it is meant to be."""
        _check_head(data, what)
        with open(self._path, "wb", buffering=0) as file:
            file.write(data)
        thing = kind()
        try:
            thing.load(context, self._path)
        except Exception as error:  # SEAL throws many kinds of errors
            raise PeerFault(f"{what}: not valid for these parameters ({describe(error)})") from None
        return thing

    def close(self) -> None:
        """Free the memory."""
        os.close(self._file)


class _Scheme:
    """What both sides make of parameters."""

    def __init__(self, parameters: CkksParameters, descriptor: int | None = None) -> None:
        check_security(parameters)
        self.parameters = parameters
        self.seal = seal = import_seal()
        primes = seal.CoeffModulus.Create(parameters.degree, list(parameters.prime_bits))
        chosen = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        chosen.set_poly_modulus_degree(parameters.degree)
        chosen.set_coeff_modulus(primes)
        self.context = seal.SEALContext(chosen, True, seal.SEC_LEVEL_TYPE.TC128)
        if not self.context.parameters_set():
            raise PeerFault(
                f"SEAL refuses these parameters: {self.context.parameters_error_message()}"
            )
        self.rescaling_prime = int(primes[1].value())
        self.encoder = seal.CKKSEncoder(self.context)
        self.memory = Memory(descriptor)

    def encode(self, values: Floats | Complexes, scale: float, level: Any) -> Any:
        plain = self.seal.Plaintext()
        self.encoder.encode(values.tolist(), level, scale, plain)
        return plain

    def find_element(self, step: int) -> int:
        """Return the Galois element of a rotation to the left."""
        return pow(3, step, 2 * self.parameters.degree)

    def check(self, cipher: Any, level: Any, scale: float, what: str) -> None:
        """Raise PeerFault for a ciphertext of another form, level or scale."""
        if cipher.size() != 2 or not cipher.is_ntt_form() or cipher.is_transparent():
            raise PeerFault(f"{what}: a ciphertext of {cipher.size()} parts, or an empty one")
        if cipher.parms_id() != level or cipher.scale != scale:
            raise PeerFault(
                f"{what}: a ciphertext of another level, or of scale 2^"
                f"{math.log2(abs(cipher.scale) or 1):.1f} instead of 2^{math.log2(scale):.0f}"
            )


class ClientKeys(_Scheme):
    """A secret key, which never leaves this object, and what it encrypts and decrypts.

    Raises ConfigurationError, and PeerFault for unsafe parameters.
    """

    def __init__(self, parameters: CkksParameters) -> None:
        super().__init__(parameters)
        self._generator = self.seal.KeyGenerator(self.context)
        secret = self._generator.secret_key()
        self._encryptor = self.seal.Encryptor(self.context, secret)
        self._decryptor = self.seal.Decryptor(self.context, secret)

    def make_rotation_keys(self, steps: Sequence[int]) -> bytes:
        """Return the keys with which a host rotates the slots of this key's ciphertexts."""
        elements = [self.find_element(step) for step in steps]
        return self.memory.write(self._generator.create_galois_keys(elements))

    def encrypt(self, slots: Floats) -> bytes:
        """Return a fresh ciphertext; two of the same slots differ."""
        plain = self.encode(slots, INPUT_SCALE, self.context.first_parms_id())
        return self.memory.write(self._encryptor.encrypt_symmetric(plain))

    def decrypt(self, data: bytes) -> Floats:
        """Return the slots of a host's answer; raise PeerFault for bytes of another form."""
        what = "the adapter host's answer"
        if len(data) > compute_answer_bytes(self.parameters):
            raise PeerFault(f"{what}: {len(data)} bytes are too many")
        cipher = self.memory.read(self.seal.Ciphertext, self.context, data, what)
        self.check(cipher, self.context.last_parms_id(), ANSWER_SCALE, what)
        plain = self.seal.Plaintext()
        self._decryptor.decrypt(cipher, plain)
        return np.array(self.encoder.decode_double(plain))

    def close(self) -> None:
        """Forget the secret key."""
        del self._generator, self._encryptor, self._decryptor
        self.memory.close()


class Evaluation(_Scheme):
    """A host's side: applies an adapter to ciphertexts of one client, by keys of that client."""

    def __init__(
        self,
        layout: SlotLayout,
        a: Floats,
        b: Floats,
        total_bits: int,
        descriptor: int | None = None,
    ) -> None:
        """Take weights a [rank, width] and b [width, rank], and the bits they scale by together."""
        super().__init__(choose_parameters(layout.width), descriptor)
        self._layout = layout
        self._evaluator = self.seal.Evaluator(self.context)
        bits_a, half = divmod(total_bits + _MORE_BITS_FOR_A, 2)
        balance = math.sqrt(2.0) if half else 1.0  # half a bit: scales are powers of two
        scale_a = self.rescaling_prime * 2.0**bits_a / INPUT_SCALE
        first, last = self.context.first_parms_id(), self.context.last_parms_id()
        self._a = [self.encode(row, scale_a, first) for row in layout.make_diagonals_a(a * balance)]
        # SEAL takes no scale above its modulus: what is beyond ANSWER_BITS multiplies the values.
        b = b * (2.0 ** (total_bits - ANSWER_BITS) / balance)
        scale_b = 2.0 ** (ANSWER_BITS - bits_a)
        self._b = [self.encode(row, scale_b, last) for row in layout.make_diagonals_b(b)]
        self._keys: Any = None

    def load_keys(self, data: bytes | memoryview) -> None:
        """Take a client's keys for rotations; raise PeerFault."""
        check_rotation_keys(data, self.parameters, self._layout)
        what = "the keys for rotations"
        keys = self.memory.read(self.seal.GaloisKeys, self.context, data, what)
        steps = self._layout.steps
        missing = [step for step in steps if not keys.has_key(self.find_element(step))]
        if missing or keys.size() != len(steps):
            raise PeerFault(f"{what}: they are not those of the rotations by {list(steps)} slots")
        self._keys = keys

    def apply(self, data: bytes | memoryview) -> tuple[bytes, tuple[float, float, float]]:
        """Return the answer to a fresh ciphertext, and the seconds to read, compute and write it.

        Equal ciphertexts give equal bytes. Raises PeerFault.
        """
        what = "the ciphertext"
        if len(data) > compute_input_bytes(self.parameters):
            raise PeerFault(f"{what}: {len(data)} bytes are too many")
        times = [time.perf_counter()]
        cipher = self.memory.read(self.seal.Ciphertext, self.context, data, what)
        self.check(cipher, self.context.first_parms_id(), INPUT_SCALE, what)
        times.append(time.perf_counter())
        layout, evaluator = self._layout, self._evaluator
        found = self._multiply(cipher, self._a)
        evaluator.rescale_to_next_inplace(found)  # from here on a rotation costs half as much
        for step in layout.sums:
            evaluator.add_inplace(found, self._rotate(found, step))
        found = self._multiply(found, self._b)
        times.append(time.perf_counter())
        answer = self.memory.write(found)
        times.append(time.perf_counter())
        read, computed, written = (b - a for a, b in pairwise(times))
        return answer, (read, computed, written)

    def _multiply(self, cipher: Any, diagonals: Sequence[Any]) -> Any:
        """Return the sum over all diagonals of their products with the rotated ciphertext."""
        babies = self._layout.babies
        rotated = [cipher]
        for _ in range(babies - 1):
            rotated.append(self._rotate(rotated[-1], 1))
        total = None
        for start in reversed(range(0, len(diagonals), babies)):
            total = None if total is None else self._rotate(total, babies)
            for part in self._products(rotated, diagonals[start : start + babies]):
                if total is None:
                    total = part
                else:
                    self._evaluator.add_inplace(total, part)
        return total

    def _products(self, rotated: Sequence[Any], diagonals: Sequence[Any]) -> Iterator[Any]:
        for cipher, diagonal in zip(rotated, diagonals, strict=True):
            product = self.seal.Ciphertext()
            try:
                self._evaluator.multiply_plain(cipher, diagonal, product)
            except Exception as error:  # of zeros: SEAL refuses a result that hides nothing
                if "transparent" not in str(error):
                    raise
                continue
            yield product

    def _rotate(self, cipher: Any, step: int) -> Any:
        turned = self.seal.Ciphertext()
        self._evaluator.rotate_vector(cipher, step, self._keys, turned)
        return turned
