from django.apps import AppConfig
from django.db.models.signals import post_migrate

from apps.core.database.policies import write_policies_after_migrate


class CoreConfig(AppConfig):
    name = "apps.core"

    def ready(self) -> None:
        """Write row-level security and grants once every table exists. `core` is last in INSTALLED_APPS."""
        post_migrate.connect(write_policies_after_migrate, sender=self, dispatch_uid="anneal.write_policies")
