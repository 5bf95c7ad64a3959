"""The pages of allauth that we show. Its own list has more, each a form to guard and to style."""

from allauth.account import views
from django.urls import path, re_path
from django.views.decorators.http import require_http_methods, require_safe

# allauth takes a PUT for a POST, and some of its pages answer a POST that means nothing.
form = require_http_methods(["GET", "HEAD", "POST"])
page = require_safe

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
    # Our user ids contain an underscore, which allauth's own pattern does not match.
    re_path(
        r"^password/reset/key/(?P<uidb36>\w+)-(?P<key>.+)/$",
        form(views.password_reset_from_key),
        name="account_reset_password_from_key",
    ),
]
