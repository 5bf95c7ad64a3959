from django.apps import AppConfig


class WorkerApiConfig(AppConfig):
    name = "apps.interfaces.worker_api"
    label = "worker_api"
    default_auto_field = "django.db.models.BigAutoField"
