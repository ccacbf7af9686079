"""The HTTP interface of every party: one row per route, for its servers and its clients.

A server registers the rows of its party (``splitup.net.http_server.add_routes``) and reads requests
by them; a client takes path, JWS type and limits from the same row. ``docs/protocol.md`` shows the
rows as a table, and a test compares the two.

One name per message: an ``ExecutorCommitment`` is sent to ``/v1/executor-commitment``, signed as a
``splitup-executor-commitment``, by the row ``EXECUTOR_COMMITMENT``.

Every body is at most ``limits.HTTP_BODY_BYTES`` long. A signed request is ``{"jws": "<token>"}``
with a message of the row's class in the token; any other POST has the message itself as its body.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, TypeVar

from splitup.core import limits, tuning
from splitup.messages.base import RELAY_PATH, Message
from splitup.messages.completions import Completion, ExecutorCommitment, Takeovers
from splitup.messages.network import NetworkDescription
from splitup.messages.plans import PlanCertificate, SignedRequest
from splitup.messages.snapshots import Heartbeat, ModelHolders, ReachRequest, Snapshot
from splitup.messages.storage import (
    ExecutionRequest,
    Grants,
    LogRequest,
    ModelRequest,
    UploadAnswer,
    UploadRequest,
    VerificationRequest,
)
from splitup.messages.verification import (
    Evidence,
    SignedDueNotice,
    ValidatorCommitment,
    VerificationOrder,
    VerificationResult,
)

M = TypeVar("M", bound=Message)

_GOSSIP_TIMEOUT_S: Final = 3.0  # a member that takes longer counts as down; gossip is repeated


@dataclass(frozen=True, eq=False)
class Route(Generic[M]):
    """One route of a party's HTTP interface.

    ``message`` and ``reply`` are the classes of what is sent and answered; None stands for no
    body, a few fields that the handler names, or bytes that are no JSON. ``typ`` is the type of
    the JWS that carries the message, "" when it needs no signature of its own. ``timeout_s`` is
    how long a sender waits that has no reason to wait less, ``max_wait_s`` how long a server may
    hold its answer back when it is asked to (``wait_s``).
    """

    method: Literal["GET", "POST"]
    path: str  # with its parameters in braces
    sender: str
    message: type[M] | None = None
    typ: str = ""
    reply: type[Message] | None = None
    timeout_s: float = tuning.HTTP_TIMEOUT_S
    max_wait_s: float = 0.0
    max_reply_bytes: int = limits.HTTP_BODY_BYTES

    def parse(self, value: Any) -> M:
        """Validate a decoded message of this route; raise PeerFault."""
        assert self.message is not None, f"{self.path} has no class of message"
        return self.message.from_value(value)

    def url(self, endpoint: str, *, wait_s: float | None = None, **parameters: str | int) -> str:
        """Return the route's URL at an endpoint; ``parameters`` are those of the path."""
        query = "" if wait_s is None else f"?wait_s={wait_s:g}"
        return f"{endpoint}{self.path.format(**parameters)}{query}"


def _signed(
    path: str,
    sender: str,
    message: type[M],
    timeout_s: float = tuning.MEMBER_REPLY_S,
    max_reply_bytes: int = limits.SHORT_REPLY_BYTES,
) -> Route[M]:
    """Return the row of a message that its sender signs, as the type that its path names."""
    typ = "splitup-" + path.rpartition("/")[2]
    return Route(
        *("POST", path, sender, message, typ), timeout_s=timeout_s, max_reply_bytes=max_reply_bytes
    )


def _granting(sender: str, message: type[M], name: str, reply: type[Message] = Grants) -> Route[M]:
    """Return the row of a signed request to a storage gateway."""
    return Route("POST", f"/v1/grants/{name}", sender, message, f"splitup-{name}", reply)


PING: Final = Route[Message]("GET", "/v1/ping", "anybody")

# ---- a committee member's ----------------------------------------------------------------------

