"""What members keep of the playground: their own conversations, and presets of their own or of the organization."""

import json
import re

import pytest

from apps.accounts.members.memberships import remove_member
from apps.accounts.models import Membership
from apps.accounts.operations import create_region, set_regions
from apps.core.database.clock import db_now
from apps.playground import conversations, presets
from apps.playground.models import Preset, SavedConversation
from tests.factories.accounts import make_member
from tests.support.pages import text

pytestmark = pytest.mark.usefixtures("floor")

TURNS = [
    {"role": "user", "content": "My <card> is lost", "vote": ""},
    {"role": "assistant", "content": "lost_card", "vote": "up"},
]
SETTINGS = {"models": ["anneal-demo"], "system": "Sort.", "temperature": 0.7, "response_format": "json_schema"}


def keep(client, **changes):
    body = {"settings": SETTINGS, "columns": [TURNS], "id": ""} | changes
    return client.post("/playground/conversations", json.dumps(body), content_type="application/json")


def save(client, name: str = "Terse", *, settings: dict | None = None, **fields):
    form = {"name": name, "settings": json.dumps(SETTINGS if settings is None else settings)} | fields
    return client.post("/playground/presets", form, HTTP_HX_REQUEST="true")


def field(page: str, name: str) -> str:
    return re.search(rf'value="([^"]*)"[^>]*data-param="{name}"', page)[1]


# --- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_opens_again_with_its_messages_votes_and_settings(client_for, bob):
    kept = keep(client_for(bob)).json()["id"]

    page = client_for(bob).get(f"/playground?conversation={kept}").content.decode()

    assert "My &lt;card&gt; is lost</div>" in page and ">lost_card</div>" in page
    assert re.search(r'data-vote="up"\s+aria-pressed="true"', page)
    assert ">Sort.</textarea>" in page and field(page, "temperature") == "0.7"
    assert re.search(r'value="json_schema"\s+selected', page)
    assert f'data-conversation="{kept}"' in page


def test_the_next_state_replaces_the_last_one_and_the_list_names_the_first_message(client_for, bob):
    kept = keep(client_for(bob)).json()
    again = keep(client_for(bob), **kept, columns=[TURNS * 2]).json()

    assert again["id"] == kept["id"]
    assert len(SavedConversation.objects.get().transcript.columns[0]) == 4
    assert keep(client_for(bob), **kept).json()["id"] != kept["id"], "another page has changed it since"
    assert f'data-kept-at="{again["kept_at"]}"' in text(client_for(bob).get(f"/playground?conversation={again['id']}"))
    assert "My <card> is lost" in text(client_for(bob).get("/playground/saved"))


def test_nothing_is_kept_for_an_organization_that_may_store_nothing_here(client_for, bob, organization):
    assert "are not kept" not in text(client_for(bob).get("/playground"))
    create_region(name="eu", by="user_operator")
    set_regions(organization=organization, regions=("eu",), by="user_operator")

    page = client_for(bob).get("/playground")
    refused = keep(client_for(bob)), save(client_for(bob))

    assert "Your conversations and settings are not kept." in text(page)
    assert b"data-keep-url" not in page.content and b'data-open="save-preset"' not in page.content
    assert [answer.status_code for answer in refused] == [403, 422]
    assert not SavedConversation.objects.exists() and not Preset.objects.exists()


def test_a_conversation_is_its_members_alone(client_for, alice, bob):
    kept = keep(client_for(bob)).json()["id"]

    other = keep(client_for(alice), id=kept).json()["id"]
    client_for(alice).post("/playground/saved/delete", {"conversation": kept})

    assert other != kept
    assert client_for(alice).get(f"/playground?conversation={kept}").status_code == 404
    assert SavedConversation.objects.filter(pk=kept).exists()


def test_the_oldest_conversations_give_way(client_for, bob, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 2)

    kept = [keep(client_for(bob)).json()["id"] for _ in range(3)]

    assert set(SavedConversation.objects.values_list("pk", flat=True)) == set(kept[1:])


def test_one_conversation_or_all_are_deleted(client_for, bob):
    first, *_ = (keep(client_for(bob)).json()["id"] for _ in range(3))

    client_for(bob).post("/playground/saved/delete", {"conversation": first})
    one = SavedConversation.objects.count()
    client_for(bob).post("/playground/saved/delete")

    assert (one, SavedConversation.objects.count()) == (2, 0)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"columns": [[TURNS[0] | {"content": "x" * 40_000}] * 2]}, 413),
        ({"columns": [[TURNS[0] | {"content": "a\x00b"}]]}, 400),
        ({"columns": []}, 400),
        ({"settings": {"temperature": 9}}, 400),
        ({"settings": {"seed": 2**70}}, 400),
        ({"id": "a\x00"}, 400),
    ],
)
def test_what_cannot_be_kept_is_refused_with_a_sentence(client_for, bob, changes, status):
    refused = keep(client_for(bob), **changes)

    assert refused.status_code == status
    assert SavedConversation.objects.count() == 0


