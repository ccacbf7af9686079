"""Limits how much an account may store. Pure; counts are per gateway, lost when it restarts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from splitup.core import limits, tuning
from splitup.core.errors import Refused
from splitup.core.latest import Latest
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Plan
from splitup_oracle.gateway.access import Right

_DAY_S: Final = 86_400


@dataclass(slots=True)
class _Use:
    day: int
    granted_bytes: int = 0


class UploadQuota:
    """The bytes of models that an account may store per day (UTC).

    Granted bytes count whether or not the URL is used.
    """

    def __init__(self, bytes_per_day: int) -> None:
        self._bytes_per_day = bytes_per_day
        self._uses: Latest[str, _Use] = Latest(tuning.UPLOAD_ACCOUNTS)

    def take(self, account: str, rights: Iterable[Right], now_s: float) -> None:
        """Count PUT rights, all or none; refuse (429) more than the day's share."""
        day = int(now_s // _DAY_S)
        use = self._uses.get(account)
        if use is None or use.day != day:
            use = _Use(day)
        self._uses[account] = use
        wanted = sum(right.length_bytes or 0 for right in rights)
        if use.granted_bytes + wanted > self._bytes_per_day:
            raise Refused(
                f"{wanted} bytes are more than the {self._bytes_per_day - use.granted_bytes} that "
                f"are left today of the account's {self._bytes_per_day}; continue tomorrow (UTC)",
                status=429,
            )
        use.granted_bytes += wanted


class LogQuota:
    """The bytes that each producer may store of its log of a port.

    They suffice for all steps with one header each. A key counts once, however often it is asked
    for, since it is written once.
    """

    def __init__(self) -> None:
        # prefix -> key -> bytes
        self._used: Latest[str, dict[str, int]] = Latest(tuning.LOG_PREFIXES)

    def take(self, rights: Iterable[Right], plan: Plan, manifest: Manifest) -> None:
        """Count PUT rights; refuse more bytes than the execution can produce."""
        for right in rights:
            if right.method != "PUT" or right.length_bytes is None:
                continue
            prefix, _, name = right.key.rpartition("/")
            used = self._used[prefix] = self._used.get(prefix, {})
            before = used.get(name, 0)
            used[name] = max(before, right.length_bytes)
            limit = plan.request.steps * (_get_port_bytes(manifest, prefix) + limits.LOG_STEP_BYTES)
            if sum(used.values()) > limit:
                used[name] = before
                raise Refused(f"the log below {prefix} has its {limit} bytes already", status=403)


def _get_port_bytes(manifest: Manifest, prefix: str) -> int:
    producer, _, port = prefix.split("/")[2].rpartition(".")
    ports = manifest.inputs if producer == "input" else manifest.tasks[int(producer[1:])].outputs
    return ports[int(port)].nbytes
