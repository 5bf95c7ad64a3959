"""Pages and mails are in the reader's language; the API stays in English."""

import datetime
import html
import re
from urllib.parse import urlencode

import msgspec
import pytest
from django.test import Client
from django.urls import reverse
from django.utils import translation

from apps.adapters.models import AdapterVersion
from apps.billing.usage.metering import record_usage
from apps.catalog.operations import set_price
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.http.asgi import error_page
from apps.core.messages.mail import render_mail
from apps.interfaces.web.jobs.evaluation import evaluation_of
from tests.factories.accounts import make_user
from tests.factories.datasets import make_ready_version
from tests.factories.finetuning import TrainingSetup
from tests.factories.usage import make_record
from tests.support.attempts import REPORT

GERMAN = {"HTTP_ACCEPT_LANGUAGE": "de-DE,de;q=0.9,en;q=0.5"}
PAGES = [
    "overview",
    "account",
    "dataset_list",
    "dataset_upload",
    "job_list",
    "job_new",
    "adapter_list",
    "playground",
    "job_retraining",
    "job_retraining_new",
    "batch_list",
    "completion_list",
    "eval_list",
    "webhook_list",
    "usage",
    "usage_traffic",
    "invoice_list",
    "credit",
    "price_list",
    "budget_list",
    "key_list",
    "member_list",
    "organization_settings",
    "audit",
    "tracker_list",
    "notification_list",
    "accuracy",
]
BROKEN = b"""{"messages": [{"role": "user", "content": "a"}]}
[1]
{"messages": 3}
{"x": 1}
not json
{"messages": [{"role": "boss", "content": "a"}]}
{"messages": [{"role": "assistant"}]}
{"messages": [{"role": "assistant", "content": "a", "weight": 7}]}
"""
# Code, and long lists of choices.
_CODE = re.compile(r"<(script|style|pre|code|kbd|svg|option)\b.*?</\1>", re.DOTALL)
# Words of every English sentence that no German one has.
_ENGLISH = re.compile(r"\b(?:the|and|your|you|with|this|that|of|are|yet|for|from)\b", re.IGNORECASE)
_ONCE_ENGLISH = re.compile(
    r"\b(?:Base model|Validation file|Objective|Method|Cost|Steps|Machines|supervised|[Vv]ersion \d+: |better|worse|"
    r"[Qq]ueued|Running|[Ss]ucceeded|an API key|the whole organization|Alert only|per (?:GPU-hour|million))\b"
)
_ENGLISH_DAY = re.compile(r"\d (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\b")


def words(response) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", _CODE.sub("", response.content.decode()))).split())


@pytest.mark.slow
def test_a_page_is_in_the_language_that_its_reader_chose_else_in_that_of_the_browser(organization, alice, client_for):
    client = client_for(alice)
    by_browser = client.get("/members", **GERMAN)
    assert "Mitglieder" in words(by_browser) and '<html lang="de"' in by_browser.content.decode()
    assert "Accept-Language" in by_browser["Vary"] and by_browser["Content-Language"] == "de"

    client.post("/account", {"language": "en"}, **GERMAN)
    assert "Members" in words(client.get("/members", **GERMAN))
    client.post("/account", {"language": "de"})
    assert "Mitglieder" in words(client.get("/members"))
    assert client.post("/account", {"language": "xx"}).status_code == 422


def test_a_visitor_reads_the_sign_in_page_in_the_language_of_the_browser(client_for):
    assert "Passwort vergessen?" in words(client_for(None).get(reverse("account_login"), **GERMAN))
    assert "Forgot your password?" in words(client_for(None).get(reverse("account_login"), HTTP_ACCEPT_LANGUAGE="fr"))


def test_the_page_of_an_error_is_in_the_language_of_the_browser(rf):
    sent = Client(enforce_csrf_checks=True).post(reverse("account_login"), **GERMAN)
    assert sent.status_code == 403 and not english_in(sent) and "Das Formular war zu alt" in words(sent)
    with translation.override("de"):
        assert "Das hat nicht geklappt" in words(error_page(rf.get("/jobs"), 409))


def test_the_api_answers_in_english_whatever_the_caller_accepts(client, key):
    anonymous = client.get("/v1/files", **GERMAN)
    member = client.get("/v1/files/file-none", HTTP_AUTHORIZATION=f"Bearer {key.secret}", **GERMAN)

    assert anonymous.status_code == 401 and "key" in anonymous.json()["error"]["message"]
    assert member.json()["error"]["message"] == "No such file: file-none."
    assert "Content-Language" not in anonymous and "Content-Language" not in member


@pytest.mark.slow
def test_errors_of_the_domain_and_texts_of_scripts_are_in_the_language_of_the_page(floor, bob, client_for):
    page = client_for(bob).post(f"/jobs/{floor.job().pk}/pause", follow=True, **GERMAN)

    assert "Der Job muss laufen, um angehalten zu werden." in words(page)
    assert 'data-copied="Kopiert"' in page.content.decode()


def test_a_mail_is_in_the_language_of_its_reader():
    facts = {"email": "a@example.com", "sign_in": "https://x.example", "reset": "https://x.example"}

    german = render_mail("account_exists", to=["a@example.com"], language="de", **facts)
    english = render_mail("account_exists", to=["a@example.com"], language="", **facts)

    assert german.subject.startswith("Sie haben schon ein Konto") and 'lang="de"' in str(german.alternatives[0][0])
    assert english.subject.startswith("You already have an account") and 'lang="en"' in str(english.alternatives[0][0])


