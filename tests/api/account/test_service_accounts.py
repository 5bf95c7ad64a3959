"""Service accounts: who may create them and their keys, what stays when a person leaves, and refused escalations."""

import pytest

from apps.accounts.login.addresses import has_verified_address
from apps.accounts.login.key_operations import revoke_key
from apps.accounts.members import service_accounts
from apps.accounts.members.invitations import InvitationClosed, accept_invitation, invitation_token, invite_member
from apps.accounts.members.memberships import change_role, remove_member
from apps.accounts.models import ApiKey, Invitation, Membership, Notification, User
from apps.accounts.notices import mail
from apps.accounts.queries import find_actor, list_members
from apps.accounts.roles import SCOPES, Admin, Member, Viewer
from apps.billing.budget_settings import set_budget
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState
from apps.core.models import AuditEntry
from tests.factories.accounts import PASSWORD, make_key, make_member, make_service_account, make_user
from tests.factories.money import USD

ACCOUNTS = "/api/v1/service-accounts"
VIEWER = {"name": "k", "scopes": ["view"]}
MANAGER = frozenset({"view", "key.manage", "member.manage"})


def post(client, path, **body):
    return client.post(path, body, format="json")


@pytest.fixture
def account(organization, alice) -> Membership:
    return make_service_account(organization, alice, role="member")


def test_a_service_account_outlives_the_person_who_created_it(api_client, organization, alice, ann, bob):
    admin = api_client(make_key(organization, ann, scopes=frozenset(SCOPES) - {"organization.manage"}))
    made = post(admin, ACCOUNTS, name="nightly", role="member").json()
    assert (made["object"], made["name"], made["role"]) == ("service_account", "nightly", "member")
    secret = post(admin, f"{ACCOUNTS}/{made['id']}/keys", name="ci", scopes=["view", "inference"]).json()["secret"]
    mine = make_key(organization, ann, scopes=frozenset({"view"}))
    membership = Membership.objects.get(user=ann)

    remove_member(organization=organization, membership_id=membership.pk, by=alice, now=db_now())

    assert api_client(mine).get("/api/v1/me").status_code == 401
    assert api_client(secret).get("/api/v1/me").json()["key"]["scopes"] == ["inference", "view"]
    key = ApiKey.objects.get(created_by=made["user"])
    assert (key.issued_by, find_actor(organization=organization, actor=key.pk, now=db_now()).pk) == (ann, made["id"])
    entries = AuditEntry.objects.filter(actor=ann.pk).values_list("action", "target")
    assert set(entries) >= {("service_account.create", made["user"]), ("key.create", key.pk)}
    removal = AuditEntry.objects.get(action="member.remove").details
    assert (removal["keys_revoked"], removal["service_account_keys"]) == (2, 1)
    told = Notification.objects.filter(kind="member").values_list("user_id", flat=True)
    assert set(told) == {alice.pk, ann.pk}


@pytest.mark.slow
def test_owners_and_admins_alone_manage_service_accounts(
    api_client, organization, alice, ann, bob, vera, rival, charlie, account
):
    one, keys = f"{ACCOUNTS}/{account.pk}", f"{ACCOUNTS}/{account.pk}/keys"

    def statuses(client) -> list[int]:
        return [
            client.get(ACCOUNTS).status_code,
            client.get(one).status_code,
            client.get(keys).status_code,
            post(client, ACCOUNTS, name=f"by {id(client)}", role="viewer").status_code,
            post(client, one, role="viewer").status_code,
            post(client, keys, **VIEWER).status_code,
        ]

    for person, role, may in ((alice, Admin, 200), (ann, Admin, 200), (bob, Member, 403), (vera, Viewer, 403)):
        scopes = frozenset(SCOPES) & {each.value for each in role.permissions}
        found = statuses(api_client(make_key(organization, person, scopes=scopes)))
        assert found == [200] * 3 + [may] * 3
    outsider = api_client(make_key(rival, charlie))
    assert outsider.get(ACCOUNTS).json()["data"] == []
    refused = [
        outsider.get(one),
        outsider.get(keys),
        post(outsider, one, role="viewer"),
        post(outsider, keys, **VIEWER),
    ]
    assert [each.status_code for each in [*refused, outsider.delete(one)]] == [404] * 5
    assert set(statuses(api_client(None))) == {401}
    assert api_client(make_key(organization, bob, scopes=frozenset({"view"}))).delete(one).status_code == 403
    assert api_client(make_key(organization, alice)).delete(one).json()["deleted"]
    assert not ApiKey.objects.filter(created_by=account.user, revoked_at=None).exists()


