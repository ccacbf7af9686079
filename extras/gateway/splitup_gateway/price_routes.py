"""What a request may cost, and how the executions that it was answered by were paid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from aiohttp import web

from splitup.client.leases import LeasePool
from splitup.client.network import Network
from splitup.client.text.encoding import EncoderModel
from splitup.core.errors import ChainUnavailable, Unavailable
from splitup_gateway.access import Access
from splitup_gateway.api_keys import get_principal
from splitup_gateway.apis.answers import RECEIPTS
from splitup_gateway.apis.encoding import (
    EmbeddingRequest,
    EncodingRequest,
    RerankRequest,
    prepare_texts,
)
from splitup_gateway.apis.requests import (
    ChatRequest,
    CompletionRequest,
    Sampling,
    parse_body,
    parse_request,
)
from splitup_gateway.apis.response_requests import ResponseRequest
from splitup_gateway.charges import RECEIPT_S
from splitup_gateway.errors import ApiError
from splitup_gateway.preparing import prepare
from splitup_gateway.quotes import Quotes
from splitup_gateway.served_models import ServedModels


class PriceRoutes:
    """Answers requests for quotes and receipts."""

    def __init__(
        self,
        net: Network,
        access: Access,
        models: ServedModels,
        quotes: Quotes,
        get_pools: Callable[[], Mapping[str, LeasePool]],
    ) -> None:
        """``get_pools`` returns all leases of this server."""
        self._net = net
        self._access = access
        self._models = models
        self._quotes = quotes
        self._get_pools = get_pools

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_post("/v1/quote", self._quote)
        app.router.add_get(f"{RECEIPTS}/{{execution}}", self._get_receipt)

    async def _quote(self, request: web.Request) -> web.Response:
        """Answer what a request of any kind may cost."""
        key = await self._access.let_in(request)
        body = parse_body(await self._access.read_body(request, key))
        fields = body if isinstance(body, dict) else {}
        named = self._models.get(str(fields.get("model")))
        if isinstance(named, EncoderModel):
            is_rank = "documents" in fields
            which: type[EncodingRequest] = RerankRequest if is_rank else EmbeddingRequest
            wanted = parse_request(which, body)
            encoder = (await self._models.find(wanted.model, key)).get_encoder()
            inputs = await prepare_texts(encoder, wanted, get_principal(key))
            tokens, most_tokens, steps = inputs.count_tokens(), 0, inputs.steps
            most = encoder.manifest.cost_micro_usdc(steps)
        else:
            kind: type[Sampling] = ChatRequest if "messages" in fields else CompletionRequest
            asked = parse_request(ResponseRequest if "input" in fields else kind, body)
            served = await self._models.find(asked.model, key)
            model = served.get_text_model()
            prepared = await prepare(model, asked, get_principal(key))
            tokens = sum(map(len, {text.prompt for text in prepared.texts}))
            most_tokens = sum(text.max_tokens for text in prepared.texts)
            steps, most = prepared.count_steps(model), served.compute_price(prepared)
        name = str(fields["model"])
        quote, until = self._quotes.make(name, most)
        answer = {
            "id": quote,
            "object": "quote",
            "model": name,
            "prompt_tokens": tokens,
            "max_tokens": most_tokens,
            "max_steps": steps,
            "max_cost_micro_usdc": most,
            "expires_at": until,
        }
        return web.json_response(answer)

    async def _get_receipt(self, request: web.Request) -> web.Response:
        """Answer how an execution of this server was closed; "open" while it is not."""
        principal = get_principal(await self._access.let_in(request))
        execution = request.match_info["execution"]
        if not any(pool.is_of(execution, principal) for pool in self._get_pools().values()):
            raise ApiError(
                "this server ran no such execution for you lately; ask the chain: "
                "splitup receipt ID",
                status=404,
                code="receipt_not_found",
            )
        try:
            receipt = await self._net.receipt(execution, timeout_s=RECEIPT_S)
        except ChainUnavailable:
            raise
        except Unavailable:
            return web.json_response({"execution_id": execution, "status": "open"})
        return web.json_response(asdict(receipt))
