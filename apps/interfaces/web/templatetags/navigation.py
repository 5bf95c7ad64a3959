"""Template tags for the navigation of the current request."""

from django import template
from django.template import Context

from apps.interfaces.web.shell.navigation import (
    NavigationLink,
    Section,
    actions,
    help_url,
    places_of_everybody,
    sections,
)

register = template.Library()


@register.simple_tag(takes_context=True)
def nav_sections(context: Context) -> list[Section]:
    return sections(context["request"])


@register.simple_tag
def nav_everybody() -> list[NavigationLink]:
    return places_of_everybody()


@register.simple_tag(takes_context=True)
def nav_help(context: Context) -> str:
    return help_url(context["request"])


@register.simple_tag(takes_context=True)
def nav_actions(context: Context) -> list[NavigationLink]:
    return actions(context["request"])
