from django.apps import AppConfig, apps


class BillingConfig(AppConfig):
    name = "apps.billing"

    def ready(self) -> None:
        """Connect the confirmation of an address, in processes where people sign in."""
        if not apps.is_installed("allauth.account"):
            return
        from allauth.account.signals import email_confirmed  # noqa: PLC0415 - imports models

        from apps.billing.books.welcome import grant_after_confirmation  # noqa: PLC0415 - imports models

        email_confirmed.connect(grant_after_confirmation)
