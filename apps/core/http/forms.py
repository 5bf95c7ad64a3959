"""Display of anticipated failures on the form that caused them."""

from django.forms import BaseForm

from apps.core.errors import DomainError

LARGEST_INTEGER = 2**31 - 1  # the maximum of an integer column
LARGEST_BIG_INTEGER = 2**63 - 1


def add_domain_error(form: BaseForm, error: DomainError) -> None:
    """Add the message to the field that the error names, or to the top of the form if it has no such field."""
    form.add_error(error.param if error.param in form.fields else None, error.message)
