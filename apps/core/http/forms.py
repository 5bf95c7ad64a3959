"""Showing an anticipated failure on the form that caused it."""

from django.forms import BaseForm

from apps.core.errors import DomainError

LARGEST_INTEGER = 2**31 - 1  # what a column of integers holds
LARGEST_BIG_INTEGER = 2**63 - 1


def add_domain_error(form: BaseForm, error: DomainError) -> None:
    """Put the sentence at the field the error names, or above the form when it has no such field."""
    form.add_error(error.param if error.param in form.fields else None, error.message)
