"""The answer to a chat with `store: true`, in the form in which it is stored."""

import msgspec

from apps.batches.completions.records import MAX_COMPLETION_BYTES, CompletionRecord
from apps.core.errors import DomainError, Status
from apps.interfaces.gateway.admission.keys import InferenceCaller
from apps.interfaces.gateway.engines.meter import Meter
from apps.interfaces.gateway.requests.stored import KeptRequest
from apps.interfaces.gateway.surfaces.answers import Assembler, Renderer

_encoder = msgspec.json.Encoder()


class CompletionTooLarge(DomainError):
    """The answer is complete and charged, but too large to store."""

    code = "completion_too_large"
    status = Status.UNPROCESSABLE


class Keeper:
    """Stores one answer. `assembler` gets its chunks, streamed or not."""

    def __init__(self, request: KeptRequest, renderer: Renderer, caller: InferenceCaller, request_id: str) -> None:
        self.assembler = Assembler()
        self._request, self._renderer, self._caller, self._request_id = request, renderer, caller, request_id

    def record(self, meter: Meter) -> CompletionRecord:
        """Return the completion, without log-probabilities. Raises CompletionTooLarge."""
        choices = [part.chat() | {"logprobs": None} for part in self.assembler.parts()]
        record = CompletionRecord(
            id=self._renderer.id,
            organization_id=self._caller.organization_id,
            key_id=self._caller.key_id,
            request_id=self._request_id,
            model_name=self._renderer.model_name,
            created=self._renderer.created,
            metadata=self._request.metadata,
            request=msgspec.Raw(self._request.content),
            answer=msgspec.Raw(_encoder.encode({"choices": choices, "usage": meter.usage()})),
        )
        if record.bytes > MAX_COMPLETION_BYTES:
            most = f"{MAX_COMPLETION_BYTES // 1024**2} MiB"
            text = (
                f"The answer is charged but not stored, because it and its request exceed {most}. Send `store: false`."
            )
            raise CompletionTooLarge(text, param="store")
        return record
