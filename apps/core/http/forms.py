"""Display of anticipated failures on the form that caused them."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.forms import BaseForm

from apps.core.errors import DomainError

LARGEST_INTEGER = 2**31 - 1  # the maximum of an integer column
LARGEST_BIG_INTEGER = 2**63 - 1


@contextmanager
def domain_errors_on(form: BaseForm) -> Iterator[None]:
    """Put a DomainError of the block on the field that it names, or on top of the form if it has no such field."""
    try:
        yield
    except DomainError as error:
        form.add_error(error.param if error.param in form.fields else None, error.message)
