"""Settings of every process. dev, test, prod and internal change only the differences."""

import sys
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.urls import reverse_lazy

from apps.config.env import ROOT, read_env
from apps.config.mail import read_mail_url
from apps.config.settings.grants import *  # noqa: F403
from apps.config.settings.outbox import *  # noqa: F403
from apps.contracts.addresses.replicas import AddressRules

ENV = read_env()

DEBUG = ENV.debug
SECRET_KEY = ENV.secret_key
SECRET_KEY_FALLBACKS = list(ENV.secret_key_fallbacks)
KEY_PEPPER = ENV.key_pepper
SIGNING_KEY = ENV.signing_key
HOME = ENV.home
PUBLIC_URL = ENV.public_url
INTERNAL_URL = ENV.internal_url
GATEWAY_URL = ENV.gateway_url
WORKER_GATEWAY_URL = ENV.worker_gateway_url
OBJECT_STORE = ENV.object_store
BACKUP_KEYS = ENV.backup_keys
REDIS_URL = ENV.redis_url
BROKER_URL = ENV.broker_url
BASE_MODEL_ROOTS = ENV.base_model_roots
HUB_URL = ENV.hub_url
HUB_BLOB_HOSTS = ENV.hub_blob_hosts
HUB_PUSHES = ENV.hub_pushes
STRIPE_SECRET_KEY = ENV.stripe_secret_key
STRIPE_WEBHOOK_SECRET = ENV.stripe_webhook_secret
STRIPE_PORTAL_CONFIGURATION = ENV.stripe_portal
STRIPE_TAX = ENV.stripe_tax
STRIPE_METER = ENV.stripe_meter
# Whether webhooks may be sent to private addresses, and over http to this machine.
PRIVATE_WEBHOOKS = ENV.private_webhooks
STRIPE_API_BASE = ENV.stripe_api_base
# Choices that one gateway runs on one replica at once. An engine accepts ANNEAL_ENGINE_MAX_QUEUED_REQUESTS in all.
REPLICA_PLACES = ENV.replica_places
# The hosts from which engines of multimodal models may fetch images and audio. The engines have the same list.
MEDIA_HOSTS = frozenset(ENV.media_hosts)
# Where replicas may be without an operator's approval, and which local addresses they may have.
REPLICA_ADDRESSES = AddressRules.read(ENV.replica_addresses)
# The largest file that an upload in parts may make, in bytes as sent: for a gzip archive, its compressed size.
MAX_UPLOAD_BYTES = ENV.max_upload_bytes
# After this time without progress, a worker ends its run; the control plane ends it after twice as long.
STALL_SECONDS = ENV.stall_seconds
# Without traces, OpenTelemetry is as good as not installed: redis would import its SDK, half a second of each start.
TRACES_ENDPOINT = ENV.traces_endpoint
if not TRACES_ENDPOINT:
    sys.modules.setdefault("opentelemetry", None)  # type: ignore[arg-type]
STORED_COMPLETION_DAYS = ENV.stored_completion_days
# The limit of one key or session in one web process. apps/interfaces/web/edge/request_limits.py derives the others.
WEB_REQUESTS_PER_MINUTE = ENV.web_requests_per_minute
WEB_SECONDS_PER_MINUTE = ENV.web_seconds_per_minute
WEB_PLACES = ENV.web_places
# Only these proxies may name the client of a request they forward.
TRUSTED_PROXIES = ENV.trusted_proxies

ALLOWED_HOSTS = [urlsplit(PUBLIC_URL).hostname, "localhost", "127.0.0.1", *ENV.allowed_hosts]
CSRF_TRUSTED_ORIGINS = [PUBLIC_URL]
API_ORIGINS = ENV.api_origins  # of pages that may call the API

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.humanize",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "django_htmx",
    "django_cotton.apps.SimpleAppConfig",
    "template_partials.apps.SimpleAppConfig",
    "csp",
    "pgtrigger",
    "django_linear_migrations",
    "rest_framework",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.usersessions",
    "apps.accounts",
    "apps.catalog",
    "apps.billing",
    "apps.payments",
    "apps.datasets",
    "apps.adapters",
    "apps.playground",
    "apps.batches",
    "apps.batches.completions",
    "apps.finetuning",
    "apps.serving",
    "apps.serving.evals",
    "apps.interfaces.web",
    "apps.interfaces.api",
    "apps.interfaces.worker_api",
    "apps.interfaces.staff",
    "apps.core",  # last: its post_migrate writes the policies of every table above
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "apps.core.http.compression.CompressPages",
    "apps.core.http.asgi.RequestIdMiddleware",
    "apps.core.http.statement_limits.RefuseStoppedStatements",
    "apps.core.http.origin.OriginMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "apps.accounts.login.sessions.EndIdleOperatorSessions",
    "apps.accounts.login.sessions.NoteLastSeen",
    "apps.interfaces.web.shell.preferences.UsePreferences",
    "apps.core.http.asgi.RefuseNulMiddleware",
    "apps.accounts.login.viewing.LimitViewing",
    "apps.core.http.asgi.ShowRefusedMethodsMiddleware",
]

