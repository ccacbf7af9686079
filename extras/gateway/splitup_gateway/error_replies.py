"""Errors as answers, in the form of the API that was asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from splitup.core.errors import SplitUpError
from splitup_gateway.apis import message_answers, ollama
from splitup_gateway.apis.messages import MESSAGES
from splitup_gateway.errors import ApiError, translate
from splitup_gateway.streaming.stream_routes import limit_write

_log = logging.getLogger("splitup.serve")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a handler raises."""
    try:
        response = await handler(request)
        if not response.prepared:  # it is sent here, so that the time for it is limited
            async with limit_write():
                await response.prepare(request)
                await response.write_eof()
        return response
    except SplitUpError as error:
        return _reply_error(request, translate(error))
    except web.HTTPException as error:
        reason = f"{request.method} {request.path:.200}: {error.reason}"
        return _reply_error(request, ApiError(reason, status=error.status))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        message = "internal error; the server's log has the details"
        return _reply_error(request, ApiError(message, status=500, kind="server_error"))


def _reply_error(request: web.Request, error: ApiError) -> web.Response:
    if request.path.startswith("/api/"):
        body = ollama.describe_error(error)
    elif request.path.startswith(MESSAGES):
        body = message_answers.describe_error(error)
    else:
        body = error.describe()
    return web.json_response(body, status=error.status, headers=error.headers)
