"""Stored English sentences are shown in the reader's language; what the catalogue does not have stays."""

import pytest
from django.utils.translation import override

from apps.core.messages.translation import translated


@pytest.mark.parametrize(
    ("english", "german"),
    [
        ("The file is empty.", "Die Datei ist leer."),
        ("The row has 9 messages; 5 are allowed.", "Die Zeile hat 9 Nachrichten; 5 sind erlaubt."),
        ("`messages[2].content` is missing.", "`messages[2].content` fehlt."),
        # A value that is a text itself.
        ("The file is a PNG image, not training data.", "Die Datei ist ein PNG-Bild, keine Trainingsdaten."),
        ("Failed: The GPU reported a fault.", "Fehlgeschlagen: Die GPU hat einen Fehler gemeldet."),
        ("Invoice 2026-12-00001 for December 2026", "Rechnung 2026-12-00001 für Dezember 2026"),
        # Sentences that were joined, one of which is unknown.
        (
            "Unknown key `x`. Ask Bob. Keep each key once.",
            "Unbekannter Schlüssel `x`. Ask Bob. Behalten Sie jeden Schlüssel einmal.",
        ),
        ("h100: No worker is online.", "h100: Kein Worker ist online."),
        # A value that looks like the text around it, and one with a per cent sign.
        ("No such file: 100% of .jsonl.", "Diese Datei gibt es nicht: 100% of .jsonl."),
        ("Nothing of this is known", "Nothing of this is known"),
        ("", ""),
    ],
)
def test_a_sentence_is_translated_with_its_values(english, german):
    with override("de"):
        assert translated(english) == german
    with override("en"):
        assert translated(english) == english


def test_a_text_made_to_be_slow_takes_no_time():
    with override("de"):
        assert "Failed: " not in translated("Failed: " * 120 + "x")
        assert translated("Failed: " * 1_000) == "Failed: " * 1_000
