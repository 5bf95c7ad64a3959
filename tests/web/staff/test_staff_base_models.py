"""The operator's pages for base models: lookups of the hub, their installation, and folders of the workers."""

import json

import pytest

from apps.catalog.models import BaseModel, HubLookup
from apps.catalog.queries import list_hub_models
from apps.core.models import AuditEntry, OutboxMessage
from tests.factories.catalog import DEMO_FOLDER, make_base_model, make_hub_lookup, make_listed_model
from tests.factories.finetuning import TrainingSetup
from tests.support.pages import text

LIST = "/staff/base-models"
LOOK_UP = f"{LIST}/lookups"
FOLDER = {"name": "tiny", "display_name": "Tiny 6M", "licence": "Apache-2.0", "path": str(DEMO_FOLDER)}


def test_a_folder_is_installed_at_once(console):
    added = console.post(LIST, FOLDER, follow=True)

    model = BaseModel.objects.get(name="tiny")
    assert model.is_installed and (model.path, model.licence) == (str(DEMO_FOLDER), "Apache-2.0")
    assert "Tiny 6M was added. Set its token prices next." in added.content.decode()
    assert AuditEntry.objects.get(action="base_model.added").target == model.pk


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"name": "Tiny_6M"}, "lower-case letters"), ({"path": "/etc"}, "/etc"), ({"path": "\0"}, "Null characters")],
)
def test_what_is_no_model_folder_is_refused_beside_its_field(console, changes, words):
    refused = console.post(LIST, FOLDER | changes)

    assert refused.status_code == 422 and words in refused.content.decode()
    assert not BaseModel.objects.filter(display_name="Tiny 6M").exists()


def test_a_family_and_size_is_looked_up_with_a_token_that_no_page_shows(console):
    chosen = list_hub_models()[0].repo
    token = "hf_secret_of_the_operator"

    waiting = console.post(LOOK_UP, {"choice": chosen, "hub_token": token}, follow=True).content.decode()

    lookup = HubLookup.objects.get()
    assert lookup.repo == chosen and OutboxMessage.objects.get(topic="base_model.lookup").payload == {
        "lookup_id": lookup.pk
    }
    assert "Reading the hub" in waiting and 'hx-trigger="every 2s"' in waiting
    stored = json.dumps([*AuditEntry.objects.values("details")], default=str) + str(lookup.__dict__)
    assert token not in waiting + stored


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "Choose a model from the list, or name a repository."),
        ({"choice": "Qwen/Qwen3-8B", "repo": "acme/tiny"}, "Choose a model from the list, or name a repository."),
        ({"choice": "acme/unlisted"}, "Select a valid choice"),
        ({"repo": "../../etc/passwd"}, "A repository is written owner/name"),
        ({"repo": "http://10.0.0.1/x"}, "A repository is written owner/name"),
        ({"repo": "acme/tiny", "revision": "main"}, "40-digit commit"),
        ({"repo": "a/" + "x" * 300}, "at most 200"),
    ],
)
def test_what_is_no_repository_is_refused_beside_its_field_and_not_asked_for(console, given, words):
    refused = console.post(LOOK_UP, given | {"hub_token": "hf_secret"})

    assert refused.status_code == 422 and words in refused.content.decode()
    assert "hf_secret" not in refused.content.decode()
    assert not HubLookup.objects.exists() and not OutboxMessage.objects.filter(topic="base_model.lookup").exists()


def test_a_lookup_shows_size_licence_fit_and_serving_and_installs_with_one_click(console, organization):
    floor = TrainingSetup(organization)
    lookup = make_hub_lookup(floor.base_model)

    shown = console.get(f"{LOOK_UP}/{lookup.pk}").content.decode()

    for words in ("12.8 MB for each worker", "Apache-2.0", "Served", floor.pool.name, "QLoRA", "Full fine-tuning"):
        assert words in shown
    assert "Commit" in shown and "c" * 12 in shown

    added = console.post(f"{LOOK_UP}/{lookup.pk}", {"name": "tiny"}, follow=True).content.decode()
    model = BaseModel.objects.get(name="tiny")
    assert (model.repo, model.revision, model.is_installed) == ("acme/tiny", "c" * 40, False)
    assert OutboxMessage.objects.get(topic="base_model.install").payload == {"base_model_id": model.pk}
    assert "tiny is being installed." in added
    again = console.post(f"{LOOK_UP}/{lookup.pk}", {"name": "tiny-2"})
    assert again.status_code == 422 and BaseModel.objects.filter(repo="acme/tiny").count() == 1


