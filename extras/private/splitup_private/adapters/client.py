"""The client of an adapter host: encrypts hidden states, decrypts what the adapter adds to them.

The secret key stays in ``ClientKeys``. What goes to a host is made here and nowhere else: keys for
rotations and fresh ciphertexts of hidden states. A decrypted value never goes back to a host: CKKS
is not secure against a host that learns decrypted values (Li and Micciancio, EUROCRYPT 2021). There
is no way around encryption: whatever fails raises, and the keys are then given up.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput, PeerFault, Refused
from splitup.net.http import SignedClient
from splitup_private.adapters import routes
from splitup_private.adapters.choice import choose_adapter
from splitup_private.adapters.ckks import ClientKeys, compute_answer_bytes, import_seal
from splitup_private.adapters.layout import Floats, get_layout
from splitup_private.adapters.messages import (
    ANSWER_HEAD,
    AdapterInfo,
    AdapterList,
    AdapterSession,
    check_signer,
)
from splitup_private.adapters.parameters import check_parameters

# The error of an answer, as a part of the largest change that the adapter makes to a hidden state
# of this length. Largest that was measured: 0.75 of it, and 0.94 for more than 2,048 elements.
RELATIVE_ERROR: Final = 2.0**-17
_MOST_LENGTH: Final = 2.0**64  # of a hidden state; a longer one is a fault of the model's
_GONE: Final = 410
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Which adapter to use: its host's URL, and its name there or the SHA-256 of its weights.

    Without ``expert`` the question decides, on this machine (``splitup_private.adapters.choice``).

    Every ciphertext also goes to ``check_url``, a host of the same adapter with the same library,
    whose answers have to be the same bytes. With ``signer``, a signing key, what ``url`` offers has
    to be signed by it; raises InvalidInput for anything else. Keys are used for ``max_uses`` hidden
    states and ``max_age_s`` seconds at most.
    """

    url: str
    expert: str = ""
    check_url: str = ""
    max_uses: int = 4_096
    max_age_s: float = 3_600.0
    signer: str = ""

    def __post_init__(self) -> None:
        if self.signer:
            check_signer(self.signer)

    async def choose(
        self, http: SignedClient, question: str | None, width: int
    ) -> AdapterOptions | None:
        """Return options that name the adapter of the host that fits a question; None for none.

        Adapters of another width do not fit the model. Raises InvalidInput without a question,
        Unavailable and PeerFault.
        """
        if self.expert:
            return self
        if question is None:
            raise InvalidInput("the words of a prompt choose an adapter, and it has none; name one")
        listed = await _fetch_list(http, self.url, self.signer)
        fitting = [info for info in listed.adapters if info.width == width]
        found = choose_adapter(fitting, question)
        return None if found is None else replace(self, expert=found.adapter)

    async def open(self, http: SignedClient, width: int) -> EncryptedAdapter:
        """Open the adapter; see ``EncryptedAdapter.open``."""
        return await EncryptedAdapter.open(http, self, width)


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What one hidden state took. ``compute_ms`` is what the host says; ``sent_bytes`` one host's.

    ``waited_ms`` is the time between the request and the answer, the host's work included.
    """

    encrypt_ms: float
    read_ms: float
    compute_ms: float
    write_ms: float
    decrypt_ms: float
    waited_ms: float
    sent_bytes: int
    received_bytes: int


@dataclass(slots=True)
class _Keyed:
    keys: ClientKeys
    sessions: list[str]  # URLs, one per host
    made_s: float
    uses: int = 0


class EncryptedAdapter:
    """One adapter at its host. Made by ``open``; hidden states are taken one after another."""

    def __init__(self, http: SignedClient, options: AdapterOptions, info: AdapterInfo) -> None:
        self.info = info
        self.reports: list[AdapterReport] = []
        self._http = http
        self._options = options
        self._hosts = [url.rstrip("/") for url in (options.url, options.check_url) if url]
        self._layout = get_layout(info)
        self._keyed: _Keyed | None = None
        self._turn = asyncio.Lock()

    @classmethod
    async def open(
        cls, http: SignedClient, options: AdapterOptions, width: int
    ) -> EncryptedAdapter:
        """Find the adapter for hidden states of ``width`` elements, and give its host the keys.

        Raises ConfigurationError without TenSEAL, InvalidInput for an adapter that does not exist
        or has another width, PeerFault for parameters that are not safe or not the expected ones
        and for hosts that differ, Unavailable.
        """
        import_seal()
        if options.max_uses < 1 or options.max_age_s <= 0:
            raise InvalidInput("keys have to serve for one use and some time")
        lists = [await _fetch_list(http, options.url, options.signer)]
        lists += [await _fetch_list(http, url) for url in (options.check_url,) if url]
        info = _find(lists[0], options.expert, options.url)
        for other in lists[1:]:
            found = _find(other, info.adapter, options.check_url)
            labels = {name: getattr(info, name) for name in ("name", "keywords", "base_model")}
            if found.model_copy(update=labels) != info:
                raise PeerFault(f"the hosts describe adapter {info.adapter} differently")
            if other.library != lists[0].library:
                raise PeerFault(
                    f"the hosts compute with {lists[0].library} and {other.library}: their answers "
                    "cannot be compared"
                )
        if info.width != width:
            raise InvalidInput(
                f"the adapter '{options.expert}' is for hidden states of {info.width} elements, "
                f"and the model has {width}"
            )
        check_parameters(info.parameters, width)
        opened = cls(http, options, info)
        await opened._get_keys()
        return opened

    async def apply(self, hidden: npt.NDArray[Any]) -> Floats:
        """Return what the adapter adds to a hidden state [width], float64.

        Raises InvalidInput for a hidden state that is not finite or too long, Unavailable, Refused
        and PeerFault for a host that does not answer, refuses, or answers something else.
        """
        hidden = np.asarray(hidden, np.float64)
        length = float(np.linalg.norm(hidden)) if np.isfinite(hidden).all() else np.inf
        if hidden.shape != (self.info.width,) or not length < _MOST_LENGTH:
            raise InvalidInput(
                f"a hidden state has shape {list(hidden.shape)} and length {length:g}; an adapter "
                f"takes {self.info.width} finite numbers of length below 2^64"
            )
        slots = self._layout.pack(hidden / (length or 1.0))
        async with self._turn:
            try:
                return length * await self._ask(slots)
            except BaseException:
                await self._give_up_keys()  # a host must not learn how its answers are taken
                raise

    async def close(self) -> None:
        """Forget the keys and end the sessions at the hosts."""
        async with self._turn:
            await self._give_up_keys()

    def describe(self) -> str:
        """Return a line with the adapter's digest and the medians of all reports."""
        start = f"adapter {self.info.name} ({self.info.adapter}), under encryption: "
        if not self.reports:
            return start + "not used"
        medians = {
            name: float(np.median([getattr(report, name) for report in self.reports]))
            for name in AdapterReport.__slots__
        }
        sent, received = medians["sent_bytes"], medians["received_bytes"]
        return (
            f"{start}{len(self.reports)} hidden states, each (medians) encrypt "
            f"{medians['encrypt_ms']:.1f} ms, host {medians['read_ms']:.1f} + "
            f"{medians['compute_ms']:.1f} + {medians['write_ms']:.1f} ms of "
            f"{medians['waited_ms']:.1f} ms waited, decrypt {medians['decrypt_ms']:.1f} ms, "
            f"{sent / 1e3:.0f} kB sent, {received / 1e3:.0f} kB received"
        )

    async def _ask(self, slots: Floats) -> Floats:
        for attempt in (0, 1):
            keyed = await self._get_keys()
            keyed.uses += 1
            times = [time.perf_counter()]
            sent = await asyncio.to_thread(keyed.keys.encrypt, slots)
            times.append(time.perf_counter())
            try:
                answers = await asyncio.gather(*(self._post(url, sent) for url in keyed.sessions))
            except Refused as error:
                if error.status != _GONE or attempt:
                    raise
                await self._give_up_keys()  # the host has ended the session: other keys
                continue
            break
        times.append(time.perf_counter())
        bodies = [answer[ANSWER_HEAD.size :] for answer in answers]
        if any(body != bodies[0] for body in bodies):
            raise PeerFault(
                f"{self._hosts[0]} and {self._hosts[1]} answer one ciphertext differently: one of "
                "them does not apply the adapter; no token is made of it"
            )
        found = await asyncio.to_thread(self._read, keyed.keys, bodies[0])
        times.append(time.perf_counter())
        encrypt, waited, decrypt = (1e3 * (b - a) for a, b in pairwise(times))
        read, compute, write = (us / 1e3 for us in ANSWER_HEAD.unpack_from(answers[0]))
        self.reports.append(
            AdapterReport(
                *(encrypt, read, compute, write, decrypt, waited, len(sent), len(answers[0]))
            )
        )
        return found

    def _read(self, keys: ClientKeys, body: bytes) -> Floats:
        """Return what an answer holds, for a hidden state of length 1; raise PeerFault."""
        found = self._layout.unpack(keys.decrypt(body)) * 2.0**self.info.answer_bits
        if not np.abs(found).max() <= 2.0**self.info.gain_bits * (1 + RELATIVE_ERROR):
            raise PeerFault("the adapter host's answer is larger than the adapter can make it")
        return found

    async def _get_keys(self) -> _Keyed:
        keyed = self._keyed
        if keyed is not None and (
            keyed.uses >= self._options.max_uses
            or time.monotonic() - keyed.made_s >= self._options.max_age_s
        ):
            await self._give_up_keys()
        if self._keyed is None:
            keys = await asyncio.to_thread(ClientKeys, self.info.parameters)
            rotations = await asyncio.to_thread(keys.make_rotation_keys, self._layout.steps)
            sessions = await asyncio.gather(*(self._start(url, rotations) for url in self._hosts))
            self._keyed = _Keyed(keys, sessions, time.monotonic())
        return self._keyed

    async def _start(self, host: str, rotations: bytes) -> str:
        url = routes.ADAPTER_KEYS.url(host, adapter=self.info.adapter)
        reply = await self._http.post_bytes(
            url, rotations, timeout_s=routes.ADAPTER_KEYS.timeout_s, max_bytes=1_024
        )
        session = AdapterSession.parse(reply).session
        return routes.ADAPTER_QUERY.url(host, session=session)

    async def _post(self, url: str, data: bytes) -> bytes:
        most = ANSWER_HEAD.size + compute_answer_bytes(self.info.parameters)
        answer = await self._http.post_bytes(
            url, data, timeout_s=routes.ADAPTER_QUERY.timeout_s, max_bytes=most
        )
        if len(answer) <= ANSWER_HEAD.size:
            raise PeerFault(f"{url} answered {len(answer)} bytes instead of a ciphertext")
        return answer

    async def _give_up_keys(self) -> None:
        keyed, self._keyed = self._keyed, None
        if keyed is None:
            return
        keyed.keys.close()
        ends = [self._http.post_json(f"{url}/end", {}, timeout_s=2.0) for url in keyed.sessions]
        await asyncio.gather(*ends, return_exceptions=True)  # it ends by itself when idle


async def _fetch_list(http: SignedClient, url: str, signer: str = "") -> AdapterList:
    listed = AdapterList.from_value(await http.get_json(routes.ADAPTERS.url(url.rstrip("/"))))
    if signer:
        listed.check_signature(signer)
    return listed


def _find(listed: AdapterList, expert: str, url: str) -> AdapterInfo:
    key = "adapter" if _DIGEST.fullmatch(expert) else "name"  # no name passes for a digest
    for info in listed.adapters:
        if getattr(info, key) == expert:
            return info
    names = ", ".join(info.name for info in listed.adapters) or "none"
    raise InvalidInput(f"{url} has no adapter '{expert}'; it has: {names}")
