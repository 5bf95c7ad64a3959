"""Lookup of bearer keys, cached for at most two seconds so that a revoked key stops working within five."""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from django.conf import settings

from apps.accounts.login.api_keys import is_well_formed
from apps.accounts.login.bearer_keys import read_bearer, require_project_of_key, wrong_key
from apps.accounts.login.key_operations import note_key_use
from apps.accounts.members.visibility import Sight, sight_of_inference, sight_of_key
from apps.accounts.models import KeyKind
from apps.accounts.queries import KeyIdentity, find_key
from apps.accounts.roles import Permission
from apps.accounts.shares import get_share_holder
from apps.core.database.clock import db_now
from apps.core.errors import PermissionDenied, Unavailable
from apps.finetuning.usage.quotas import get_quota
from apps.finetuning.usage.rates import limits_of_key
from apps.interfaces.gateway.admission.limits import OwnerLimits
from apps.interfaces.gateway.admission.strangers import Strangers
from apps.interfaces.gateway.database import DATABASE_ERRORS, Database

FRESH_SECONDS = 1.0  # older entries are looked up again in the background
USABLE_SECONDS = 2.0  # older entries are looked up again before the request
# While the database is away, no key can be revoked either. Cached keys then stay usable for this long.
OUTAGE_SECONDS = 30.0
_MAX_LOOKUP_SECONDS = 1.0  # a slower database counts as away
_TRY_AGAIN_SECONDS = 3.0
_MAX_KEYS = 20_000
_AWAY = "API keys cannot be checked at the moment. Try again shortly."


@dataclass(frozen=True)
class InferenceCaller:
    """A key that may ask for inference, with the limits and the cache salt of its organization."""

    key_id: str
    organization_id: str
    share_holder: str  # owner of turns and limits; several organizations that never paid may share one
    cache_salt: str
    limits: tuple[OwnerLimits, ...]  # the organization's, then those of allowances, and the key's
    sight: Sight | None = None  # of private projects


@dataclass(frozen=True)
class _Entry:
    identity: KeyIdentity | None
    caller: InferenceCaller | None
    looked_up_at: float

    def age(self) -> float:
        return time.monotonic() - self.looked_up_at


