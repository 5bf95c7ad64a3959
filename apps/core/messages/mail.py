"""Mail as text and HTML. A mail is written once, as text. Its HTML is made from the lines of the text.

A line of HTML links only to this installation, and only if the text ends in one of its addresses: `Try it: https://…`.
So a name or note that a person chose never becomes a link.
"""

import logging
import re
import smtplib
from collections.abc import Sequence
from functools import cache

from django.conf import settings
from django.core.mail import EmailMessage, EmailMultiAlternatives
from django.template.loader import render_to_string
from django.utils.translation import override

logger = logging.getLogger(__name__)
# RFC 3463 §3.2: bad mailbox, bad system, bad syntax, mailbox has moved; RFC 7505: a domain without mail. Other refusals
# may be the fault of this installation, such as a relay that is not allowed.
_NO_SUCH_ADDRESS = re.compile(rb"5\.1\.(?:1|2|3|6|10)\b")


def render_mail(template: str, *, to: Sequence[str], language: str, **context: object) -> EmailMultiAlternatives:
    """Return the mail that `mail/<template>.txt` describes; its first line is the subject. "" is English."""
    with override(language or settings.LANGUAGE_CODE):
        text = render_to_string(f"mail/{template}.txt", context | {"public_url": settings.PUBLIC_URL})
        subject, _, body = text.strip().partition("\n")
        return write_mail(subject, body, to=to)


def write_mail(subject: str, body: str, *, to: Sequence[str]) -> EmailMultiAlternatives:
    """Return a mail with this text, and with the same text as HTML."""
    subject, body = " ".join(subject.split()), re.sub(r"\n{3,}", "\n\n", body.strip())
    message = EmailMultiAlternatives(subject, body + "\n", settings.DEFAULT_FROM_EMAIL, list(to))
    paragraphs = [[_line(line) for line in paragraph.splitlines()] for paragraph in body.split("\n\n")]
    html = render_to_string("mail/layout.html", {"subject": subject, "paragraphs": paragraphs})
    message.attach_alternative(html, "text/html")
    return message


def send_mail(message: EmailMessage) -> None:
    """Send a mail. If the server says that no recipient's address exists, a retry would change nothing: it is done.

    Raises smtplib.SMTPException and OSError, after which it may be sent again.
    """
    try:
        message.send()
    except smtplib.SMTPRecipientsRefused as error:
        if not all(_NO_SUCH_ADDRESS.match(reply) for _, reply in error.recipients.values()):
            raise
        logger.warning("the mail server refused all %d recipients of a mail", len(error.recipients))


def _line(line: str) -> dict[str, str]:
    """Return a line as its text and the link that ends it; a line that is only a link becomes a button."""
    match = _ending_in_link(settings.PUBLIC_URL).fullmatch(line)
    return match.groupdict("") if match else {"text": line}


@cache
def _ending_in_link(public_url: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<text>.*[.!?] )?(?:(?P<label>[^:]+): )?(?P<url>{re.escape(public_url)}/\S*)")
