"""gRPC as workers and their callers use it: addresses, TLS, limits, errors, telemetry.

Handlers take and give messages of ``speculation.proto``. Errors become statuses, with the sentence:

    InvalidInput     INVALID_ARGUMENT        the request cannot be used
    Refused          FAILED_PRECONDITION     the caller is out of step with its session
    Throttled        RESOURCE_EXHAUSTED      all sessions are in use
    others           UNAVAILABLE             the model or its process failed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from splitup.core.errors import ConfigurationError, InvalidInput, Refused, SplitUpError, Throttled
from splitup.core.places import Places, hold_place
from splitup.core.source_tree import compose_package_install
from splitup.net.admission import get_group
from splitup.net.endpoints import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

try:
    import grpc
    from google.protobuf.message import DecodeError, Message

    from splitup_speculation import speculation_pb2 as pb
except ImportError:
    raise ConfigurationError(
        f"draft and target workers need gRPC: {compose_package_install('workers')}"
    ) from None

MAX_MESSAGE_BYTES: Final = 1 << 20
_MAX_CALLS: Final = 256  # of one worker at once, which addresses share
_MAX_STREAMS: Final = 128  # calls of one connection
_READ_S: Final = 10.0  # for TLS, and for a call's message after its head
_IDLE_S: Final = 300.0  # that a connection stays without a call
_PACKAGE: Final = "splitup.speculation.v1"
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
_SERVER_OPTIONS: Final = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", _MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", int(_READ_S * 1e3)),
    ("grpc.max_connection_idle_ms", int(_IDLE_S * 1e3)),
]

Handler = Callable[[Any], Awaitable[Any]]
_STATUS: Final[Mapping[type[SplitUpError], grpc.StatusCode]] = {  # of a worker's errors
    Throttled: grpc.StatusCode.RESOURCE_EXHAUSTED,
    InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    Refused: grpc.StatusCode.FAILED_PRECONDITION,
}
_log = logging.getLogger("splitup.workers")
_model_ns: ContextVar[list[int]] = ContextVar("model_ns")
_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
_caller: ContextVar[str] = ContextVar("caller", default="")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. A worker shows ``cert``, and lets in only clients whose ``ca`` signed theirs.

    A client trusts workers whose ``ca`` signed theirs, by default the system's, and shows ``cert``
    if it has one.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigurationError("TLS needs both files: give --tls-cert and --tls-key")

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the files; raise ConfigurationError."""
        try:
            ca, key, cert = (
                None if path is None else path.read_bytes()
                for path in (self.ca, self.key, self.cert)
            )
        except OSError as error:
            raise ConfigurationError(f"a file for TLS cannot be read: {error}") from None
        return ca, key, cert


def check_host(host: str, tls: Tls, *, is_paying: bool = False) -> None:
    """Raise InvalidInput for a worker that others could reach without TLS.

    ``is_paying``: its account pays for what callers ask, so they have to show certificates, too.
    """
    if is_loopback(host):
        return
    if tls.cert is None:
        raise InvalidInput(
            f"--host {host} is not a loopback address; give --tls-cert and --tls-key"
        )
    if is_paying and tls.ca is None:
        raise InvalidInput(
            f"--host {host} is not a loopback address, and whoever reaches the worker spends this "
            "account's money; give --tls-ca, whose clients are let in"
        )


def get_deadline_s() -> float | None:
    """Return when the caller's patience ends, in ``time.monotonic`` seconds; None for never."""
    return _deadline.get()


def get_caller() -> str:
    """Return the address of who is answered, as far as addresses are told apart."""
    return _caller.get()


@contextmanager
def time_model() -> Iterator[None]:
    """Count the time inside as the model's, in the telemetry of the call that is answered."""
    started_ns = time.monotonic_ns()
    try:
        yield
    finally:
        _model_ns.get()[0] += time.monotonic_ns() - started_ns


async def start_server(
    service: str, handlers: Mapping[str, Handler], host: str, port: int, tls: Tls
) -> tuple[grpc.aio.Server, str]:
    """Serve handlers by the names of their methods; return the server and its address.

    Raises InvalidInput for an address that cannot be listened on, and bad files.
    """
    methods = pb.DESCRIPTOR.services_by_name[service].methods_by_name
    places: Places[asyncio.Task[Any]] = Places(_MAX_CALLS)
    made = {  # as a stream, whose message may be waited for; callers see no difference
        name: grpc.stream_unary_rpc_method_handler(
            _answer(handler, _get_class(methods[name].input_type.name), places)
        )
        for name, handler in handlers.items()
    }
    server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=4 * _MAX_CALLS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(f"{_PACKAGE}.{service}", made),)
    )
    shown = f"[{host}]" if ":" in host else host
    ca, key, cert = tls.read()
    try:
        if cert is None:
            bound = server.add_insecure_port(f"{shown}:{port}")
        else:
            credentials = grpc.ssl_server_credentials([(key, cert)], ca, ca is not None)
            bound = server.add_secure_port(f"{shown}:{port}", credentials)
    except (RuntimeError, ValueError) as error:
        raise InvalidInput(f"{shown}:{port} cannot be listened on: {error}") from None
    await server.start()
    return server, f"{shown}:{bound}"


