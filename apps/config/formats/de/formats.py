"""German pages show figures as English ones do, because amounts, code and charts do so too."""

from django.conf.locale.en.formats import *  # type: ignore[import-untyped]  # noqa: F403
