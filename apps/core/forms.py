"""Showing an anticipated failure on the form that caused it."""

from django.forms import BaseForm

from apps.core.errors import DomainError


def add_domain_error(form: BaseForm, error: DomainError) -> None:
    """Put the sentence at the field the error names, or above the form when it has no such field."""
    form.add_error(error.param if error.param in form.fields else None, error.message)
