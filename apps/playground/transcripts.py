"""A conversation of the playground and its settings, as the page sends them and as they are stored."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_COLUMNS = 4
_Text = Annotated[str, Meta(max_length=64_000)]


class PlaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models side by side and what each is asked with. None: the gateway's own choice."""

    models: Annotated[list[Annotated[str, Meta(max_length=240)]], Meta(max_length=MAX_COLUMNS)] = []
    system: _Text = ""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    response_format: Literal["", "json_object", "json_schema"] = ""
    schema: _Text = ""


class PlayTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of one column; an answer may have the member's vote."""

    role: Literal["user", "assistant"]
    content: _Text
    vote: Literal["", "up", "down"] = ""


class Transcript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole conversation. `columns` has the turns of each of the settings' models."""

    settings: PlaySettings = PlaySettings()
    columns: Annotated[list[Annotated[list[PlayTurn], Meta(max_length=200)]], Meta(max_length=MAX_COLUMNS)] = []

    @property
    def title(self) -> str:
        """The first message, cut to 80 characters."""
        return next((" ".join(turns[0].content.split())[:80] for turns in self.columns if turns), "")
