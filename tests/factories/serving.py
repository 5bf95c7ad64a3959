"""Base models, replicas, adapters and customers for the gateway."""

from dataclasses import dataclass

from django.db import transaction

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import Organization, User, default_project_id, home_region
from apps.adapters.models import Adapter, AdapterVersion
from apps.catalog.models import BaseModel
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.ids import new_ulid
from apps.serving.models import Deployment, LoadedAdapter, Placement, Replica
from apps.serving.operations import give_token
from apps.serving.whole_models import give_place
from tests.factories.accounts import make_key, make_organization, make_user
from tests.factories.money import USD, give_credit
from tests.twins.scripted_engine import TOKEN

INPUT_NANO, OUTPUT_NANO, PER = 50_000_000, 200_000_000, 1_000_000

BASE_MODEL = "tiny"

CONTEXT_LENGTH = 512


@dataclass(frozen=True)
class Tenant:
    owner: User
    organization: Organization
    key: IssuedKey
    model_name: str
    lora_name: str


@dataclass(frozen=True)
class World:
    base_model: BaseModel
    acme: Tenant
    rival: Tenant


def make_world(engine_url: str) -> World:
    base_model = make_served_model(BASE_MODEL, engine_url)
    return World(base_model, make_tenant("Acme", base_model), make_tenant("Rival", base_model))


@transaction.atomic  # a gateway at work reads all of it or nothing
def make_served_model(name: str, *engine_urls: str, is_priced: bool = True, **config: object) -> BaseModel:
    base_model = BaseModel.objects.create(
        name=name, display_name=name, parameter_count=1, context_length=CONTEXT_LENGTH, is_installed=True, config=config
    )
    for url in engine_urls:
        make_replica(base_model, url)
    if is_priced:
        price_inference(name)
    return base_model


def price_inference(name: str) -> None:
    for way, nano in (("input", INPUT_NANO), ("output", OUTPUT_NANO)):
        set_price(sku=f"inference:{way}:{name}", unit="tokens", price_nano=nano, per=PER, by="system", now=db_now())


@transaction.atomic  # a running gateway sees a ready replica together with its token, as after enrolment
def make_replica(base_model: BaseModel, url: str) -> Replica:
    """A replica that was heard of just now, and stays so for the test."""
    seen = {"is_ready": True, "observed_at": "2100-01-01T00:00Z"}
    replica = Replica.objects.create(base_model=base_model, region_id=home_region(), url=url, **seen)
    give_token(replica=replica, token=TOKEN)
    return replica


def make_tenant(name: str, base_model: BaseModel, *, credit_nano: int = 10 * USD) -> Tenant:
    owner = make_user(name.lower())
    organization = make_organization(name, owner=owner)
    if credit_nano:
        give_credit(organization, credit_nano)
    version = make_adapter(organization, base_model)
    return Tenant(owner, organization, make_key(organization, owner), version.model_name, version.lora_name)


def make_adapter(organization: Organization, base_model: BaseModel) -> AdapterVersion:
    """An adapter that every replica of its base model has loaded, as it was to."""
    version = make_version(organization, base_model)
    Deployment.objects.create(organization=organization, adapter_version=version)
    for replica in base_model.replicas.filter(whole_model=None):
        load(version, replica)
    return version


def load(version: AdapterVersion, replica: Replica) -> None:
    """Place the version on the replica and have it loaded."""
    of = {"organization_id": version.organization_id, "replica": replica, "adapter_version": version}
    Placement.objects.get_or_create(**of)
    LoadedAdapter.objects.get_or_create(**of, defaults={"state": "loaded"})


def make_version(organization: Organization, base_model: BaseModel, **fields: object) -> AdapterVersion:
    """A version that nothing serves."""
    ulid = new_ulid()
    return AdapterVersion.objects.create(
        organization=organization,
        adapter=Adapter.objects.create(
            organization=organization, project_id=default_project_id(organization), name="bot", base_model=base_model
        ),
        number=1,
        model_name=f"ft:{base_model.name}:{organization.slug}:bot:{ulid[-8:]}",
        lora_name=f"a-{ulid}",
        source="run_test",
        manifest_sha256="0" * 64,
        bytes=1,
        rank=8,
        target_modules=["q_proj"],
        method="lora",
        chat_template_sha256="0" * 64,
        **{"object_prefix": "nowhere", "manifest": {"files": []}} | fields,
    )


def make_whole_model(organization: Organization, base_model: BaseModel) -> AdapterVersion:
    """A result that no engine loads as an adapter, merged: nothing serves it yet."""
    files = [{"name": name, "bytes": 2, "sha256": "0" * 64} for name in ("config.json", "model.safetensors")]
    merged = {"kind": "merged_16bit", "object_prefix": "merged", "manifest": {"files": files}, "bytes": 4}
    return make_version(organization, base_model, status="files_only", exports=[merged])


@transaction.atomic  # or a running gateway could take it for a replica of the base model
def dedicate(version: AdapterVersion, url: str) -> Replica:
    """A replica of its own for a whole model, which answers."""
    replica = make_replica(version.adapter.base_model, url)
    Replica.objects.filter(pk=replica.pk).update(whole_model=version)
    give_place(replica=replica, version=version)
    LoadedAdapter.objects.create(
        organization_id=version.organization_id, replica=replica, adapter_version=version, state="loaded"
    )
    replica.refresh_from_db()
    return replica
