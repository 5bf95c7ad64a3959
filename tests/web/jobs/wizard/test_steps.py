"""The new fine-tune wizard: each step's address, what it refuses and corrects, and that its price is the one held."""

import html
import re
from urllib.parse import urlencode

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from apps.billing.models import Hold
from apps.core.templatetags.ui import usd
from apps.finetuning.models import FineTuningJob
from tests.factories.catalog import make_listed_model
from tests.factories.datasets import make_ready_version
from tests.factories.finetuning import make_pool
from tests.factories.market import POOLS, Market, make_gpu_pool
from tests.support.pages import text

URL = "/jobs/new"


@pytest.fixture
def chosen(chosen, floor) -> dict[str, str]:
    """Everything the review needs."""
    return chosen | {"epochs": "5", "pool": floor.pool.name}


def page(client, **query: str):
    return client.get(f"{URL}?{urlencode(query)}")


def posted(response) -> dict[str, str]:
    """The fields of the review's form, as a browser would send them."""
    form = re.search(r'<form id="wizard" method="post".*?</form>', response.content.decode(), re.DOTALL)
    assert form
    pairs = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form[0])
    return {name: html.unescape(value) for name, value in pairs if name != "csrfmiddlewaretoken"}


@pytest.mark.slow
def test_members_open_it_and_viewers_outsiders_and_nobody_do_not(
    chosen, client_for, alice, bob, vera, charlie, rival
) -> None:
    review = f"{URL}?{urlencode(chosen)}"

    assert [client_for(person).get(review).status_code for person in (alice, bob)] == [200, 200]
    assert client_for(vera).get(review).status_code == 403
    assert client_for(charlie).get(review).status_code == 404
    assert client_for(None).get(review).status_code == 302


@pytest.mark.parametrize(
    ("given", "heading"),
    [
        ((), "Choose a dataset"),
        (("dataset",), "Choose a base model"),
        (("dataset", "model"), "Choose a method"),
        (("dataset", "model", "method", "epochs"), "Choose compute"),
        (("dataset", "model", "method", "epochs", "pool"), "Review and launch"),
    ],
)
def test_the_address_says_which_step_it_is(given, heading, chosen, client_for, bob) -> None:
    response = page(client_for(bob), **{name: chosen[name] for name in given})

    assert response.status_code == 200
    assert f"<h1>{heading}</h1>" in text(response)


def test_a_step_asked_for_out_of_order_is_the_first_open_one(chosen, client_for, bob) -> None:
    assert "<h1>Choose a base model</h1>" in text(page(client_for(bob), dataset=chosen["dataset"], step="review"))


def test_an_earlier_step_opens_again_with_everything_kept(chosen, client_for, bob) -> None:
    body = text(page(client_for(bob), **chosen, step="method"))

    assert "<h1>Choose a method</h1>" in body
    assert f'<input type="hidden" name="dataset" value="{chosen["dataset"]}">' in body
    assert re.search(r'name="epochs" value="5"', body)
    assert 'name="pool"' not in body  # a new recipe asks for compute again


def test_no_price_is_shown_before_there_is_one(chosen, client_for, bob) -> None:
    body = text(page(client_for(bob), dataset=chosen["dataset"]))
    none_found = text(page(client_for(bob), dataset=chosen["dataset"], q="no-such-model"))

    assert "from $" in body and "Needs a base model" not in body  # the first one is preselected
    assert "Needs a base model" in none_found and "from $" not in none_found
    assert "$0" not in none_found.partition("price-live")[2].partition("</aside>")[0]


def test_the_models_own_recipe_is_filled_in(floor, chosen, client_for, bob) -> None:
    floor.base_model.default_recipe = {"epochs": 7, "learning_rate": 0.003}
    floor.base_model.save(update_fields=["default_recipe"])

    body = text(page(client_for(bob), dataset=chosen["dataset"], model=chosen["model"]))

    assert re.search(r'name="epochs" value="7"', body)
    assert re.search(r'name="learning_rate" value="0.003"', body)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("epochs", "900", "epochs must be a whole number from 1 to 100."),
        ("learning_rate", "nonsense", "Enter a number."),
        ("suffix", "Not a name", "Use up to 64 of a-z, 0-9 and -"),
    ],
)
def test_a_wrong_value_is_said_at_its_field(field, value, sentence, chosen, client_for, bob) -> None:
    response = page(client_for(bob), **(chosen | {field: value}))

    assert response.status_code == 422
    assert "<h1>Choose a method</h1>" in text(response)
    assert sentence in text(response)


