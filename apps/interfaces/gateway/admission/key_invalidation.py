"""LISTEN for changes to keys, their creators' rights and limits, so that a revoked key stops working at once."""

import asyncio
import logging

import psycopg
from django.conf import settings
from psycopg.conninfo import make_conninfo

from apps.core.database.clock import db_now
from apps.core.messages.key_invalidation import CHANNEL, EVERYBODY
from apps.interfaces.gateway.admission.keys import Keys
from apps.interfaces.gateway.database import DATABASE_ERRORS, Database

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0


async def keep_listening(keys: Keys, database: Database) -> None:
    """Forget each key whose change is announced, until cancelled.

    Without a connection, cached keys expire as usual.
    """
    while True:
        try:
            async with await psycopg.AsyncConnection.connect(_conninfo(), autocommit=True) as connection:
                await connection.execute(f"LISTEN {CHANNEL}")
                await database.call(db_now)  # after an outage its pool reconnects later, and keys need it
                keys.forget_all()  # anything changed before this point
                async for announced in connection.notifies():
                    if announced.payload == EVERYBODY:
                        keys.forget_all()
                    else:
                        keys.forget(announced.payload)
        except (psycopg.OperationalError, *DATABASE_ERRORS) as error:
            logger.warning("changes of keys are not announced: %s", error)
        await asyncio.sleep(_AGAIN_SECONDS)


def _conninfo() -> str:
    database = settings.DATABASES["default"]
    named = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD", "dbname": "NAME"}
    given = {name: database.get(key) for name, key in named.items()}
    others = {name: value for name, value in database.get("OPTIONS", {}).items() if name.startswith("ssl")}
    return make_conninfo(**{name: value for name, value in given.items() if value}, **others)