def test_no_creator_gives_a_service_account_more_than_they_have(api_client, organization, alice, ann, account):
    admin = api_client(make_key(organization, ann, scopes=frozenset(SCOPES) - {"organization.manage"}))
    of_owner = make_service_account(organization, alice, role="owner", name="root")

    assert post(admin, ACCOUNTS, name="mine", role="owner").status_code == 403
    assert post(admin, f"{ACCOUNTS}/{account.pk}", role="owner").status_code == 403
    for path, body in (("", {"role": "viewer"}), ("", {"name": "x"}), ("/keys", VIEWER)):
        assert post(admin, f"{ACCOUNTS}/{of_owner.pk}{path}", **body).status_code == 403
    assert admin.delete(f"{ACCOUNTS}/{of_owner.pk}").status_code == 403
    wide = post(admin, f"{ACCOUNTS}/{account.pk}/keys", name="k", scopes=["member.manage"])
    assert (wide.status_code, wide.json()["error"]["param"]) == (403, "scopes")
    assert not ApiKey.objects.filter(created_by__in=[account.user, of_owner.user]).exists()


def test_a_key_with_few_scopes_gains_none_through_a_service_account(api_client, organization, alice, account):
    narrow = api_client(make_key(organization, alice, scopes=MANAGER))
    blind = api_client(make_key(organization, alice, scopes=frozenset(SCOPES) - {"member.manage"}))
    viewer = make_service_account(organization, alice, role="viewer", name="reader")

    assert post(narrow, ACCOUNTS, name="mine", role="member").status_code == 403
    assert post(narrow, f"{ACCOUNTS}/{viewer.pk}", role="member").status_code == 403
    assert post(narrow, f"{ACCOUNTS}/{account.pk}/keys", **VIEWER).status_code == 403
    assert post(blind, f"{ACCOUNTS}/{viewer.pk}/keys", **VIEWER).status_code == 403
    theirs = post(narrow, f"{ACCOUNTS}/{viewer.pk}/keys", **VIEWER).json()
    assert post(blind, f"/api/v1/keys/{theirs['id']}/rotate").status_code == 403
    assert post(narrow, f"/api/v1/keys/{theirs['id']}/rotate").json()["created_by"] == viewer.user_id


def test_keys_of_a_service_account_do_no_more_than_its_role(api_client, organization, alice, account):
    owner = api_client(make_key(organization, alice))
    scopes = [each.value for each in Member.permissions]
    secret = post(owner, f"{ACCOUNTS}/{account.pk}/keys", name="k", scopes=scopes).json()["secret"]
    own = api_client(secret)

    child = post(own, "/api/v1/keys", name="child", scopes=["inference"]).json()
    assert (child["created_by"], child["issued_by"]) == (account.user_id, alice.pk)
    assert post(own, "/api/v1/keys", name="child", scopes=["member.manage"]).status_code == 403
    assert post(own, ACCOUNTS, name="another", role="viewer").status_code == 403
    assert post(owner, f"{ACCOUNTS}/{account.pk}", role="viewer", name="reader").json()["role"] == "viewer"
    assert own.get("/api/v1/me").json()["key"]["scopes"] == ["view"]
    assert post(own, "/api/v1/keys", name="child", scopes=["view"]).status_code == 403
    assert api_client(child["secret"]).get("/api/v1/me").status_code == 403


def test_a_service_account_is_no_person(api_client, organization, alice, ann):
    root = make_service_account(organization, alice, role="owner", name="root")
    secret = post(
        api_client(make_key(organization, alice)), f"{ACCOUNTS}/{root.pk}/keys", name="k", scopes=list(SCOPES)
    ).json()["secret"]
    own, of_alice = api_client(secret), Membership.objects.get(user=alice).pk

    assert post(own, f"/api/v1/members/{of_alice}", role="viewer").json()["error"]["code"] == "last_owner"
    assert own.delete(f"/api/v1/members/{of_alice}").json()["error"]["code"] == "last_owner"
    assert post(own, "/api/v1/invitations", email="new@example.com", role="viewer").status_code == 403
    assert root.pk not in {each["id"] for each in own.get("/api/v1/members").json()["data"]}
    assert root not in list_members(organization=organization)
    for call in (own.get, own.delete):
        assert call(f"/api/v1/members/{root.pk}").status_code == 404
    assert post(own, f"{ACCOUNTS}/{of_alice}", role="viewer").status_code == 404
    user = User.objects.get(pk=root.user_id)
    assert not user.has_usable_password() and not has_verified_address(user=user)
    assert mail._KINDS["password_reset"]({"user_id": user.pk, "email": user.email}) is None
    with pytest.raises(InvalidState, match="needs an owner"):
        remove_member(organization=organization, membership_id=of_alice, by=alice, now=db_now())


