"""Times in Unix seconds, as requests and answers have them."""

import datetime
from typing import Annotated

from msgspec import Meta

Moment = Annotated[int, Meta(ge=0, le=253_000_000_000, description="In Unix seconds.")]


def unix_seconds(moment: datetime.datetime | None) -> int | None:
    return int(moment.timestamp()) if moment else None


def time_of(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