@pytest.mark.parametrize("cap", ["nothing", "-1", "0"])
def test_a_wrong_cap_is_said_at_the_compute_step(cap, chosen, client_for, bob) -> None:
    response = page(client_for(bob), **chosen, cap=cap)

    assert response.status_code == 422
    assert "<h1>Choose compute</h1>" in text(response)
    assert 'id="id_cap_error"' in text(response)


def test_the_compute_step_compares_pools_and_says_why_one_cannot_be_used(chosen, client_for, bob) -> None:
    make_pool("idle")
    chosen.pop("pool")

    body = text(page(client_for(bob), **chosen))

    assert "Recommended" in body
    assert "No worker is online." in body
    assert re.search(r'id="g-idle"[^>]* disabled', body)
    assert "Measured on this pool with Anneal demo." in body


def test_a_pool_too_small_names_what_would_fit(chosen, client_for, bob) -> None:
    make_pool("tiny", memory_bytes=2**20)
    chosen.pop("pool")

    assert re.search(r"Needs \d", text(page(client_for(bob), **chosen)))


def test_a_model_that_is_not_installed_is_quoted_and_not_launched(chosen, client_for, bob) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    listed = make_listed_model(config=config)

    response = page(client_for(bob), **(chosen | {"model": listed.name, "step": "compute"}))

    assert response.status_code == 200
    assert "You can estimate it" in text(response)
    assert "The model is not installed." in text(response)


def test_the_files_of_the_first_step_are_searched_by_the_names_of_dataset_and_file(
    organization, chosen, client_for, bob
) -> None:
    cards = make_ready_version(organization, dataset_name="cards", filename="november.jsonl")
    client, asked = client_for(bob), {"step": "dataset", "model": chosen["model"]}
    found, none = text(page(client, **asked, q="card nov")), text(page(client, **asked, q="nothing"))

    assert f'id="d-{cards.pk}"' in found and f'id="d-{chosen["dataset"]}"' not in found
    assert f'<option value="{chosen["dataset"]}"' in found, "it may still be the validation file"
    assert "No file matches" in none
    kept = asked | {"dataset": chosen["dataset"], "validation": chosen["dataset"], "q": "nothing"}
    still = text(page(client, **kept))
    assert re.search(rf'id="d-{chosen["dataset"]}"[^>]* checked', still) and "No file matches" in still
    search = re.search(r'<form id="search".*?</form>', found, re.DOTALL)[0]
    assert re.search(rf'name="model"\s+value="{chosen["model"]}"', search) and 'name="step" value="dataset"' in search


def test_models_that_cannot_be_trained_come_last_on_request_with_the_reason(chosen, client_for, bob) -> None:
    listed = make_listed_model("qwen3-8b")
    client, asked = client_for(bob), {"dataset": chosen["dataset"], "step": "model"}
    usable, everything = text(page(client, **asked)), text(page(client, **asked, all="1"))

    assert listed.name not in usable and "1 more model can be estimated, but is not installed here." in usable
    own, group, other = (everything.index(mark) for mark in (chosen["model"], "estimate only</th>", f"m-{listed.name}"))
    assert own < group < other
    assert re.search(rf'value="{listed.name}" aria-describedby="why-{listed.name}" disabled', everything)
    estimate = re.search(r'href="([^"]+)">Estimate', everything)[1]
    assert "<h1>Choose a method</h1>" in text(client.get(estimate))
    assert re.search(rf'value="{listed.name}"[^>]* checked', text(page(client, **asked, model=listed.name)))
    searched = text(page(client, **asked, model=chosen["model"], q="nothing"))
    assert re.search(rf'value="{chosen["model"]}"[^>]* checked', searched) and "No base model matches" in searched