def test_a_service_account_changes_no_invitation_and_admits_no_one(api_client, organization, alice, ann):
    root = make_service_account(organization, alice, role="owner", name="root")
    own = api_client(
        post(
            api_client(make_key(organization, alice)), f"{ACCOUNTS}/{root.pk}/keys", name="k", scopes=list(SCOPES)
        ).json()["secret"]
    )
    invitation = invite_member(organization=organization, email="n@example.com", role="viewer", by=alice, now=db_now())

    changed = post(own, "/api/v1/invitations", email="n@example.com", role="owner", only_for_address=False)

    assert changed.status_code == 403
    invitation.refresh_from_db()
    assert (invitation.role, invitation.invited_by) == ("viewer", alice)
    Invitation.objects.update(invited_by=root.user)
    with pytest.raises(InvitationClosed):
        accept_invitation(token=invitation_token(invitation.pk), user=make_user("guest"), now=db_now())


def test_a_service_account_cannot_sign_in(client, account):
    answer = client.post("/accounts/login/", {"login": account.user.email, "password": PASSWORD})

    assert answer.status_code == 200 and "_auth_user_id" not in client.session


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["demoted", "removed"])
def test_a_creator_who_may_no_longer_manage_cannot_return_with_a_kept_key(
    ending, api_client, client_for, organization, alice, ann
):
    root = make_service_account(organization, alice, role="admin", name="root")
    anns = make_key(organization, ann, scopes=frozenset(SCOPES) - {"organization.manage"})
    keys = f"{ACCOUNTS}/{root.pk}/keys"
    wide = sorted(each.value for each in Admin.permissions)
    managing = post(api_client(anns), keys, name="manages", scopes=wide).json()
    rotated = post(api_client(managing["secret"]), f"/api/v1/keys/{managing['id']}/rotate", overlap_hours=24).json()
    child = post(api_client(rotated["secret"]), "/api/v1/keys", name="child", scopes=["view"]).json()
    plain = post(api_client(anns), keys, **VIEWER).json()
    of_alice = post(api_client(make_key(organization, alice)), keys, name="hers", scopes=wide).json()
    membership = Membership.objects.get(user=ann)
    assert b"Replace and revoke it" not in client_for(alice).get("/keys").content

    if ending == "demoted":
        change_role(organization=organization, membership_id=membership.pk, role="member", by=alice, now=db_now())
    else:
        remove_member(organization=organization, membership_id=membership.pk, by=alice, now=db_now())

    statuses = [
        api_client(each["secret"]).get("/api/v1/me").status_code for each in (managing, rotated, child, plain, of_alice)
    ]
    assert statuses == [401, 401, 401, 200, 200]
    assert b"Replace and revoke it" in client_for(alice).get("/keys").content
    entry = AuditEntry.objects.get(action="member.change_role" if ending == "demoted" else "member.remove").details
    assert entry["keys_revoked"] == (3 if ending == "demoted" else 4)
    assert post(api_client(anns), keys, **VIEWER).status_code == (403 if ending == "demoted" else 401)


def test_an_owner_who_becomes_an_admin_keeps_no_key_of_an_owner(api_client, organization, alice):
    other = make_member(organization, "owner")
    root = make_service_account(organization, alice, role="owner", name="root")
    by_other = api_client(make_key(organization, other))
    made = [
        post(by_other, f"{ACCOUNTS}/{root.pk}/keys", name="k", scopes=scopes).json()["secret"]
        for scopes in (list(SCOPES), ["view", "member.manage"])
    ]

    membership = Membership.objects.get(user=other)
    change_role(organization=organization, membership_id=membership.pk, role="admin", by=alice, now=db_now())

    assert [api_client(secret).get("/api/v1/me").status_code for secret in made] == [401, 200]