STATUS: Final = Route[Message]("GET", "/v1/status", "anybody")
SNAPSHOT: Final = Route[Message](
    "GET",
    "/v1/snapshot/{root}",
    "anybody",
    reply=Snapshot,
    max_reply_bytes=limits.MAX_SNAPSHOT_BYTES,
)
MESSAGE_CHUNK: Final = Route[Message](
    "GET",
    "/v1/message-chunk/{digest}/{index}",
    "member",
    timeout_s=tuning.MESSAGE_CHUNK_TIMEOUT_S,
    max_reply_bytes=limits.MESSAGE_CHUNK_BYTES,
)
PLAN: Final = Route[Message](
    "GET",
    "/v1/plan/{execution_id}",
    "client",
    reply=PlanCertificate,
    max_wait_s=limits.MAX_PLAN_WAIT_S,
)
HOLDERS: Final = Route[Message](
    "GET",
    "/v1/models/{model_id}/holders",
    "client",
    reply=ModelHolders,
    max_reply_bytes=limits.SHORT_REPLY_BYTES,
)
EVIDENCE: Final = Route[Message]("GET", "/v1/evidence/{execution_id}", "anybody", reply=Evidence)
DUE_NOTICE: Final = Route[Message](
    "GET",
    "/v1/due-notice/{execution_id}",
    "node",
    reply=SignedDueNotice,
    timeout_s=tuning.MEMBER_REPLY_S,
    max_reply_bytes=limits.MAX_DUE_NOTICE_BYTES,
)
HEARTBEAT: Final = _signed(
    "/v1/heartbeat", "node", Heartbeat, limits.HEARTBEAT_TIMEOUT_S, limits.HEARTBEAT_REPLY_BYTES
)
REACH_REQUEST: Final = _signed("/v1/reach-request", "node", ReachRequest, tuning.REACH_TIMEOUT_S)
SIGNED_REQUEST: Final = Route("POST", "/v1/signed-request", "client", SignedRequest)
GOSSIP: Final = Route[Message](
    "POST",
    "/v1/gossip",
    "member",
    typ="splitup-gossip",
    timeout_s=_GOSSIP_TIMEOUT_S,
    max_reply_bytes=limits.SHORT_REPLY_BYTES,
)
EXECUTOR_COMMITMENT: Final = _signed("/v1/executor-commitment", "node", ExecutorCommitment)
TAKEOVERS: Final = _signed("/v1/takeovers", "node", Takeovers)
VALIDATOR_COMMITMENT: Final = _signed("/v1/validator-commitment", "node", ValidatorCommitment)
COMPLETION: Final = _signed("/v1/completion", "node", Completion)
VERIFICATION_RESULT: Final = _signed("/v1/verification-result", "node", VerificationResult)

# ---- a storage gateway's -----------------------------------------------------------------------

MANIFEST: Final = Route[Message](
    "GET", "/v1/models/{model_id}/manifest", "anybody", max_reply_bytes=limits.MAX_MANIFEST_BYTES
)
NETWORK: Final = Route[Message]("GET", "/v1/network", "anybody", reply=NetworkDescription)
UPLOAD_REQUEST: Final = _granting("developer", UploadRequest, "upload-request", UploadAnswer)
MODEL_REQUEST: Final = _granting("node, client", ModelRequest, "model-request")
EXECUTION_REQUEST: Final = _granting("node, client", ExecutionRequest, "execution-request")
LOG_REQUEST: Final = _granting("node, client", LogRequest, "log-request")
VERIFICATION_REQUEST: Final = _granting("node, member", VerificationRequest, "verification-request")

# ---- a node's ----------------------------------------------------------------------------------

PLAN_CERTIFICATE: Final = Route("POST", "/v1/plan-certificate", "member, client", PlanCertificate)
VERIFICATION_ORDER: Final = Route("POST", "/v1/verification-order", "member", VerificationOrder)
DATA: Final = Route[Message](
    "GET",
    "/v1/data",
    "node, client",
    typ="splitup-data",
    timeout_s=2 * tuning.HTTP_CONNECT_S,  # to connect, and for the answer to the handshake
)

# ---- a relay's ---------------------------------------------------------------------------------

RELAY: Final = Route[Message]("GET", RELAY_PATH, "node", typ="splitup-relay")
RELAY_STREAM: Final = Route[Message]("GET", RELAY_PATH + "/streams/{ticket}", "node")
# what a relay passes on by request and reply; their order is part of the relay's protocol
RELAYED_REQUESTS: Final[tuple[Route[Any], ...]] = (PING, PLAN_CERTIFICATE, VERIFICATION_ORDER)

ROUTES: Final[dict[str, tuple[Route[Any], ...]]] = {
    "member": (
        *(PING, STATUS, SNAPSHOT, MESSAGE_CHUNK, PLAN, HOLDERS, EVIDENCE, DUE_NOTICE),
        *(HEARTBEAT, REACH_REQUEST, SIGNED_REQUEST, GOSSIP, EXECUTOR_COMMITMENT, TAKEOVERS),
        *(VALIDATOR_COMMITMENT, COMPLETION, VERIFICATION_RESULT),
    ),
    "gateway": (
        *(PING, NETWORK, MANIFEST, UPLOAD_REQUEST, MODEL_REQUEST, EXECUTION_REQUEST, LOG_REQUEST),
        VERIFICATION_REQUEST,
    ),
    "node": (PING, PLAN_CERTIFICATE, VERIFICATION_ORDER, DATA),
    "relay": (
        *(RELAY, RELAY_STREAM),
        *(
            replace(route, path=f"{RELAY_PATH}/{{node}}{route.path}")
            for route in (*RELAYED_REQUESTS, DATA)
        ),
    ),
}