def test_conversations_and_own_presets_end_with_the_membership(organization, client_for, alice, bob):
    keep(client_for(bob))
    save(client_for(bob), "Mine")
    save(client_for(bob), "Ours", is_shared="on")
    membership = Membership.objects.get(organization=organization, user=bob)

    remove_member(organization=organization, membership_id=membership.pk, by=alice, now=db_now())

    assert SavedConversation.objects.count() == 0
    assert list(Preset.objects.values_list("name", flat=True)) == ["Ours"]


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_preset_opens_the_playground_with_its_settings(client_for, bob):
    saved = save(client_for(bob))

    page = client_for(bob).get(saved["HX-Redirect"]).content.decode()

    assert ">Sort.</textarea>" in page and field(page, "temperature") == "0.7" and field(page, "seed") == ""
    assert page.count("data-play-col") == 1


def test_the_conversation_in_the_page_stays_when_its_settings_are_saved(client_for, bob):
    kept = keep(client_for(bob)).json()["id"]
    form = {"name": "Plain", "settings": "{}"}
    here = f"http://testserver/playground?conversation={kept}"

    saved = client_for(bob).post("/playground/presets", form, HTTP_HX_REQUEST="true", HTTP_HX_CURRENT_URL=here)
    page = client_for(bob).get(saved["HX-Redirect"]).content.decode()

    assert ">lost_card</div>" in page and ">Sort.</textarea>" not in page


@pytest.mark.slow
def test_only_a_shared_preset_is_seen_by_other_members(client_for, alice, bob):
    save(client_for(bob), "Mine")
    save(client_for(bob), "Ours", is_shared="on")
    mine = Preset.objects.get(name="Mine")

    page = text(client_for(alice).get("/playground"))

    assert "Ours</a>" in page and "Mine</a>" not in page
    assert client_for(alice).get(f"/playground?preset={mine.pk}").status_code == 404
    assert client_for(alice).get(f"/playground/presets/delete?preset={mine.pk}").status_code == 404


@pytest.mark.slow
def test_only_its_creator_and_admins_replace_and_delete_a_shared_preset(client_for, alice, bob, organization):
    eve = client_for(make_member(organization, "member", "eve"))
    save(client_for(bob), "Ours", is_shared="on")
    ours = Preset.objects.get()

    refused = save(eve, "Ours", is_shared="on", settings={"system": "Send me the data."})
    kept = eve.post("/playground/presets/delete", {"preset": ours.pk, "confirm": "Ours"}, follow=True)

    assert refused.status_code == 422 and "Only the member who shared a preset" in text(kept)
    assert "Another member shares a preset with this name" in text(refused)
    assert f"/presets/delete?preset={ours.pk}" not in text(eve.get("/playground/saved"))
    assert Preset.objects.get().settings.system == "Sort."
    save(client_for(bob), "Ours", is_shared="on", settings={"system": "Anew."})
    assert Preset.objects.get().settings.system == "Anew."
    client_for(alice).post("/playground/presets/delete", {"preset": ours.pk, "confirm": "Ours"})
    assert Preset.objects.count() == 0


def test_a_form_that_cannot_be_saved_says_why_at_its_field(client_for, bob, monkeypatch):
    monkeypatch.setattr(presets, "MAX_PRESETS", 1)
    save(client_for(bob), "First")

    full, nameless = save(client_for(bob), "Second"), save(client_for(bob), "")
    broken = client_for(bob).post("/playground/presets", {"name": "x", "settings": "{"}, HTTP_HX_REQUEST="true")

    assert [answer.status_code for answer in (full, nameless, broken)] == [422, 422, 422]
    assert "Delete one first." in text(full)
    assert 'id="preset_name_error"' in text(nameless)
    assert "not valid JSON" in text(broken)


def test_a_viewer_keeps_nothing_and_is_offered_nothing_to_save(client_for, vera):
    assert keep(client_for(vera)).status_code == 403
    assert save(client_for(vera)).status_code == 403
    assert "Save these settings" not in text(client_for(vera).get("/playground"))


def test_text_that_looks_like_an_escaped_nul_is_kept(client_for, bob):
    assert keep(client_for(bob), columns=[[TURNS[0] | {"content": r"a\u0000b"}]]).status_code == 200
