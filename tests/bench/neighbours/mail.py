"""Mail: from an invitation to its arrival at the mail server, while another tenant has all sent that it can."""

import asyncio
import itertools

import aiohttp

from tests.bench.neighbours.stage import Platform
from tests.bench.neighbours.traffic import FORM, STRANGER, BadAnswer, Entrance, as_person, send

_SECONDS = 30.0


def entrances(platform: Platform) -> dict[str, Entrance]:
    attacker, numbers = platform.make_tenant(), itertools.count()

    async def invite(client: aiohttp.ClientSession) -> None:
        name = f"guest{next(numbers)}"
        arrived = platform.mail_server.expect(name)
        form = f"email={name}%40example.com&role=viewer".encode()
        status, _ = await send(client, "POST", "/members/invite", as_person(platform.working) | FORM, form)
        if status != 302:
            raise BadAnswer(f"an invitation was answered with {status}")
        async with asyncio.timeout(_SECONDS):
            await arrived

    async def flood(client: aiohttp.ClientSession, number: int) -> str:
        address = f"email=flood{next(numbers)}%40example.com"
        path, rest, headers = [
            ("/members/invite", "&role=viewer", as_person(attacker)),
            ("/accounts/signup/", "&password1=correct-horse-battery", STRANGER),
            ("/accounts/password/reset/", "", STRANGER),
        ][number % 3]
        return f"{path} {(await send(client, 'POST', path, headers | FORM, (address + rest).encode()))[0]}"

    forget = platform.forget_invitations
    return {"mail beside floods of it": Entrance(invite, flood, attacker, pause_seconds=0.3, forget=forget)}