def test_adapters_that_no_engine_serves_and_models_that_do_not_fit_say_why(console, organization):
    floor = TrainingSetup(organization)
    config = floor.base_model.config | {"architectures": ["NemotronForCausalLM"], "num_hidden_layers": 10_000}
    model = {"config": config, "parameter_count": 10**12, "context_length": 512}
    lookup = make_hub_lookup(floor.base_model, model=model)

    shown = console.get(f"{LOOK_UP}/{lookup.pk}").content.decode()

    assert "Not served:" in shown and "Jobs deliver a merged model." in shown
    assert ">No<" in shown.replace(" ", "").replace("\n", "")


@pytest.mark.parametrize("name", ["", "Tiny_6M", "anneal-demo", "x" * 81, "\0"])
def test_a_name_that_cannot_be_taken_is_refused_beside_its_field(console, name):
    lookup = make_hub_lookup(make_base_model())

    refused = console.post(f"{LOOK_UP}/{lookup.pk}", {"name": name})

    assert refused.status_code == 422 and 'id="id_name_error"' in refused.content.decode()
    assert not BaseModel.objects.filter(repo="acme/tiny").exists()


def test_a_refused_repository_has_its_reason_and_no_install_button(console):
    refused = make_hub_lookup(
        make_base_model(),
        repository=None,
        model=None,
        refusal="acme/tiny is gated: accept its licence at https://x.test.",
    )

    shown = console.get(f"{LOOK_UP}/{refused.pk}").content.decode()

    assert "accept its licence at https://x.test." in shown and 'id="id_name"' not in shown
    assert "Look up again" in shown and 'name="hub_token"' in shown
    assert console.get(f"{LOOK_UP}/hub_none").status_code == 404


def test_a_newer_commit_on_the_hub_can_be_looked_up_from_the_list(console):
    model = make_base_model()
    BaseModel.objects.filter(pk=model.pk).update(repo="acme/tiny", newer_revision="e" * 40)

    shown = console.get(LIST).content.decode()

    assert f"The hub has commit {'e' * 12}." in shown and "Look up newer" in shown


def test_models_are_found_by_name_repository_or_licence_with_a_link_to_the_licence(console):
    make_listed_model("qwen3-8b", repo="Qwen/Qwen3-8B", licence="Apache-2.0", display_name="Listed eight")
    make_listed_model("gemma-2-2b", repo="google/gemma-2-2b", licence="Gemma Terms of Use", display_name="Listed two")

    by_name, by_licence = (console.get(LIST, {"q": text}).content.decode() for text in ("QWEN", "gemma terms"))

    assert "Listed eight" in by_name and "Listed two" not in by_name and "2 models." in by_name
    assert 'href="https://huggingface.co/google/gemma-2-2b" rel="noreferrer">Gemma Terms of Use</a>' in by_licence
    assert "Listed eight" not in by_licence
    assert "No base model matches" in console.get(LIST, {"q": "%"}).content.decode()


@pytest.mark.slow
def test_a_price_of_tokens_says_which_price_in_batches_it_replaces(console, organization):
    sku = f"inference:input:{make_base_model().name}"
    for each, dollars in ((sku, "2"), (f"{sku}:batch", "0.60")):
        price = {"sku": each, "price_usd": dollars}
        previewed = console.post("/staff/prices", price)
        console.post("/staff/prices", price | {"confirmed": previewed.context["form"].previewed()})

    page = text(console.post("/staff/prices", {"sku": sku, "price_usd": "3"}))

    said = "It also sets the price in batches and evals:"
    assert f"{said} $1.50. It replaces $0.60." in " ".join(page.split()) and said not in text(previewed)
    own = {"sku": sku, "price_usd": "4", "organization": organization.pk}
    console.post("/staff/prices", own | {"confirmed": console.post("/staff/prices", own).context["form"].previewed()})
    assert "in batches $2.00" in text(console.get("/staff/prices")), "the second operator sees it"
