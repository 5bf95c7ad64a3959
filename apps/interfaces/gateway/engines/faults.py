"""Replicas whose counts cannot be true: told to the database, so that no gateway asks them again."""

import asyncio
import logging

from apps.interfaces.gateway.database import DATABASE_ERRORS, Database
from apps.interfaces.gateway.engines.routes import Routes
from apps.serving.isolation import isolate_replica

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class Faults:
    """Accusations by replica, until the database has them. Use inside one event loop."""

    def __init__(self, database: Database, routes: Routes) -> None:
        self._database = database
        self._routes = routes
        self._waiting: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def accuse(self, replica_id: str, reason: str) -> None:
        """Have the replica isolated; another accusation of the same replica meanwhile adds nothing."""
        logger.critical("replica %s is faulty and gets no more requests: %s", replica_id, reason)
        self._waiting.setdefault(replica_id, reason)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        """Tell all that wait, however long the database is away, and read the routes again."""
        while self._waiting:
            replica_id, reason = next(iter(self._waiting.items()))
            try:
                await self._database.call(isolate_replica, replica_id=replica_id, reason=reason)
                del self._waiting[replica_id]
                await self._routes.refresh()
            except DATABASE_ERRORS as error:
                logger.warning("replica %s is not isolated yet: %s", replica_id, error)
                await asyncio.sleep(_RETRY_SECONDS)