def _get_class(name: str) -> type[Message]:
    found: type[Message] = getattr(pb, name)
    return found


def _answer(
    handler: Handler, kind: type[Message], places: Places[asyncio.Task[Any]]
) -> Callable[[AsyncIterator[bytes], Any], Awaitable[bytes]]:
    """Return what answers bytes: gRPC itself would say of a bad request only that it is one."""

    async def answer(messages: AsyncIterator[bytes], context: Any) -> bytes:
        started_ns, code, message = time.monotonic_ns(), None, ""
        spent = [0]
        _model_ns.set(spent)
        left_s = context.time_remaining()
        _deadline.set(None if left_s is None else time.monotonic() + left_s)
        try:
            with _hold_place(context.peer(), places):
                request = kind.FromString(await _read(messages))
                response = await handler(request)
        except DecodeError:
            code = grpc.StatusCode.INVALID_ARGUMENT
            message = f"this is no {kind.__name__}, or its tree is nested too deep"
        except SplitUpError as error:
            kinds = (status for kind, status in _STATUS.items() if isinstance(error, kind))
            code, message = next(kinds, grpc.StatusCode.UNAVAILABLE), str(error)
            if code is grpc.StatusCode.UNAVAILABLE:
                _log.warning("%s", error)
        except Exception:
            code, message = grpc.StatusCode.INTERNAL, "the worker failed; its log says why"
            _log.exception("a call failed")
        if code is not None:
            await context.abort(code, message)
        if "telemetry" in response.DESCRIPTOR.fields_by_name:
            response.telemetry.span_id = request.telemetry.span_id
            response.telemetry.wall_time_ns = time.monotonic_ns() - started_ns
            response.telemetry.model_time_ns = spent[0]
        answered: bytes = response.SerializeToString()
        return answered

    return answer


async def _read(messages: AsyncIterator[bytes]) -> bytes:
    """Return a call's message; raise InvalidInput for one that does not come."""
    try:
        async with asyncio.timeout(_READ_S):
            return await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidInput(f"the call's message did not arrive within {_READ_S:g} s") from None


@contextmanager
def _hold_place(peer: str, places: Places[asyncio.Task[Any]]) -> Iterator[None]:
    """Hold one of a worker's places for calls; raise Throttled, or cancel another's call.

    ``peer`` is gRPC's "ipv4:1.2.3.4:5", or "ipv6:%5B::1%5D:5".
    """
    host = peer.partition(":")[2].rpartition(":")[0]
    group = get_group(host.removeprefix("%5B").removesuffix("%5D"))
    _caller.set(group)
    refusal = Throttled(f"all {_MAX_CALLS} calls that this worker answers at once are under way")
    with hold_place(places, group, refusal):
        yield


def open_channel(address: str, tls: Tls) -> grpc.aio.Channel:
    """Return a connection to a worker, which is made when it is used.

    Raises InvalidInput for an address beyond the loopback without TLS.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidInput(f"'{address}' is no address of a worker; give HOST:PORT")
    ca, key, cert = tls.read()
    if ca is None and cert is None:
        if not is_loopback(host.strip("[]")):
            raise InvalidInput(
                f"the worker {address} is not on this machine; give --tls-ca, which signed its "
                "certificate"
            )
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


async def call(
    channel: grpc.aio.Channel, service: str, method: str, request: Message, *, timeout_s: float
) -> Any:
    """Return a worker's answer.

    Raises InvalidInput, Refused (out of step) and Throttled as the worker has, SplitUpError when
    it is not there, late or faulty.
    """
    kind = pb.DESCRIPTOR.services_by_name[service].methods_by_name[method].output_type.name
    ask = channel.unary_unary(
        f"/{_PACKAGE}.{service}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=_get_class(kind).FromString,
    )
    try:
        return await ask(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        said = error.details() or "no reason given"
        if error.code() is _STATUS[InvalidInput]:
            raise InvalidInput(f"the worker refused a request: {said}") from None
        if error.code() is _STATUS[Refused]:
            raise Refused(said, status=409) from None
        if error.code() is _STATUS[Throttled]:
            raise Throttled(said) from None
        raise SplitUpError(f"{method} failed ({error.code().name}): {said}") from None