@pytest.mark.slow
def test_german_pages_hold_no_english_sentence(organization, alice, client_for):
    job = TrainingSetup(organization).job()
    client = client_for(alice)
    addresses = [reverse(f"web:{name}") for name in PAGES]
    addresses += [reverse("web:job_detail", args=[job.pk]), reverse("web:dataset_detail", args=[job.training_file_id])]

    found = {address: english_in(client.get(address, **GERMAN, follow=True)) for address in addresses}
    assert not {address: texts for address, texts in found.items() if texts}


@pytest.mark.slow
def test_days_and_hours_on_german_pages_have_no_english_month(organization, alice, client_for):
    days = [datetime.datetime(2026, month, 4, 9, tzinfo=datetime.UTC) for month in (3, 5, 10, 11)]
    price = set_price(sku="inference:input:tiny", unit="tokens", price_nano=10**9, per=1, by="system", now=db_now())
    used = {"organization_id": organization.pk, "slice_id": "", "input_price_id": price.pk, "output_price_id": None}
    record_usage(records=[make_record(**used, occurred_at=day) for day in days])
    client = client_for(alice)
    october = {"first": "2026-10-01", "last": "2026-10-31"}
    week = {"first": "2026-10-01", "last": "2026-10-05"}
    asked = [(path, period) for path in ("/usage", "/usage/traffic") for period in (october, week)]

    pages = [client.get(path, query, **GERMAN).content.decode() for path, query in asked]

    assert not [found for page in pages for found in _ENGLISH_DAY.findall(page)]
    assert "01.10.2026 bis 31.10.2026" in pages[0] and "<title>04.10.: $3" in pages[0]
    assert "<title>04.10. 09:00: $3" in pages[1] and "<title>04.10. 09:00: 1" in pages[3]
    assert "04.10., 09:00" in pages[3]
    assert "04.10.2026" in pages[2] and "<title>04.10.: 1" in pages[2]


@pytest.mark.slow
def test_names_of_settings_states_and_choices_are_german_too(organization, alice, client_for, floor):
    jobs = [floor.job(), floor.job()]
    customer, operator = client_for(alice), client_for(make_user("operator", is_operator=True))
    detail = reverse("web:job_detail", args=[jobs[0].pk])

    answers = [
        customer.get(reverse("web:job_compare"), {"job": [job.pk for job in jobs]}, **GERMAN),
        customer.get(detail, {"tab": "dataset"}, **GERMAN),
        customer.get("/jobs", **GERMAN),
        customer.get("/budgets", **GERMAN),
        operator.get(reverse("staff:job_list"), **GERMAN),
        operator.get(reverse("staff:job_detail", args=[jobs[0].pk]), **GERMAN),
        operator.get(reverse("staff:price_list"), **GERMAN),
    ]

    assert {answer.status_code for answer in answers} == {200}
    shown = [re.sub(r"<(script|style|code)\b.*?</\1>|<[^>]*>", " ", each.content.decode()) for each in answers]
    assert not [found for text in shown for found in _ONCE_ENGLISH.findall(text)]


@pytest.mark.slow
def test_verdicts_of_an_evaluation_are_german_too():
    version = AdapterVersion(report=msgspec.to_builtins(REPORT))

    with translation.override("de"):
        rows = [(row["label"], str(row["verdict"])) for row in evaluation_of(version)["rows"]]

    assert rows == [("Genaue Übereinstimmung", "besser")]


@pytest.mark.slow
def test_errors_findings_and_reasons_are_german_too(organization, alice, client_for, claim, floor):
    """A damaged file, a failed job, and forms with wrong values."""
    broken = make_ready_version(organization, BROKEN)
    picture = make_ready_version(organization, b"\x89PNG" + bytes(100), filename="cat.png")
    job = floor.job()
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message=""))
    client = client_for(alice)
    chosen = {"dataset": job.training_file_id, "model": floor.base_model.name}
    trained = chosen | {"method": "lora"}
    gets = [reverse("web:dataset_detail", args=[version.pk]) for version in (broken, picture)]
    gets += [f"/jobs/{job.pk}{tab}" for tab in ("", "?tab=events", "?tab=log", "?tab=dataset")]
    gets += ["/jobs", "/notifications", "/"]
    steps = ({}, chosen, trained, trained | {"epochs": "0"}, trained | {"epochs": "3", "pool": floor.pool.name})
    gets += [f"/jobs/new?{urlencode(step)}" for step in (*steps, trained | {"pool": "x"}, {"dataset": broken.pk})]
    posts: dict[str, dict[str, str]] = {
        "/keys": {"name": "", "scopes": "x"},
        "/members/invite": {"email": "nobody", "role": "king"},
        "/organization/webhooks": {"url": "https://10.0.0.1", "event_types": "x"},
        "/datasets/upload": {"name": "a"},
        "/budgets": {"limit_usd": "-1"},
        f"/jobs/{job.pk}/resume": {},
        f"/jobs/{job.pk}/retry": {"cap": "a lot"},
    }
    answers = {address: client.get(address, **GERMAN, follow=True) for address in gets}
    answers |= {f"POST {address}": client.post(address, sent, follow=True, **GERMAN) for address, sent in posts.items()}

    assert {answer.status_code for answer in answers.values()} <= {200, 422}
    found = {address: english_in(answer) for address, answer in answers.items()}
    assert not {address: texts for address, texts in found.items() if texts}


def english_in(response) -> list[str]:
    text = words(response)
    return [text[max(0, match.start() - 40) : match.end() + 40] for match in _ENGLISH.finditer(text)]