def test_htmx_gets_the_estimate_alone(chosen, client_for, bob) -> None:
    headers = {"HX-Request": "true", "HX-Target": "div#price-live"}

    body = client_for(bob).get(f"{URL}?{urlencode(chosen | {'step': 'compute'})}", headers=headers).content.decode()

    assert "<html" not in body
    assert '<hx-partial hx-target="#price-lines"' in body


@pytest.mark.slow
def test_the_wizards_price_is_the_reviews_price_is_the_hold(chosen, floor, client_for, bob, organization) -> None:
    client = client_for(bob)
    compute = page(client, **(chosen | {"step": "compute"}))
    review = page(client, **chosen)
    cost = re.search(r'data-cost="([^"]+)"', text(compute))[1]

    response = client.post(URL, posted(review))
    job = FineTuningJob.objects.get()

    assert cost in text(review)
    assert cost == usd(job.estimate["cost_nano_p50"])
    assert f"Launch, hold {usd(job.spend_cap_nano)}" in text(review)
    assert Hold.objects.get(pk=job.hold_id).amount_nano == job.spend_cap_nano == int(posted(review)["cap_nano"])
    assert (response.status_code, response["Location"]) == (302, f"/jobs/{job.pk}")
    assert job.hyperparameters["epochs"] == 5
    assert job.created_by == bob.pk


@pytest.mark.usefixtures("metered")
def test_a_cap_of_ones_own_is_what_is_held(chosen, client_for, bob) -> None:
    client = client_for(bob)
    review = page(client, **chosen, cap="2.5")

    client.post(URL, posted(review))

    assert "Launch, hold $2.50" in text(review)
    assert FineTuningJob.objects.get().spend_cap_nano == 2_500_000_000


@pytest.mark.slow
def test_a_review_whose_cap_does_not_pay_for_one_start_cannot_be_launched(chosen, client_for, bob) -> None:
    client = client_for(bob)
    review = page(client, **chosen, cap="0.0000001", step="review")
    fields = posted(page(client, **chosen))

    refused = client.post(URL, fields | {"cap": "0.0000001", "cap_nano": "100"})
    risen = client.post(URL, fields | {"cap_nano": "59000000"})

    assert "The maximum is now $0.06 instead of $0.059" in text(risen)
    compute = page(client, **chosen, cap="0.0000001", step="compute")

    assert 'id="id_cap_error"' in text(compute) and compute.status_code == 422
    assert "Launch, hold" not in text(review)
    assert refused.status_code == 422 and "does not pay for one start" in text(refused)
    assert not FineTuningJob.objects.exists()


def test_the_same_review_sent_twice_launches_once(chosen, client_for, bob) -> None:
    client = client_for(bob)
    fields = posted(page(client, **chosen))

    answers = [client.post(URL, fields)["Location"] for _ in range(2)]

    assert answers[0] == answers[1]
    assert FineTuningJob.objects.count() == Hold.objects.count() == 1


@pytest.mark.slow
@pytest.mark.usefixtures("metered")
def test_too_little_money_is_said_before_and_after(chosen, client_for, bob) -> None:
    client = client_for(bob)
    review = page(client, **chosen, cap="5000")
    fields = {**chosen, "cap": "5000", "cap_nano": str(5000 * 10**9), "once": "once-more"}

    refused = client.post(URL, fields)

    assert 'href="/credit?amount=' in text(review)
    assert "disabled" in text(review).partition("Launch</button>")[0][-400:]
    assert refused.status_code == 422
    assert "Add at least $" in text(refused)
    assert not FineTuningJob.objects.exists()


def test_a_file_with_errors_is_refused_at_its_step(floor, organization, chosen, client_for, bob) -> None:
    broken = make_ready_version(organization, b'{"messages": []}\n' * 12)

    response = page(client_for(bob), **(chosen | {"dataset": broken.pk}))

    assert response.status_code == 422
    assert "<h1>Choose a dataset</h1>" in text(response)
    assert "), line " in text(response)


def test_another_tenants_file_is_unknown(chosen, client_for, charlie, rival) -> None:
    client = client_for(charlie)

    foreign = client.post(URL, {**chosen, "cap_nano": "1"})
    missing = client.post(URL, {**chosen, "dataset": "file-unknown", "cap_nano": "1"})

    assert (foreign.status_code, missing.status_code) == (404, 404)


