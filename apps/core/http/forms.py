"""Display of anticipated failures: on the form that caused them, or above the next page."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from django.contrib import messages
from django.forms import BaseForm
from django.http import HttpRequest

from apps.core.errors import DomainError

LARGEST_INTEGER = 2**31 - 1  # the maximum of an integer column
LARGEST_BIG_INTEGER = 2**63 - 1


def with_plain_breaks(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with line breaks of one character, as scripts send them.

    Browsers themselves send two characters.
    """
    return {name: value.replace("\r\n", "\n") if isinstance(value, str) else value for name, value in values.items()}


@contextmanager
def domain_errors_on(form: BaseForm) -> Iterator[None]:
    """Put a DomainError of the block on the field that it names, or above the form if it has no such field."""
    try:
        yield
    except DomainError as error:
        form.add_error(error.param if error.param in form.fields else None, error.message)


@contextmanager
def domain_errors_shown(request: HttpRequest) -> Iterator[None]:
    """Show a DomainError of the block above the next page."""
    try:
        yield
    except DomainError as error:
        messages.error(request, error.message)
