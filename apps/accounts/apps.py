from django.apps import AppConfig, apps
from django.contrib.auth.signals import user_logged_in


class AccountsConfig(AppConfig):
    name = "apps.accounts"

    def ready(self) -> None:
        """Connect the sign-in and second-factor signals, in processes where people sign in."""
        if not apps.is_installed("allauth.mfa"):
            return
        from allauth.mfa import signals  # noqa: PLC0415 - imports models

        from apps.accounts.login import second_factor, sessions  # noqa: PLC0415 - imports models

        user_logged_in.connect(sessions.note_sign_in)
        signals.authenticator_added.connect(second_factor.note_added)
        signals.authenticator_removed.connect(second_factor.note_removed)
        signals.authenticator_reset.connect(second_factor.note_reset)
        signals.authentication_failed.connect(second_factor.note_failed)