def test_the_method_step_says_why_each_value_was_chosen(chosen, client_for, bob) -> None:
    body = text(page(client_for(bob), dataset=chosen["dataset"], model=chosen["model"], method="full", step="method"))

    assert "2e-5 because every weight moves." in body
    assert "Early stopping off: no rows are held out." in body
    assert "Adapted layers" not in body


def test_what_follows_from_a_choice_is_told_with_it_and_stands_in_the_review(chosen, client_for, bob) -> None:
    browser, asked = client_for(bob), chosen | {"validation_share": "0.2", "epochs": "4"}
    live = {"HX-Request": "true", "HX-Target": "div#price-live"}

    part = text(browser.get(f"{URL}?{urlencode(asked | {'step': 'method'})}", headers=live))
    review = text(page(browser, **asked))

    assert "after 2 evaluations without a lower loss" in part and "Early stopping on: 6 evaluations" in part
    assert "<dt>Early stopping</dt><dd>after 2 evaluations without a lower loss</dd>" in review


def test_the_name_and_the_validation_file_stand_where_they_were_chosen(organization, chosen, client_for, bob) -> None:
    client, held = client_for(bob), make_ready_version(organization)

    review = text(page(client, **chosen, suffix="nightly"))
    assert re.search(r"<dt>Name</dt>\s*<dd[^>]*>nightly</dd>", review)
    files = text(page(client, step="dataset", dataset=chosen["dataset"], validation=held.pk))
    assert re.search(rf'<option value="{held.pk}"\s+selected', files)


def test_the_call_to_copy_holds_what_was_chosen(chosen, client_for, bob) -> None:
    asked = chosen | {"method": "qlora", "epochs": "6", "lora_rank": "32", "cap": "1.5"}
    body = text(page(client_for(bob), **asked))

    assert '"quantization": "nf4"' in body
    assert '"rank": 32' in body
    assert '"epochs": 6' in body
    assert '"max_cost_usd": "1.5"' in body


@pytest.mark.slow
def test_the_review_asks_for_a_licence_that_must_be_accepted_and_goes_on(floor, chosen, client_for, bob) -> None:
    floor.base_model.licence = "Llama 3.1 Community License"
    floor.base_model.save(update_fields=["licence"])
    browser = client_for(bob)
    before = page(browser, **chosen)
    form = re.search(r'<form class="form" method="post" action="/licences/accept">.*?</form>', text(before), re.DOTALL)
    assert form and "disabled" in text(before).partition('id="wizard"')[2]

    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form[0]))
    accepted = browser.post("/licences/accept", fields, follow=True)

    assert "is accepted for" in text(accepted)
    assert "<h1>Review and launch</h1>" in text(accepted)
    assert browser.post(URL, posted(accepted)).status_code == 302


def test_only_a_file_of_the_organization_is_prepared(chosen, client_for, bob, charlie, rival) -> None:
    address = f"{URL}/prepare?{urlencode({**chosen, 'step': 'method'})}"

    assert "Choose a method" in client_for(bob).post(address).content.decode()
    assert client_for(charlie).post(address).status_code == 404


# --- what it asks the database --------------------------------------------------------------------------------------

LIVE_QUERIES = 28  # of a request: who asks and for whom, the balance, the project, the choices, the pools as they are


@pytest.mark.slow
@pytest.mark.parametrize("step, target", [("compute", "compute-live"), ("method", "price-live")])
def test_a_live_panel_asks_the_database_no_more_for_thirty_pools_than_for_six(
    organization, client_for, bob, step, target
) -> None:
    market, client = Market(organization), client_for(bob)

    def count_queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            url = f"{market.wizard}&step={step}"
            assert client.get(url, headers={"HX-Request": "true", "HX-Target": f"div#{target}"}).status_code == 200
            return len(captured)

    of_six = count_queries()
    for copy in range(1, 5):
        for key, *facts in POOLS:
            make_gpu_pool(key, *facts, copy=copy)

    assert count_queries() == of_six <= LIVE_QUERIES
