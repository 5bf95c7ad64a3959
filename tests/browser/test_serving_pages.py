"""Aliases, warmth, replicas and the playground's new parts in a real browser, in both themes and two widths."""

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import Organization, User
from apps.adapters.models import AdapterVersion
from apps.catalog.operations import set_price
from apps.core.clock import db_now
from apps.finetuning import leases
from apps.finetuning.models import Checkpoint
from apps.serving.aliases import point_alias
from apps.serving.models import LoadedAdapter, MeteringCheck, Replica
from apps.serving.operations import deploy
from tests.api.gateway.process import USD, make_replica
from tests.browser.conftest import THEMES, overflow
from tests.factories.finetuning import Floor
from tests.unit.finetuning.conftest import Attempt

WIDTHS = (1440, 390)
Open = Callable[..., Page]


@pytest.fixture
def version(transactional_db: None, organization: Organization) -> AdapterVersion:
    """A warm version with an alias, on a replica that says how it is doing."""
    floor = Floor(organization)
    job = floor.job(suffix="triage")
    attempt = Attempt(leases.claim(worker=floor.worker, base_models=None))
    attempt.start()
    attempt.succeed(floor.base_model)
    job.refresh_from_db()
    version = job.adapter_version
    deploy(version=version, by="system")
    replica = make_replica(floor.base_model, "unix:///nowhere")
    load = {"memory_bytes": 3 * 2**30, "tokens_per_second": 41.5, "running": 3, "waiting": 1, "cached_adapters": 2}
    Replica.objects.filter(pk=replica.pk).update(load=load)
    LoadedAdapter.objects.create(organization=organization, replica=replica, adapter_version=version, state="loaded")
    counts = {"counted_input_tokens": 5000, "counted_output_tokens": 40, "least_input_tokens": 4000}
    counts |= {"most_input_tokens": 4250, "least_output_tokens": 40, "most_output_tokens": 40, "request_count": 7}
    for day, is_within in (("2026-11-03", False), ("2026-11-02", True)):
        MeteringCheck.objects.create(
            replica=replica, day=day, difference_share=0.15, is_within=is_within, checked_at=db_now(), **counts
        )
    _make_checkpoint(floor)
    point_alias(version=version, name="production", by="system", now=db_now())
    name = floor.base_model.name
    set_price(sku=f"warm:{name}", unit="warm_ms", price_nano=USD // 20, per=3_600_000, by="system", now=db_now())
    return version


def _make_checkpoint(floor: Floor) -> None:
    """Another job, which still runs, with a checkpoint."""
    floor.job(suffix="second")
    attempt = Attempt(leases.claim(worker=floor.worker, base_models=None))
    attempt.start()
    attempt.checkpoint(4, 8.0)


@pytest.mark.parametrize("theme", THEMES)
def test_pages_are_accessible_and_reflow(
    open_page: Open,
    violations: Callable[[Page], list[str]],
    version: AdapterVersion,
    alice: User,
    olga: User,
    theme: str,
) -> None:
    replica = Replica.objects.get()
    for user, path in (
        (alice, f"/adapters/{version.pk}"),
        (alice, f"/playground?model={version.model_name}"),
        (alice, f"/jobs/{Checkpoint.objects.get(deleted_at=None).job_id}"),
        (olga, "/staff/replicas"),
        (olga, f"/staff/replicas/{replica.pk}"),
    ):
        page = open_page(path, user=user, theme=theme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert violations(page) == [], f"{path} at {width} px"
            assert overflow(page) == 0, f"{path} at {width} px"


def test_an_answer_is_kept_and_the_prompt_shown_as_the_model_reads_it(
    open_page: Open, version: AdapterVersion, alice: User
) -> None:
    page = open_page(f"/playground?model={version.model_name}", user=alice)
    chunks = [{"choices": [{"delta": {"content": "lost_or_stolen_card"}, "finish_reason": "stop"}]}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))

    page.get_by_label("Message").first.fill("My card is lost")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Save as evaluation row").last.click()
    expect(page.get_by_role("link", name="Saved to Playground rows")).to_be_visible()
    page.get_by_role("button", name="Raw prompt").click()
    expect(page.locator("#raw-prompt pre").first).to_contain_text("My card is lost")
    page.get_by_role("dialog").get_by_role("button", name="Close").first.click()
    page.get_by_role("button", name="Copy as").click()
    page.get_by_role("tab", name="JavaScript").click()
    expect(page.locator("#copy-as-javascript-code")).to_contain_text("new OpenAI")
