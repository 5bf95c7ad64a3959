"""A mail is written once, as text, and is sent as text and HTML that say the same."""

import smtplib
from collections.abc import Sequence
from typing import Any

import pytest
from django.core.mail import EmailMessage
from django.core.mail.backends.smtp import EmailBackend

from apps.core.messages.mail import send_mail, write_mail


@pytest.fixture(autouse=True)
def _public_url(settings: Any) -> None:
    settings.PUBLIC_URL = "https://anneal.example"


def as_html(body: str) -> str:
    return str(write_mail("Your\nsubject", body, to=["a@example.com"]).alternatives[0][0])


def test_a_mail_has_its_text_and_the_same_as_html() -> None:
    message = write_mail("Your\nsubject", "First.\n\n\n\nSecond.\n", to=["a@example.com"])

    assert (message.subject, message.body) == ("Your subject", "First.\n\nSecond.\n")
    html = as_html(message.body)
    assert html.count("<p") == 3 and "First." in html and "Second." in html and "color-scheme" in html


def test_a_line_that_is_a_link_is_a_button_and_a_sentence_keeps_its_link() -> None:
    html = as_html("Try it: https://anneal.example/a?b=1\n\nYou made it. Turn it off: https://anneal.example/account")

    button, link = html.split("<a")[1:]
    assert 'href="https://anneal.example/a?b=1"' in button and 'class="button"' in button and ">Try it</a>" in button
    assert 'href="https://anneal.example/account"' in link and ">Turn it off</a>" in link and "You made it." in button


@pytest.mark.parametrize(
    "line",
    ["Open: https://evil.example/", "Open: https://anneal.example.evil.example/", "Open: javascript:alert(1)"],
)
def test_no_text_becomes_a_link_to_elsewhere_and_none_becomes_markup(line: str) -> None:
    assert "<a" not in as_html(line)
    assert "<b>" not in as_html("<b>bold</b>") and "&lt;b&gt;" in as_html("<b>bold</b>")


class Relay(EmailBackend):
    """A mail server that refuses every recipient, each with its own reply."""

    replies: tuple[tuple[int, bytes], ...] = ()

    def send_messages(self, messages: Sequence[EmailMessage]) -> int:
        recipients = [address for message in messages for address in message.to]
        raise smtplib.SMTPRecipientsRefused(dict(zip(recipients, self.replies, strict=True)))


def test_a_mail_to_addresses_that_do_not_exist_is_not_sent_again(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.EMAIL_BACKEND = f"{__name__}.Relay"
    message = write_mail("Subject", "Text.", to=["a@example.com", "b@example.com"])

    unknown = (550, b"5.1.1 <a@example.com>: Recipient address rejected: User unknown")
    monkeypatch.setattr(Relay, "replies", (unknown, (553, b"5.1.3 Bad address syntax")))
    send_mail(message)

    for other in ((450, b"4.2.1 Mailbox is busy"), (550, b"5.7.1 Relaying denied"), (530, b"Log in first")):
        monkeypatch.setattr(Relay, "replies", (unknown, other))
        with pytest.raises(smtplib.SMTPRecipientsRefused):
            send_mail(message)