class Keys:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._secret = secrets.token_bytes(16)  # keys the digests in memory; known only to this process
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._valid: OrderedDict[bytes, None] = OrderedDict()  # keys that were valid when last looked up
        self._strangers = Strangers()
        self._lookups: dict[bytes, asyncio.Task[_Entry]] = {}
        self._away_until = 0.0
        self._forgotten = 0

    def forget(self, organization_id: str) -> None:
        """Look up the organization's keys again before their next request, because one may have been revoked."""
        self._entries = OrderedDict(
            (known, entry)
            for known, entry in self._entries.items()
            if entry.identity is not None and entry.identity.organization_id != organization_id
        )
        self._forgotten += 1

    def forget_all(self) -> None:
        self._entries.clear()
        self._forgotten += 1

    async def identify(self, authorization: str, address_of: Callable[[], str], project: str = "") -> InferenceCaller:
        """Return the caller that the key belongs to.

        `address_of` is called only for a key that was not seen valid before. `project` is the header OpenAI-Project.
        Raises InvalidApiKey, MismatchedProject, PermissionDenied (no scope for inference), RateLimited, Unavailable.
        """
        secret = read_bearer(authorization)
        known = hashlib.blake2b(secret.encode(), digest_size=16, key=self._secret).digest()
        entry = self._entries.get(known)
        if entry is None or entry.age() > FRESH_SECONDS:
            entry = await self._entry(known, secret, address_of)
        if entry.identity is None:
            raise wrong_key(secret)
        require_project_of_key(named=project, own=entry.identity.project_id)
        if entry.caller is None:
            raise PermissionDenied(
                "This API key lacks the scope 'inference', or its creator's role no longer holds it.",
                required_scope=str(Permission.INFERENCE),
            )
        return entry.caller

    async def for_key(self, caller: InferenceCaller, key_id: str) -> InferenceCaller:
        """Return the caller with the id, limits and sight of another key of its organization. Raises Unavailable."""
        try:
            limits = await self._database.call(_limits_of_key, key_id)
            sight = await self._database.call(lambda: sight_of_inference(key_id=key_id))
        except DATABASE_ERRORS as error:
            raise Unavailable(_AWAY) from error
        return replace(caller, key_id=key_id, limits=(caller.limits[0], *limits), sight=sight)

    async def _entry(self, known: bytes, secret: str, address_of: Callable[[], str]) -> _Entry:
        """Return the entry of a key that was not looked up within FRESH_SECONDS."""
        entry = self._entries.get(known)
        if known not in self._valid:
            return await self._entry_of_stranger(known, secret, entry, address_of)
        is_away = time.monotonic() < self._away_until
        if entry is not None and entry.age() < (OUTAGE_SECONDS if is_away else USABLE_SECONDS):
            self._begin_lookup(known, secret)
            return entry
        try:
            async with asyncio.timeout(_MAX_LOOKUP_SECONDS if entry else None):
                return await asyncio.shield(self._begin_lookup(known, secret))
        except (TimeoutError, *DATABASE_ERRORS) as error:
            self._away_until = time.monotonic() + _TRY_AGAIN_SECONDS
            if entry is not None and entry.age() < OUTAGE_SECONDS:
                return entry
            raise Unavailable(_AWAY) from error

    async def _entry_of_stranger(
        self, known: bytes, secret: str, entry: _Entry | None, address_of: Callable[[], str]
    ) -> _Entry:
        if entry is not None and entry.age() < USABLE_SECONDS:
            return entry
        if not is_well_formed(secret):
            raise wrong_key(secret)
        try:
            return await asyncio.shield(self._begin_lookup(known, secret, address_of()))
        except DATABASE_ERRORS as error:
            raise Unavailable(_AWAY) from error

    def _begin_lookup(self, known: bytes, secret: str, stranger: str | None = None) -> "asyncio.Task[_Entry]":
        """Return this key's lookup in progress; start one if there is none.

        `stranger` is the address that sent a key not seen valid before.
        """
        if known not in self._lookups:
            look_up = partial(self._look_up, known, secret)
            task = asyncio.ensure_future(
                look_up()
                if stranger is None
                else self._strangers.look_up(stranger, look_up, lambda entry: entry.identity is not None)
            )
            self._lookups[known] = task
            task.add_done_callback(lambda done: self._finish_lookup(known, done))
        return self._lookups[known]

    def _finish_lookup(self, known: bytes, task: "asyncio.Task[_Entry]") -> None:
        del self._lookups[known]
        if not task.cancelled():
            task.exception()  # retrieved here because no caller awaits a background lookup

    async def _look_up(self, known: bytes, secret: str) -> _Entry:
        started_at, forgotten = time.monotonic(), self._forgotten
        identity, caller = await self._database.call(_find, secret)
        if forgotten != self._forgotten:  # the row may have been read before the change
            identity, caller = await self._database.call(_find, secret)
        self._entries[known] = entry = _Entry(identity, caller, started_at)
        self._entries.move_to_end(known)
        self._valid.pop(known, None)
        if identity is not None:
            self._valid[known] = None
        for kept in (self._entries, self._valid):
            while len(kept) > _MAX_KEYS:
                kept.popitem(last=False)
        return entry


def _find(secret: str) -> tuple[KeyIdentity | None, InferenceCaller | None]:
    identity = find_key(secret=secret)
    if identity is None or Permission.INFERENCE not in identity.scopes:
        return identity, None
    note_key_use(identity=identity, now=db_now())
    share_holder = get_share_holder(organization=identity.organization_id)
    sight = (
        sight_of_inference(key_id=identity.key_id)
        if identity.kind == KeyKind.MEMBER
        else sight_of_key(project_id=identity.project_id, scopes=identity.scopes)
    )
    # Without a salt for the engine's prefix cache, one organization could find out by timing which prompts another has
    # cached.
    salted = f"cache salt {identity.organization_id}".encode()
    caller = InferenceCaller(
        key_id=identity.key_id,
        organization_id=identity.organization_id,
        share_holder=share_holder,
        cache_salt=hmac.new(settings.SIGNING_KEY.encode(), salted, hashlib.sha256).hexdigest(),
        limits=(_limits_of_organization(identity.organization_id, share_holder), *_limits_of_key(identity.key_id)),
        sight=sight,
    )
    return identity, caller


def _limits_of_organization(organization_id: str, share_holder: str) -> OwnerLimits:
    quota = get_quota(organization=organization_id)
    return OwnerLimits(
        owner_id=share_holder,
        owner="Your organization",
        requests_per_minute=quota.requests_per_minute,
        tokens_per_minute=quota.tokens_per_minute,
        concurrent_requests=quota.concurrent_requests,
    )


def _limits_of_key(key_id: str) -> list[OwnerLimits]:
    """Return the limits that the key shares with other keys of its member, label or project, and then its own."""
    own, allowances = limits_of_key(key_id=key_id)
    shared = [OwnerLimits(each.id, each.whose, each.requests_per_minute, each.tokens_per_minute) for each in allowances]
    return [
        *shared,
        OwnerLimits(
            owner_id=key_id,
            owner="This key",
            requests_per_minute=own.requests_per_minute,
            tokens_per_minute=own.tokens_per_minute,
            concurrent_requests=own.concurrent_requests,
        ),
    ]
