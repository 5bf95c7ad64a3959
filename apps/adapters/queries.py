"""Queries on adapters."""

from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.catalog.queries import ModelNotFound, list_base_models
from apps.core.errors import NotFound
from apps.core.objects.store import store

_DOWNLOAD_SECONDS = 300
_MAX_SHOWN = 100  # characters of an unknown name


def list_versions(*, organization: Organization | str) -> QuerySet[AdapterVersion]:
    """Return the usable adapter versions that the request sees, newest first."""
    rows = list_with_deleted(organization=organization).filter(deleted_at=None)
    return rows.select_related("adapter__base_model").order_by("-created_at", "-id")


def list_with_deleted(*, organization: Organization | str) -> QuerySet[AdapterVersion]:
    """Return the adapter versions that the request sees, also those that are deleted."""
    return visible(AdapterVersion.objects.for_organization(organization), project="adapter__project")


def get_version(*, organization: Organization | str, id: str) -> AdapterVersion:
    """Return one of the organization's versions by id.

    Raises ModelNotFound, the same for unknown and foreign ids and for private projects that the request does not see.
    """
    return _found(list_versions(organization=organization).filter(pk=id).first(), id)


def get_version_by_name(*, organization: Organization | str, model_name: str, param: str = "model") -> AdapterVersion:
    """Return one of the organization's versions by its `ft:…` name. Raises ModelNotFound, also for a base model."""
    found = list_versions(organization=organization).filter(model_name=model_name).first()
    if found is None and list_base_models(only_installed=True).filter(name=model_name).exists():
        raise ModelNotFound(
            gettext(
                "'%(name)s' is a base model: send requests to it as it is, or fine-tune it. This needs the name of a "
                "fine-tuned model, ft:…, from GET /v1/models."
            )
            % {"name": model_name},
            param=param,
        )
    return _found(found, model_name, param)


def list_siblings(*, version: AdapterVersion) -> QuerySet[AdapterVersion]:
    """Return every usable version of the same adapter, newest first."""
    return list_versions(organization=version.organization_id).filter(adapter_id=version.adapter_id)


def find_files(*, version: AdapterVersion, export: str = "") -> tuple[str, dict[str, Any]]:
    """Return object prefix and manifest of the adapter or of one of its exports. Raises NotFound."""
    if not export:
        return version.object_prefix, version.manifest
    for found in version.exports:
        if found["kind"] == export:
            return found["object_prefix"], found["manifest"]
    raise NotFound(gettext("This adapter has no such export."))


def find_whole_model(*, version: AdapterVersion) -> tuple[str, dict[str, Any]]:
    """Return object prefix and manifest of the version as a whole 16-bit model. Raises NotFound when it has none."""
    return find_files(version=version, export="" if version.method == "full" else "merged_16bit")


def download_url(*, version: AdapterVersion, name: str, export: str = "") -> str:
    """Return a URL, valid for five minutes, under which a browser can save one file. Raises NotFound."""
    prefix, manifest = find_files(version=version, export=export)
    if all(file["name"] != name for file in manifest["files"]):
        raise NotFound(gettext("This adapter has no such file."))
    return store().signed_url(
        f"{prefix}/{name}", "GET", expires_seconds=_DOWNLOAD_SECONDS, base="public", filename=name
    )


def _found(found: AdapterVersion | None, asked: str, param: str = "model") -> AdapterVersion:
    if found is None:
        shown = asked[:_MAX_SHOWN]
        raise ModelNotFound(
            gettext("The model '%(shown)s' does not exist or you do not have access to it.") % {"shown": shown},
            param=param,
        )
    return found