ROOT_URLCONF = "apps.config.urls"
ASGI_APPLICATION = "apps.config.asgi.application"
APPEND_SLASH = False  # a redirect would lose the body of a client's POST

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        # allauth looks up its pages by names of its own, such as account/login.html.
        "DIRS": [ROOT / "templates", ROOT / "templates" / "allauth"],
        "OPTIONS": {
            # Both Cotton and partials wrap the loaders; both work only in this order.
            "loaders": [
                (
                    "template_partials.loader.Loader",
                    [
                        (
                            "django.template.loaders.cached.Loader",
                            [
                                "django_cotton.cotton_loader.Loader",
                                "django.template.loaders.filesystem.Loader",
                                "django.template.loaders.app_directories.Loader",
                            ],
                        )
                    ],
                )
            ],
            "builtins": [
                "django.templatetags.i18n",
                "django_cotton.templatetags.cotton",
                "template_partials.templatetags.partials",
                "apps.core.templatetags.ui",
            ],
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "apps.interfaces.web.shell.frame.context",
            ],
        },
    }
]


def _database(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    host = query.pop("host", None) or (unquote(parts.hostname) if parts.hostname else "")
    port = query.pop("port", None) or parts.port or ""
    return {
        "ENGINE": "apps.core.database.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": host,
        "PORT": str(port),
        "CONN_MAX_AGE": 0,
        # The pool doubles its waits between attempts to connect until reconnect_timeout, 5 minutes by default. After an
        # outage the database would be back for as long as the outage lasted before a request could use it.
        "OPTIONS": {**query, "pool": {"min_size": 1, "max_size": 12, "timeout": 10, "reconnect_timeout": 2}},
    }


DATABASES = {"default": _database(ENV.database_url)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*"]
ACCOUNT_EMAIL_VERIFICATION = "mandatory"  # PREVENT_ENUMERATION has no effect at sign-up without it
ACCOUNT_LOGIN_ON_EMAIL_CONFIRMATION = True  # in the browser that signed up
ACCOUNT_ADAPTER = "apps.accounts.login.allauth_adapter.AccountAdapter"
ACCOUNT_FORMS = {
    "signup": "apps.accounts.login.forms.SignUpForm",
    "login": "apps.accounts.login.forms.LoginForm",
    "change_password": "apps.accounts.login.forms.ChangePasswordForm",
    "reset_password": "apps.accounts.login.forms.ResetPasswordForm",
    "reset_password_from_key": "apps.accounts.login.forms.ResetPasswordKeyForm",
    "reauthenticate": "apps.accounts.login.forms.ReauthenticateForm",
}
ACCOUNT_REAUTHENTICATION_TIMEOUT = 15 * 60
# By network address (or IPv6 network), and by the e-mail address that gets a message.
ACCOUNT_RATE_LIMITS = {
    "signup": "20/h/ip",
    "reset_password": "20/m/ip,3/h/key",
    "confirm_email": "1/3m/key,3/h/key",
}
MAX_UNPAID_ORGANIZATIONS = ENV.most_unpaid_organizations
# Granted to the first organization that a person founds, once the person's address is confirmed. 0: nothing.
WELCOME_CREDIT_NANO = ENV.welcome_credit_nano
BATCH_REDUCTION_PERCENT = ENV.batch_reduction_percent
BRAND_NAME, BRAND_HUE, BRAND_LOGO = ENV.brand_name, ENV.brand_hue, ENV.brand_logo
SUPPORT_EMAIL = ENV.support_email
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_ADAPTER = "apps.accounts.login.second_factor.SecondFactorAdapter"
MFA_TOTP_ISSUER = ENV.brand_name
MFA_TOTP_TOLERANCE = 1  # accepts codes of the step before and after: RFC 6238 §5.2
MFA_FORMS = {
    "authenticate": "apps.accounts.login.forms.SecondFactorForm",
    "reauthenticate": "apps.accounts.login.forms.SecondFactorAgainForm",
    "activate_totp": "apps.accounts.login.forms.ActivateTotpForm",
}
ACCOUNT_SESSION_REMEMBER = True
ACCOUNT_LOGOUT_ON_GET = False
ACCOUNT_PREVENT_ENUMERATION = True
LOGIN_URL = reverse_lazy("account_login")
LOGIN_REDIRECT_URL = "/"
ACCOUNT_LOGOUT_REDIRECT_URL = reverse_lazy("account_login")

# Operators: whether the console requires a second factor, and after how many idle seconds they must sign in
# again (0: never). Both are off if only this machine can reach the pages.
OPERATOR_MFA = ENV.operator_mfa
OPERATOR_IDLE_SECONDS = 30 * 60 if OPERATOR_MFA else 0

SESSION_ENGINE = "apps.accounts.login.session_store"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = 7 * 24 * 3600
CSRF_COOKIE_SAMESITE = "Lax"
CSRF_FAILURE_VIEW = "apps.core.http.asgi.csrf_failure"
X_FRAME_OPTIONS = "DENY"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"


def store_origins(url: str) -> list[str]:
    """Return the origins at which browsers reach an S3 store; a directory store is served at our own origin."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if parts.scheme != "s3":
        return []
    endpoint = query.get("public_endpoint") or query.get("endpoint")
    if endpoint:
        return ["{0.scheme}://{0.netloc}".format(urlsplit(endpoint))]
    region = query.get("region", "us-east-1")
    return [f"https://{parts.netloc}.s3.amazonaws.com", f"https://{parts.netloc}.s3.{region}.amazonaws.com"]


CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "font-src": ["'self'"],
        # A browser sends the parts of an upload straight to a store on another origin.
        "connect-src": ["'self'", *store_origins(OBJECT_STORE)],
        "manifest-src": ["'self'"],
        "form-action": ["'self'"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'none'"],
    }
}

STATIC_URL = "/static/"
STATIC_ROOT = HOME / "static"
STATICFILES_DIRS = [ROOT / "static"]
# Only our own files: no page uses a package's files, and compressing those takes most of the time.
STATICFILES_FINDERS = ["django.contrib.staticfiles.finders.FileSystemFinder"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.InMemoryStorage"},  # uploads use core.object_store
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
}
FILE_UPLOAD_HANDLERS = ["django.core.files.uploadhandler.TemporaryFileUploadHandler"]
DATA_UPLOAD_MAX_MEMORY_SIZE = 2 * 1024 * 1024

LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("de", "Deutsch")]
LOCALE_PATHS = [ROOT / "locale"]
FORMAT_MODULE_PATH = "apps.config.formats"  # figures look the same in all languages
TIME_ZONE = "UTC"
USE_TZ = True

_mail = read_mail_url(ENV.email_url)
DEFAULT_FROM_EMAIL = ENV.from_email
EMAIL_TIMEOUT = 15
EMAIL_BACKEND = _mail.backend
EMAIL_HOST, EMAIL_PORT = _mail.host, _mail.port
EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = _mail.user, _mail.password
EMAIL_FILE_PATH = _mail.folder or None
MAIL_FOLDER = ENV.mail_folder  # where people find their messages if there is no mail server
EMAIL_USE_TLS, EMAIL_USE_SSL = _mail.use_tls, _mail.use_ssl

CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": "anneal:cache",
    }
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["apps.interfaces.api.requests.authentication.ApiKeyAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["apps.interfaces.api.requests.permissions.HasScope"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["apps.interfaces.api.requests.parsers.EmptyTolerantJSONParser"],
    "EXCEPTION_HANDLER": "apps.interfaces.api.errors.exception_handler",
    "UNAUTHENTICATED_USER": None,
}
# The functions that return the operations of the OpenAPI document; each surface lists its own.
API_OPERATIONS = ["apps.interfaces.api.schema.operations", "apps.interfaces.gateway.surfaces.operations.operations"]

# Limits of an organization that never had credit, paid or granted by an operator. The others have the defaults of
# apps.finetuning.models.Quota. Anyone can create such an organization, so its limits allow trying things out only.
UNPAID_LIMITS = {"storage_bytes": 500_000_000, "queued_jobs": 3, "concurrent_gpus": 1}
# Estimates share what they read about pools for this long. What a job is admitted by is read anew.
ESTIMATE_FACTS_SECONDS = 1.0
# Claims of a pool share a ranking of its queue for this long at least (apps/finetuning/runs/queue/candidates.py).
QUEUE_RANKING_SECONDS = 0.05
# The function that returns the bytes an organization may still store; intake, in an app below, calls it.
STORAGE_LEFT = "apps.finetuning.usage.storage.left_bytes"
# The same of a member with an allowance of storage.
STORAGE_LEFT_OF_MEMBER = "apps.finetuning.usage.storage.left_of_member"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {"django.request": {"level": "ERROR"}, "httpx": {"level": "WARNING"}, "httpx2": {"level": "WARNING"}},
}
