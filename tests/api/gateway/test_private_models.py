"""The gateway answers for models of private projects only to keys that see them, and to others as for unknown ones."""

import pytest

from apps.accounts.login.key_operations import issue_member_token
from apps.accounts.models import Membership, Project
from apps.adapters.models import Adapter, AdapterVersion
from apps.core.database.clock import db_now
from apps.serving.aliases import point_alias
from tests.factories.accounts import SCOPED, make_key, make_member, make_private_project, make_project_key
from tests.support.gateway.processes import HI, wait_until

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_a_model_of_a_private_project_answers_only_keys_that_see_it(gateway, world, tenant):
    organization, owner = tenant.organization, tenant.owner
    bob, ann = make_member(organization, "member", "bob"), make_member(organization, "admin", "ann")
    secret = make_private_project(organization, owner, bob)
    other = make_private_project(organization, owner, ann, name="Other")
    version = AdapterVersion.objects.select_related("adapter").get(model_name=tenant.model_name)
    alias = point_alias(version=version, name="production", by=owner.pk, now=db_now())

    def token(person) -> object:
        membership = Membership.objects.get(organization=organization, user=person)
        return issue_member_token(membership=membership, now=db_now())

    keys = {
        "its member": (make_project_key(secret, bob), 200),
        "an owner": (tenant.key, 200),
        "the playground of its member": (token(bob), 200),
        "the playground of an owner": (token(owner), 200),
        "an admin": (make_key(organization, ann, scopes=SCOPED), 404),
        "another project": (make_project_key(other, ann), 404),
        "the playground of an admin": (token(ann), 404),
        "an outsider": (world.rival.key, 404),
    }

    def ask(key, model: str):
        return gateway.http(key).post("/v1/chat/completions", json={"model": model, "messages": HI})

    admin = keys["an admin"][0]
    assert ask(admin, version.model_name).status_code == 200, "the project is open"
    Adapter.objects.filter(pk=version.adapter_id).update(project=secret)
    wait_until(lambda: ask(admin, version.model_name).status_code == 404, "the model is not hidden")
    unknown = ask(admin, "ft:nothing:here:at:0000000000").json()
    assert unknown["error"]["code"] == "model_not_found"
    for who, (key, status) in keys.items():
        for model in (version.model_name, alias.model_name):
            answer = ask(key, model)
            assert answer.status_code == status, (who, model)
            if status == 404:
                assert answer.json() == unknown, (who, model)
    assert ask("sk-wrong", version.model_name).status_code == 401

    Project.objects.filter(pk=secret.pk).update(is_private=False)
    wait_until(lambda: ask(admin, version.model_name).status_code == 200, "the project is open again")
