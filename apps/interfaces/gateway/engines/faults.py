"""Reports of replicas whose counts cannot be true. They are isolated in the database, so no gateway asks them again."""

import asyncio
import logging

from apps.interfaces.gateway.database import DATABASE_ERRORS, Database
from apps.interfaces.gateway.engines.routes import Routes
from apps.serving.isolation import isolate_replica

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class Faults:
    """Reported faults by replica, kept until the database has them. Use inside one event loop."""

    def __init__(self, database: Database, routes: Routes) -> None:
        self._database = database
        self._routes = routes
        self._waiting: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def accuse(self, replica_id: str, reason: str) -> None:
        """Isolate the replica. Further reports of the same replica add nothing until this one is stored."""
        logger.critical("replica %s is faulty and gets no more requests: %s", replica_id, reason)
        self._waiting.setdefault(replica_id, reason)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._store())

    async def _store(self) -> None:
        """Store every report, however long the database is away, and refresh the routes."""
        while self._waiting:
            replica_id, reason = next(iter(self._waiting.items()))
            try:
                await self._database.call(isolate_replica, replica_id=replica_id, reason=reason)
                del self._waiting[replica_id]
                await self._routes.refresh()
            except DATABASE_ERRORS as error:
                logger.warning("replica %s is not isolated yet: %s", replica_id, error)
                await asyncio.sleep(_RETRY_SECONDS)
