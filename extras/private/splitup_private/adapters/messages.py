"""What an adapter host tells its clients. Keys and ciphertexts are bytes in SEAL's own form."""

from __future__ import annotations

import struct
from typing import Annotated, Final

from pydantic import Field

from splitup.core import limits
from splitup.core.errors import BadSignature, InvalidInput
from splitup.crypto.keys import Identity, check_public_key, verify
from splitup.messages.base import Count, DigestField, Message

# Before the ciphertext of an answer: the microseconds to read, to compute and to write it.
ANSWER_HEAD: Final = struct.Struct("<III")
_DOMAIN: Final = b"adapter-list"


Keyword = Annotated[str, Field(min_length=1, max_length=64)]


class CkksParameters(Message):
    """Degree of the polynomials and bits of the primes, the last one for rotations alone."""

    degree: Annotated[int, Field(ge=1, le=2**16)]
    prime_bits: Annotated[
        tuple[Annotated[int, Field(ge=1, le=60)], ...], Field(min_length=1, max_length=16)
    ]


class AdapterInfo(Message):
    """One adapter: the matrix W = alpha / r · B A, [width, width], of rank at most ``rank``.

    ``adapter`` is the SHA-256 of its weights (``adapters.weights``). No row of W is longer than
    2^``gain_bits``. An answer to a hidden state h holds 2^-``answer_bits`` · W h, |h| = 1.
    ``keywords`` say what it is for; see ``adapters.choice``. ``base_model`` is the
    name of what it was trained on, as its PEFT folder says.
    """

    adapter: DigestField
    name: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS)]
    width: Count
    rank: Count
    gain_bits: Annotated[int, Field(ge=-64, le=64)]
    answer_bits: Annotated[int, Field(ge=-128, le=128)]
    parameters: CkksParameters
    keywords: Annotated[tuple[Keyword, ...], Field(max_length=64)] = ()
    base_model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] = ""


class AdapterList(Message):
    """All adapters of a host; ``library`` computes, such as "tenseal 0.3.18, evaluation 3".

    A host may sign its list, so that clients know who made it: ``signer`` is its signing key.
    """

    library: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)]
    adapters: Annotated[tuple[AdapterInfo, ...], Field(max_length=1_024)]
    signer: Annotated[str, Field(pattern="^(0x[0-9a-f]{64})?$")] = ""
    signature: Annotated[str, Field(pattern="^([0-9a-f]{128})?$")] = ""

    def sign(self, identity: Identity) -> AdapterList:
        """Return the list with a host's signature."""
        unsigned = self.model_copy(update={"signer": identity.signing_key_hex, "signature": ""})
        signature = identity.sign(_DOMAIN, unsigned.canonical_bytes()).hex()
        return unsigned.model_copy(update={"signature": signature})

    def check_signature(self, signer: str) -> None:
        """Raise BadSignature unless the holder of this signing key has signed the list."""
        unsigned = self.model_copy(update={"signer": signer, "signature": ""})
        verify(signer, _DOMAIN, unsigned.canonical_bytes(), bytes.fromhex(self.signature))


def check_signer(key: str) -> None:
    """Raise InvalidInput unless a user named a signing key."""
    try:
        check_public_key(key)
    except BadSignature as error:
        raise InvalidInput(
            f"the adapter signer '{key:.80}' cannot sign: {error}; 'splitup adapter-host --sign' "
            "prints the right key"
        ) from None


class AdapterSession(Message):
    """The session that holds a client's keys for rotations; who knows its name may ask in it."""

    session: DigestField
