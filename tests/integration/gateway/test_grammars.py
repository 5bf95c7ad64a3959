"""Schemas are compiled beside the gateway: what is wrong is told with its place, and what costs too much ends there."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from apps.core.errors import InvalidValue
from apps.interfaces.gateway.requests.grammars import PAUSE_FACTOR, CheckedSchema, Grammars, SchemaTooCostly
from apps.interfaces.gateway.requests.schema_bounds import require_bounded
from tests.support.waiting import SkippingLoop

PARAM = "response_format.json_schema.schema"
# Within the static bounds; its classes of characters take the compiler about 0.5 s.
COSTLY = {"anyOf": [{"pattern": f"[\\p{{L}}{number}]"} for number in range(570)]}


def compiled(
    check: Callable[[Grammars], Awaitable[None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    async def run() -> None:
        grammars = Grammars()
        try:
            await check(grammars)
        finally:
            await grammars.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


async def refusal_of(grammars: Grammars, schema: dict, tenant: str = "org_1") -> InvalidValue | None:
    try:
        await grammars.require(tenant, [CheckedSchema(PARAM, schema)])
    except InvalidValue as refusal:
        return refusal
    return None


def test_a_schema_that_cannot_be_compiled_is_refused_with_its_place_and_the_fix():
    wrong = {
        "properties.a": ({"properties": {"a": {"type": "banana"}}}, "use string, number"),
        "items.anyOf.1": (
            {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(a"}]}},
            "unclosed group",
        ),
        "$defs.x.properties.y": (
            {"$defs": {"x": {"properties": {"y": {"not": {}}}}}, "type": "array", "items": {"$ref": "#/$defs/x"}},
            "`not` cannot be enforced",
        ),
        "": ({"$ref": "http://169.254.169.254/"}, "only point into this schema"),
        "properties.b": ({"properties": {"b": {"$ref": "#/$defs/none"}}}, "`#/$defs/none`"),
    }

    async def check(grammars: Grammars) -> None:
        for place, (schema, reason) in wrong.items():
            refusal = await refusal_of(grammars, {"type": "object"} | schema)
            assert refusal is not None, schema
            assert (refusal.param, reason in refusal.message) == (PARAM, True), refusal.message
            assert (f"at `{place}`" in refusal.message) if place else ("at `" not in refusal.message), refusal.message

    compiled(check)


def test_usual_schemas_compile_and_those_that_refer_to_themselves_do_too():
    doubled = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)} | {"d30": {"type": "string"}}

    async def check(grammars: Grammars) -> None:
        for schema in (
            {},
            {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "multipleOf": 5}}},
            {"type": "object", "properties": {"inner": {"type": "array", "items": {"$ref": "#"}}}},
            {"$defs": doubled, "$ref": "#/$defs/d0"},
            {"oneOf": [{"type": "string"}, {"type": "object"}], "x-guidance": {"coerce_one_of": True}},
        ):
            assert await refusal_of(grammars, schema) is None, schema

    compiled(check)


@pytest.mark.slow
def test_a_schema_that_takes_too_long_is_refused_and_the_next_one_compiles(monkeypatch):
    async def check(grammars: Grammars) -> None:
        require_bounded(COSTLY, PARAM)
        assert isinstance(await refusal_of(grammars, COSTLY, "hostile"), SchemaTooCostly)
        assert grammars._child is None  # its own timer ended it
        assert await refusal_of(grammars, {"title": "cheap"}) is None
        monkeypatch.setattr(grammars, "_require_child", None)  # both verdicts are remembered
        assert isinstance(await refusal_of(grammars, COSTLY), SchemaTooCostly)
        assert await refusal_of(grammars, {"title": "cheap"}) is None

    compiled(check)


def test_the_start_of_the_compiler_may_take_long(tmp_path: Path, monkeypatch):
    """An hour, here, of which it waits for a file. A schema costs its organization only the time of the check."""
    late, awaited = tmp_path / "python", tmp_path / "awaited"
    late.write_text(f'#!/bin/sh\nuntil [ -e {awaited} ]; do sleep 0.01; done\nexec {sys.executable} "$@"\n')
    late.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(late))
    loop = SkippingLoop()

    async def check(grammars: Grammars) -> None:
        asked = asyncio.create_task(refusal_of(grammars, {}))
        await asyncio.sleep(0.1)
        loop.skipped = 3600.0
        await asyncio.sleep(0.01)
        awaited.touch()
        assert await asked is None

    compiled(check, lambda: loop)


def test_a_tenants_costly_schemas_pause_for_longer_than_they_took(monkeypatch):
    pauses: list[float] = []

    async def check(grammars: Grammars) -> None:
        async def costly(raw: bytes) -> tuple[str, str, float]:
            return "", "", 0.1

        async def passes(seconds: float) -> None:
            pauses.append(seconds)
            grammars._pauses_until.clear()

        monkeypatch.setattr(grammars, "_exchange", costly)
        monkeypatch.setattr("apps.interfaces.gateway.requests.grammars.asyncio.sleep", passes)
        clock = SimpleNamespace(monotonic=lambda: 100.0)  # stands still, however busy the machine is
        monkeypatch.setattr("apps.interfaces.gateway.requests.grammars.time", clock)
        for tenant, title in (("hostile", "a"), ("other", "b"), ("hostile", "a"), ("hostile", "c")):
            assert await refusal_of(grammars, {"title": title}, tenant) is None

    compiled(check)
    assert pauses == [pytest.approx(0.1 * PAUSE_FACTOR)]  # neither another tenant's nor one that was compiled before


def test_one_tenants_schemas_wait_for_their_turn_behind_anothers(monkeypatch):
    """The hostile tenant's come first and in numbers; the other's is among the first, not the last."""
    order: list[str] = []

    async def check(grammars: Grammars) -> None:
        async def slowly(raw: bytes) -> tuple[str, str, float]:
            await asyncio.sleep(0)
            order.append(raw.decode())
            return "", "", 0.0

        monkeypatch.setattr(grammars, "_exchange", slowly)
        asked = [refusal_of(grammars, {"title": str(n)}, tenant="hostile") for n in range(20)]
        tasks = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(refusal_of(grammars, {"title": "other"}, tenant="other")))
        await asyncio.gather(*tasks)

    compiled(check)
    assert any("other" in raw for raw in order[:5]), order


def test_a_customer_who_leaves_does_not_end_the_compiler():
    async def check(grammars: Grammars) -> None:
        await refusal_of(grammars, {})
        child = grammars._child
        left = asyncio.create_task(refusal_of(grammars, {"title": "left"}))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert await refusal_of(grammars, {"title": "next"}) is None
        assert grammars._child is child and child is not None and child.returncode is None

    compiled(check)
