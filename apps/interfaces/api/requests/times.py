"""Times in Unix seconds, as answers have them."""

import datetime


def unix_seconds(moment: datetime.datetime | None) -> int | None:
    return int(moment.timestamp()) if moment else None
