from django.apps import AppConfig


class StaffConfig(AppConfig):
    name = "apps.interfaces.staff"
    label = "staff"
    default_auto_field = "django.db.models.BigAutoField"
