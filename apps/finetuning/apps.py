from django.apps import AppConfig


class FinetuningConfig(AppConfig):
    name = "apps.finetuning"
    label = "finetuning"
    default_auto_field = "django.db.models.BigAutoField"
