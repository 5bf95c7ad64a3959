"""POST /v1/embeddings, which is always refused.

Each base model here generates text, and vLLM embeds only with embedding models. For a text-generating model it has no
such route and answers 404 without an error object. So a request is authenticated, limited and checked like any other,
and then refused with the reason.
"""

from typing import Any, Literal

import msgspec

from apps.core.errors import DomainError, MissingParameter
from apps.core.http.asgi import ClientGone, Receive, Scope, Send
from apps.core.http.json_bodies import decode_body
from apps.interfaces.gateway.admission.keys import InferenceCaller
from apps.interfaces.gateway.engines.upstreams import CallProgress
from apps.interfaces.gateway.http.bodies import LARGE_BYTES
from apps.interfaces.gateway.http.client import Client
from apps.interfaces.gateway.surfaces.inference import Services

PATH = "/v1/embeddings"
MAX_BYTES = LARGE_BYTES  # enough for usual requests to get their refusal, and decoded in little time


class EmbeddingsUnsupported(DomainError):
    """The model exists but generates text."""

    code = "model_not_supported"


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Any = None


_decoder = msgspec.json.Decoder(EmbeddingBody)


class Embeddings:
    """The embeddings route, as plain ASGI."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, services = Client(scope), self._services
        caller: InferenceCaller | None = None
        progress = CallProgress()
        try:
            caller = await services.keys.identify(client.authorization, client.address, client.project)
            client.limit_headers = lambda: services.rates.headers(caller.limits)
            services.rates.take_request(caller.limits)
            with (
                services.open_requests.one_more(caller.limits),
                services.bodies.holding(caller.share_holder) as reading,
            ):
                await services.rates.wait_turn(caller.limits)
                body = decode_body(await client.read_body(most_bytes=MAX_BYTES, count=reading.count), _decoder)
            for name in ("model", "input"):
                if not getattr(body, name):
                    raise MissingParameter(f"`{name}` is required.", param=name)
            assert body.model is not None
            progress.model_name = body.model
            services.routes.require_known(body.model, caller=caller)
            raise EmbeddingsUnsupported(
                "This model writes text; no engine here makes embeddings of it. Use /v1/chat/completions.",
                param="model",
            )
        except DomainError as error:
            await services.wait_to_refuse(error, caller, client, progress)
            await client.refuse(error)
        except ClientGone:
            return
