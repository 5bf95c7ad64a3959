"""Figures, times and states as pages write them."""

import datetime

import pytest
from django import forms
from django.utils.safestring import SafeString
from django.utils.translation import override

from apps.core.templatetags import ui
from apps.core.templatetags.statuses import StatusLabel

NOW = datetime.datetime(2026, 11, 21, 12, 0, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (1_240_000_000, "$1.24"),
        (0, "$0.00"),
        (400_000, "0.04¢"),
        (425_000, "0.043¢"),
        (9_960_000, "$0.01"),
        (25, "0.0000025¢"),
        (1_234_567_890_000, "$1,234.57"),
        (-2_500_000_000, "\N{MINUS SIGN}$2.50"),
        (None, "\N{EN DASH}"),
    ],
)
def test_money_keeps_cents_and_shows_two_digits_of_a_fraction_of_one(nano: int | None, text: str) -> None:
    assert ui.usd(nano) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (950, "950"),
        (8_192, "8,192"),
        (18_240, "18.2K"),
        (9_420_000, "9.42M"),
        (999_700, "1M"),
        (1_200_000_000, "1.2B"),
        (100_000, "100K"),
    ],
)
def test_token_counts_are_exact_to_four_digits_then_have_three_significant_ones(count: int, text: str) -> None:
    assert ui.tokens(count) == text


def test_sizes_are_decimal_and_device_memory_is_binary() -> None:
    assert ui.bytes_(61_400_000) == "61.4 MB"
    assert ui.bytes_(999) == "999 B"
    assert ui.memory(80 * ui.GIB) == "80 GiB"
    assert ui.memory(int(44.3 * ui.GIB)) == "44.3 GiB"


@pytest.mark.parametrize(
    ("seconds", "exact", "rough"),
    [
        (9, "9s", "under 1 min"),
        (0.13, "0.1s", "under 1 min"),
        (220, "3m 40s", "4 min"),
        (3_000, "50m 00s", "50 min"),
        (5_040, "1h 24m", "1h 24m"),
        (3_590, "59m 50s", "1h 00m"),
        (183_600, "2d 3h", "2d 3h"),
    ],
)
def test_measured_spans_are_exact_and_estimated_ones_are_not(seconds: float, exact: str, rough: str) -> None:
    assert ui.duration(seconds) == exact
    assert ui.about(seconds) == rough


@pytest.mark.parametrize(
    ("share", "text"), [(0.314, "31%"), (0, "0%"), (1, "100%"), (0.0004, "<1%"), (0.999, ">99%"), (None, "\N{EN DASH}")]
)
def test_a_share_is_never_rounded_to_none_or_all(share: float | None, text: str) -> None:
    assert ui.percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(10, "just now"), (180, "3 min ago"), (7_200, "2 h ago"), (3 * 86_400, "3 d ago"), (-3_600, "in 1 h")],
)
def test_moments_are_told_by_distance(monkeypatch: pytest.MonkeyPatch, seconds: int, text: str) -> None:
    monkeypatch.setattr(ui.timezone, "now", lambda: NOW)

    assert ui.ago(NOW - datetime.timedelta(seconds=seconds)) == text


def test_a_time_element_carries_utc_for_machines_and_readers() -> None:
    html = ui.moment(NOW, "datetime")

    assert 'datetime="2026-11-21T12:00:00+00:00"' in html
    assert 'title="2026-11-21 12:00:00 UTC"' in html
    assert ">21 Nov 2026, 12:00 UTC<" in html


@pytest.mark.parametrize(
    ("language", "date", "moment"),
    [("en", "4 Oct 2026", "4 Oct 2026, 09:05 UTC"), ("de", "04.10.2026", "04.10.2026, 09:05 UTC")],
)
def test_a_moment_is_written_as_the_language_writes_it(language: str, date: str, moment: str) -> None:
    then = datetime.datetime(2026, 10, 4, 9, 5, tzinfo=datetime.UTC)

    with override(language):
        shown = [ui.moment(then, style) for style in ("date", "time", "datetime")]

    assert [text.partition(">")[2] for text in shown] == [f"{date}</time>", "09:05 UTC</time>", f"{moment}</time>"]


def test_a_state_nobody_listed_is_shown_by_its_own_name() -> None:
    assert ui.status("half_open") == StatusLabel("Half open")
    assert ui.status("succeeded").tone == "ok"


@pytest.mark.parametrize(
    ("name", "text"), [("Mira Okafor", "MO"), ("mira.okafor@example.com", "MO"), ("x", "X"), ("", "?")]
)
def test_initials_come_from_a_name_or_an_address(name: str, text: str) -> None:
    assert ui.initials(name) == text


class _Form(forms.Form):
    name = forms.CharField(help_text="Shown in lists.")
    note = forms.CharField(widget=forms.Textarea)
    agreed = forms.BooleanField()


def test_controls_get_the_class_of_their_kind_and_name_their_help_and_error() -> None:
    form = _Form({"name": ""})

    name = ui.control(form["name"], data_filter="1")
    assert 'class="input"' in name
    assert 'data-filter="1"' in name
    assert 'aria-invalid="true"' in name
    assert 'aria-describedby="id_name_helptext id_name_error"' in name
    assert 'rows="4"' in ui.control(form["note"])
    assert 'class="switch"' in ui.control(form["agreed"], **{"class": "switch"})
    assert ui.control_kind(form["agreed"]) == "check"


def test_an_icons_label_is_escaped_although_the_same_text_was_safe_before() -> None:
    assert "<b>" in ui.icon("menu", label=SafeString("<b>"))
    assert "&lt;b&gt;" in ui.icon("menu", label="<b>")


@pytest.mark.parametrize(
    ("nano", "shown"),
    [
        (116_333_333, "$0.117"),
        (116_000_000, "$0.116"),
        (5_000_000_001, "$5.01"),
        (1, "$0.000000001"),
        (None, "\N{EN DASH}"),
    ],
)
def test_the_least_that_a_person_may_enter_is_rounded_up(nano: int | None, shown: str) -> None:
    assert ui.usd_least(nano) == shown
