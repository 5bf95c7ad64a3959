"""The allauth pages that we use. allauth's own list has more, and each would need checks and styles."""

from allauth.account import views
from allauth.mfa.base import views as mfa
from allauth.mfa.recovery_codes import views as recovery_codes
from allauth.mfa.totp import views as totp
from allauth.mfa.webauthn import views as webauthn
from django.urls import path, re_path, reverse_lazy
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.login.second_factor import limited

# allauth treats a PUT as a POST, and some of its pages answer a POST that has no meaning.
form = require_http_methods(["GET", "HEAD", "POST"])
page = require_safe

_remove_passkey = webauthn.RemoveWebAuthnView.as_view(success_url=reverse_lazy("mfa_index"))

urlpatterns = [
    path("login/", form(views.login), name="account_login"),
    path("logout/", form(views.logout), name="account_logout"),
    path("signup/", form(views.signup), name="account_signup"),
    path("inactive/", page(views.account_inactive), name="account_inactive"),
    path("confirm-email/", page(views.email_verification_sent), name="account_email_verification_sent"),
    re_path(r"^confirm-email/(?P<key>[-:\w]+)/$", form(views.confirm_email), name="account_confirm_email"),
    path("password/change/", form(views.password_change), name="account_change_password"),
    path("password/reset/", form(views.password_reset), name="account_reset_password"),
    path("password/reset/done/", page(views.password_reset_done), name="account_reset_password_done"),
    path(
        "password/reset/key/done/",
        page(views.password_reset_from_key_done),
        name="account_reset_password_from_key_done",
    ),
    # Our user ids contain an underscore, which allauth's pattern does not match.
    re_path(
        r"^password/reset/key/(?P<uidb36>\w+)-(?P<key>.+)/$",
        form(views.password_reset_from_key),
        name="account_reset_password_from_key",
    ),
    path("reauthenticate/", form(views.reauthenticate), name="account_reauthenticate"),
    path("second-factor/", page(mfa.index), name="mfa_index"),
    path("second-factor/ask/", form(mfa.authenticate), name="mfa_authenticate"),
    path("second-factor/confirm/", form(mfa.reauthenticate), name="mfa_reauthenticate"),
    path("second-factor/app/add/", form(limited(totp.activate_totp)), name="mfa_activate_totp"),
    path("second-factor/app/remove/", form(totp.deactivate_totp), name="mfa_deactivate_totp"),
    path("second-factor/recovery-codes/", page(recovery_codes.view_recovery_codes), name="mfa_view_recovery_codes"),
    path(
        "second-factor/recovery-codes/new/",
        form(limited(recovery_codes.generate_recovery_codes)),
        name="mfa_generate_recovery_codes",
    ),
    path("second-factor/passkeys/add/", form(limited(webauthn.add_webauthn)), name="mfa_add_webauthn"),
    path("second-factor/passkeys/confirm/", form(webauthn.reauthenticate_webauthn), name="mfa_reauthenticate_webauthn"),
    path("second-factor/passkeys/<int:pk>/remove/", form(_remove_passkey), name="mfa_remove_webauthn"),
]
