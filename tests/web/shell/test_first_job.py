"""The first job: one click on the overview trains the sample at the price that the button shows."""

import re
from typing import Any

import msgspec
import pytest

from apps.accounts.models import Organization
from apps.billing.books.adjustments import request_adjustment
from apps.billing.books.credit_requests import decline_request, request_credit
from apps.billing.queries import get_balance
from apps.core.database.clock import db_now
from apps.core.money import NANO_PER_CENT, NANO_PER_USD
from apps.datasets.models import DatasetVersion
from apps.finetuning.models import FineTuningJob, ThroughputProbe
from apps.finetuning.pools.operations import record_probe
from tests.factories.finetuning import TrainingSetup, probe_report
from tests.support.pages import text


@pytest.fixture
def page(floor: TrainingSetup, bob, client_for) -> Any:
    return client_for(bob)


def form_of(body: str) -> dict[str, str]:
    form = re.search(r'<form method="post" action="/first-job">.*?</form>', body, re.DOTALL)
    assert form, body
    return dict(re.findall(r'name="(once|model|cap_nano)"\s+value="([^"]*)"', form[0]))


def leave(organization: Organization, nano: int) -> None:
    taken = get_balance(organization=organization).available_nano - nano
    request_adjustment(organization=organization, amount_nano=-taken, reason="x", by="user_olga", now=db_now())


def first_step(body: str) -> str:
    return re.search(r'<ol class="start".*?<li.*?</li>', body, re.DOTALL)[0]


@pytest.mark.slow
def test_one_click_stores_the_sample_and_starts_its_job_at_the_shown_cap(page, organization):
    body = text(page.get("/"))
    form = form_of(body)
    assert "Train the sample, at most $" in body

    answers = [page.post("/first-job", form) for _ in range(2)]  # a double click

    job = FineTuningJob.objects.get()
    assert [answer.headers["Location"] for answer in answers] == [f"/jobs/{job.pk}"] * 2
    version = DatasetVersion.objects.get()
    assert (job.training_file, job.status, job.base_model.name) == (version, "validating_files", form["model"])
    assert job.requested["shown_max_nano"] == int(form["cap_nano"])
    assert version.filename == "banking-questions.jsonl"
    assert "Follow it live" in text(page.get("/"))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/jobs/new", "/datasets"])
def test_pages_without_datasets_offer_it_too(path, page, organization, vera, client_for):
    body = text(page.get(path))
    answer = page.post("/first-job", form_of(body))
    after = text(page.get(path))

    assert answer.headers["Location"] == f"/jobs/{FineTuningJob.objects.get().pk}"
    assert "and at most $" in body and "Your balance is $" in body
    assert "/first-job" not in after and "/first-job" not in text(client_for(vera).get("/datasets"))


@pytest.mark.slow
def test_a_price_that_rose_since_the_button_was_shown_starts_nothing_and_is_shown(page):
    form = form_of(text(page.get("/")))
    shown_nano = int(form["cap_nano"])

    answer = page.post("/first-job", form | {"cap_nano": str(shown_nano - 1)}, follow=True)

    assert "The maximum is now " in text(answer) and form_of(text(answer))["cap_nano"] == str(shown_nano)
    assert not FineTuningJob.objects.exists() and not DatasetVersion.objects.exists()


def test_the_button_appears_when_a_worker_has_measured_the_model(floor: TrainingSetup, bob, client_for):
    ThroughputProbe.objects.all().delete()
    page = client_for(bob)
    assert "every 15s" in text(page.get("/"))

    for method in ("lora", "qlora"):
        report = msgspec.to_builtins(probe_report(floor.base_model, method))
        record_probe(worker=floor.worker, base_model=floor.base_model, method=method, report=report)
    part = text(page.get("/", headers={"HX-Request": "true", "HX-Target": "div#overview"}))

    assert "Train the sample, at most $" in part and "every 30s" in part and "<body" not in part


def test_without_credit_the_button_is_replaced_by_the_way_to_get_some(page, organization, settings):
    leave(organization, 0)

    body = text(page.get("/"))
    refused = page.post("/first-job", {"once": "x", "cap_nano": "10000000", "model": "anneal-demo"})

    assert "Train the sample" not in body and 'href="/credit"' in body
    assert refused.headers["Location"] == "/credit"
    assert not FineTuningJob.objects.exists() and not DatasetVersion.objects.exists()


@pytest.mark.slow
def test_credit_that_does_not_cover_the_first_job_asks_for_the_rest(page, organization):
    cap_nano = int(form_of(text(page.get("/")))["cap_nano"])
    leave(organization, cap_nano - NANO_PER_CENT)

    body = text(page.get("/"))

    assert 'class="done"' not in first_step(body) and 'href="/credit"' in first_step(body)
    assert "You need $0.01 more for a first job. The page Credit" in first_step(body)
    assert "It can start when your credit covers that." in body and "Train the sample" not in body


@pytest.mark.slow
def test_a_request_for_the_rest_is_shown_with_its_answer(page, organization, bob):
    leave(organization, NANO_PER_CENT // 100)
    request = request_credit(organization=organization, amount_nano=5 * NANO_PER_USD, note="", by=bob)

    asked = first_step(text(page.get("/")))
    decline_request(request_id=request.pk, reason="Ask your lead.", by="user_olga", now=db_now())
    declined = first_step(text(page.get("/")))

    assert "You asked for $5.00." in asked and 'href="/credit"' not in asked
    assert "Your request was declined: Ask your lead." in declined and 'href="/credit"' in declined


@pytest.mark.slow
def test_a_job_that_holds_the_whole_balance_does_not_ask_for_credit_again(page, organization):
    page.post("/first-job", form_of(text(page.get("/"))))
    leave(organization, 0)

    step = first_step(text(page.get("/")))

    assert 'class="done"' in step and 'href="/credit"' not in step


@pytest.mark.parametrize("form", [{}, {"once": "x"}, {"once": "x", "cap_nano": "-1"}, {"once": "x", "cap_nano": "1e9"}])
def test_a_form_without_its_price_starts_nothing(page, form):
    assert page.post("/first-job", form).headers["Location"] == "/"
    assert not FineTuningJob.objects.exists()


@pytest.mark.slow
def test_a_model_that_is_gone_is_said_and_nothing_is_kept(page):
    form = form_of(text(page.get("/"))) | {"model": "gone"}

    shown = page.post("/first-job", form, follow=True)

    assert "gone" in text(shown)
    assert not FineTuningJob.objects.exists() and not DatasetVersion.objects.exists()


def test_a_viewer_has_no_button(floor, vera, client_for):
    client = client_for(vera)

    assert "/first-job" not in text(client.get("/"))
    assert client.post("/first-job", {"once": "x", "cap_nano": str(NANO_PER_USD)}).status_code == 403