@pytest.mark.slow
def test_a_key_tells_which_person_knows_it_after_service_accounts_passed_it_on(api_client, organization, alice, ann):
    root = make_service_account(organization, alice, role="admin", name="root")
    reader = make_service_account(organization, alice, role="viewer", name="reader")
    by_ann = api_client(make_key(organization, ann, scopes=frozenset(SCOPES) - {"organization.manage"}))
    scopes = sorted(each.value for each in Admin.permissions)
    first = post(by_ann, f"{ACCOUNTS}/{root.pk}/keys", name="k", scopes=scopes).json()
    own = api_client(first["secret"])

    child = post(own, "/api/v1/keys", **VIEWER).json()
    of_reader = post(own, f"{ACCOUNTS}/{reader.pk}/keys", **VIEWER).json()
    rotated = post(own, f"/api/v1/keys/{of_reader['id']}/rotate").json()
    itself = post(own, f"/api/v1/keys/{first['id']}/rotate", overlap_hours=1).json()

    assert {each["issued_by"] for each in (child, of_reader, rotated, itself)} == {ann.pk}
    of_alice = post(api_client(make_key(organization, alice)), f"/api/v1/keys/{itself['id']}/rotate").json()
    assert of_alice["issued_by"] == alice.pk


def test_keys_that_a_service_account_made_for_another_end_with_it(api_client, organization, alice):
    root = make_service_account(organization, alice, role="admin", name="root")
    reader = make_service_account(organization, alice, role="viewer", name="reader")
    owner = api_client(make_key(organization, alice))
    scopes = sorted(each.value for each in Admin.permissions)
    of_root = post(owner, f"{ACCOUNTS}/{root.pk}/keys", name="k", scopes=scopes).json()
    made = post(api_client(of_root["secret"]), f"{ACCOUNTS}/{reader.pk}/keys", **VIEWER).json()
    stays = post(owner, f"{ACCOUNTS}/{reader.pk}/keys", **VIEWER).json()

    assert owner.delete(f"{ACCOUNTS}/{root.pk}").status_code == 200

    assert [api_client(each["secret"]).get("/api/v1/me").status_code for each in (made, stays)] == [401, 200]
    assert AuditEntry.objects.get(action="member.remove").details["keys_revoked"] == 2


def test_a_key_of_a_service_account_ends_with_the_key_that_made_it(api_client, organization, alice, account):
    leaked = make_key(organization, alice)
    made = post(api_client(leaked), f"{ACCOUNTS}/{account.pk}/keys", **VIEWER).json()

    revoke_key(organization=organization, key_id=leaked.key.pk, by=alice, now=db_now())

    assert api_client(made["secret"]).get("/api/v1/me").status_code == 401


@pytest.mark.parametrize("scope", ["key", "member"])
def test_a_budget_is_not_left_through_a_service_account(scope, api_client, client_for, organization, ann, account):
    key = make_key(organization, ann, scopes=frozenset(SCOPES) - {"organization.manage"})
    target = key.key.pk if scope == "key" else ann.pk
    set_budget(
        organization=organization, scope=scope, target=target, limit_nano=USD, mode="block", by="user_1", now=db_now()
    )

    made = post(api_client(key), f"{ACCOUNTS}/{account.pk}/keys", **VIEWER)

    assert made.status_code == 403 and "budget" in made.json()["error"]["message"]
    page = client_for(ann).post("/keys", {"name": "k", "scopes": "view", "service_account": account.pk})
    assert page.status_code == (302 if scope == "key" else 422)
    assert ApiKey.objects.filter(created_by=account.user).exists() == (scope == "key")


def test_the_number_of_service_accounts_is_limited(monkeypatch, api_client, organization, alice, account):
    monkeypatch.setattr(service_accounts, "MAX_SERVICE_ACCOUNTS", 1)
    owner = api_client(make_key(organization, alice))

    assert post(owner, ACCOUNTS, name="more", role="viewer").status_code == 400
    assert owner.delete(f"{ACCOUNTS}/{account.pk}").status_code == 200
    assert post(owner, ACCOUNTS, name="more", role="viewer").status_code == 429
    assert User.objects.exclude(service_account_of=None).count() == 1


def test_the_dashboard_creates_and_removes_a_service_account(client_for, organization, alice, bob):
    browser = client_for(alice)
    assert browser.post("/service-accounts", {"name": "ci", "role": "member"}).status_code == 302
    account = Membership.objects.service_accounts().get()
    assert browser.post("/service-accounts", {"name": "CI", "role": "member"}).status_code == 422

    assert browser.post("/keys", {"name": "k", "scopes": "view", "service_account": account.pk}).status_code == 302

    assert ApiKey.objects.get().created_by == account.user
    page = client_for(bob).get("/service-accounts").content.decode()
    assert "ci" in page and "Create service account" not in page
    browser.post(f"/service-accounts/{account.pk}/role", {"role": "viewer"})
    account.refresh_from_db()
    assert account.role == "viewer"
    browser.post(f"/service-accounts/remove?account={account.pk}", {"account": account.pk, "confirm": "ci"})
    assert ApiKey.objects.get().revoked_by == alice and make_member(organization, "viewer")
