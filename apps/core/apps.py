from django.apps import AppConfig
from django.conf import settings
from django.db.models.signals import post_migrate

from apps.core.database.policies import write_policies_after_migrate
from apps.core.errors import DomainError


class CoreConfig(AppConfig):
    name = "apps.core"

    def ready(self) -> None:
        """Write row-level security and grants once every table exists. `core` is last in INSTALLED_APPS.

        Errors get the address of their help.
        """
        DomainError.help_page = f"{settings.PUBLIC_URL}/help/errors"
        post_migrate.connect(write_policies_after_migrate, sender=self, dispatch_uid="anneal.write_policies")
