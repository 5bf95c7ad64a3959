"""Adapters that were trained elsewhere: uploaded, checked as one that a run leaves, published and deployed.

The configuration that is kept is ours, with the few values of the uploaded one that change the model. It names the base
model so that PEFT loads it, and neither code nor a folder of another machine. The numbers for its certificate are not
the customer's: a trainer computes them before it is served.
"""

import datetime
import hashlib
import json
from collections.abc import Iterable

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.members.projects import project_of_new
from apps.accounts.models import Organization
from apps.accounts.shares import share_of
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import AdapterRejected, NewVersion, publish_version
from apps.catalog.licences import require_licence
from apps.catalog.models import BaseModel
from apps.catalog.queries import get_base_model, list_base_models
from apps.contracts.adapter_files import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    TARGET_MODULES,
    WEIGHTS_FILE,
    AdapterFileError,
    base_reference,
    check_config,
    clean_adapter_config,
    parse_config,
)
from apps.contracts.hyperparameters import Method
from apps.contracts.runs import Manifest, ManifestFile
from apps.core.errors import InvalidValue, QuotaExceeded, RateLimited
from apps.core.ids import new_ulid
from apps.core.messages.translation import translated
from apps.core.objects.orphans import sweep
from apps.core.objects.store import bounded, object_key, store
from apps.datasets.intake.versions import FileTooLarge, limited, lock_storage, require_storage
from apps.finetuning.recipes.limits import SERVABLE_RANKS
from apps.finetuning.recipes.start_points import UPLOADED, scale_of_upload
from apps.finetuning.recipes.suffixes import plain_suffix
from apps.finetuning.results import examinations
from apps.serving.operations import release

MAX_BYTES = 512 * 1024**2  # of the weights, in one request
MAX_KEPT, MAX_A_DAY = 200, 20  # of an organization: an engine tries each one, beside the adapters of others
_KIND = "adapters"
_A_DAY = datetime.timedelta(days=1)


def upload_adapter(
    *,
    organization: Organization,
    name: str,
    config: Iterable[bytes],
    weights: Iterable[bytes],
    by: str,
    now: datetime.datetime,
    base_model: str = "",
    project: str = "",
) -> AdapterVersion:
    """Publish an adapter, to be examined and deployed, from its adapter_config.json and adapter_model.safetensors.

    It is in the `project`, or else in that of `by`. A name that is known there makes it the next version. Without
    `base_model`, the configuration names the base model, by its repository. A refused upload leaves nothing.
    Raises InvalidValue, ModelNotFound, LicenceNotAccepted, AdapterRejected, FileTooLarge, StorageFull, QuotaExceeded,
    RateLimited, and as `project_of_new`.
    """
    project_id = project_of_new(organization=organization, by=by, wanted=project)
    suffix = plain_suffix(name, param="name")
    if not suffix:
        raise InvalidValue(gettext("Give the adapter a name, such as 'support'."), param="name")
    read = _read_config(config)
    base = _find_base(read, base_model)
    require_licence(organization=organization, base_model=base)
    _require_values(read)
    _require_room(organization, now)
    ulid = new_ulid()
    prefix = object_key(organization.pk, _KIND, f"adpv_{ulid}")
    too_large = FileTooLarge(
        gettext("The weights may have up to %(max_bytes)s MiB.") % {"max_bytes": MAX_BYTES // 1024**2}, param="weights"
    )
    try:
        sent = bounded(weights, MAX_BYTES, too_large)
        kept = store().put_stream(f"{prefix}/{WEIGHTS_FILE}", limited(sent, organization=organization, by=by))
        cleaned = clean_adapter_config(read, base_model=base_reference(repo=base.repo, name=base.name))
        text = json.dumps(cleaned | ({"revision": base.revision} if base.repo else {}), indent=2).encode()
        files = {WEIGHTS_FILE: kept, CONFIG_FILE: store().put_stream(f"{prefix}/{CONFIG_FILE}", [text])}
        listed = tuple(ManifestFile(name=name, sha256=file.sha256, bytes=file.bytes) for name, file in files.items())
        manifest = Manifest(kind="adapter", run_id="", attempt=0, step=0, files=listed)
        store().put_stream(f"{prefix}/{examinations.MANIFEST}", [msgspec.json.encode(manifest)])
        new = _new_version(
            organization, project_id, base, read, manifest, prefix=prefix, suffix=suffix, ulid=ulid, by=by
        )
        with transaction.atomic():
            lock_storage(organization)
            _require_room(organization, now)
            require_storage(organization=organization, wanted_bytes=kept.bytes, by=by)
            version = publish_version(new)
            if not examinations.ask(version=version, now=now):
                release(version)
            return version
    except BaseException:
        store().delete_prefix(prefix)
        raise


def sweep_orphans(*, now: datetime.datetime) -> int:
    """Delete the files of uploads that a killed process left a day ago; return how many folders."""
    return sweep(kinds=(_KIND,), known=_known, now=now)


def _known(ids: list[str]) -> set[str]:
    return set(AdapterVersion.objects.filter(pk__in=ids, deleted_at=None).values_list("pk", flat=True))


def _read_config(chunks: Iterable[bytes]) -> dict[str, object]:
    too_large = FileTooLarge(
        gettext("%(config_file)s may have up to %(max_config_bytes)s bytes.")
        % {"config_file": CONFIG_FILE, "max_config_bytes": f"{MAX_CONFIG_BYTES:,}"},
        param="adapter_config",
    )
    try:
        return parse_config(b"".join(bounded(chunks, MAX_CONFIG_BYTES, too_large)))
    except AdapterFileError as error:
        raise InvalidValue(translated(str(error)), param="adapter_config") from error


def _find_base(config: dict[str, object], name: str) -> BaseModel:
    """Return the installed base model of this name; without one, the model that the configuration names."""
    offered = list_base_models(only_installed=True)
    if name:
        base = get_base_model(name=name)
        if not base.is_installed:
            raise InvalidValue(
                gettext("%(name)s is not installed here. Choose one of %(offered)s.")
                % {"name": name, "offered": _names(offered)},
                param="base_model",
            )
        return base
    named = config.get("base_model_name_or_path")
    asked = named if isinstance(named, str) else ""
    found = next((each for each in offered if asked in (each.repo or each.name, f"./{each.name}")), None)
    if found is None:
        if asked:
            known = gettext("No installed base model is %(asked)s.") % {"asked": repr(asked[:100])}
        else:
            known = gettext("The configuration names no base model.")
        advice = gettext("If the adapter belongs to one of these, send its name as base_model: %(offered)s.") % {
            "offered": _names(offered)
        }
        raise InvalidValue(f"{known} {advice}", param="base_model")
    revision = config.get("revision")
    if revision not in (None, "main", found.revision):
        text = gettext(
            "The adapter was trained on commit %(revision)s of %(asked)s, and %(installed)s is installed. If it fits "
            "that one too, send base_model: %(name)s."
        ) % {"revision": repr(str(revision)[:64]), "asked": asked, "installed": found.revision, "name": found.name}
        raise InvalidValue(text, param="base_model")
    return found


def _names(offered: Iterable[BaseModel]) -> str:
    return ", ".join(each.name for each in offered)


def _require_values(config: dict[str, object]) -> None:
    """Raise AdapterRejected for features, ranks and layers that no replica serves."""
    problems = [problem.message for problem in check_config(config)]
    most = max(SERVABLE_RANKS)
    if not problems and isinstance(config["r"], int) and config["r"] > most:
        problems = [f"r is {config['r']}, and replicas serve adapters up to rank {most}."]
    if problems:
        shown = " ".join(translated(problem) for problem in problems[:3])
        raise AdapterRejected(
            gettext("This adapter cannot be served: %(problems)s") % {"problems": shown}, param="adapter_config"
        )


def _require_room(organization: Organization, now: datetime.datetime) -> None:
    """Raise RateLimited or QuotaExceeded above the limits of uploads, which organizations that share have together."""
    with share_of(organization) as organizations:
        rows = AdapterVersion.objects.filter(organization__in=organizations, metrics__has_key=UPLOADED)
        if rows.filter(created_at__gt=now - _A_DAY).count() >= MAX_A_DAY:
            text = gettext("An organization can upload at most %(max_a_day)s adapters a day. Try again tomorrow.") % {
                "max_a_day": MAX_A_DAY
            }
            raise RateLimited(text, retry_after_seconds=3600)
        if rows.filter(deleted_at=None).count() >= MAX_KEPT:
            raise QuotaExceeded(
                gettext("An organization keeps at most %(max_kept)s uploaded adapters. Delete one first.")
                % {"max_kept": MAX_KEPT}
            )


def _new_version(
    organization: Organization,
    project_id: str,
    base: BaseModel,
    config: dict[str, object],
    manifest: Manifest,
    *,
    prefix: str,
    suffix: str,
    ulid: str,
    by: str,
) -> NewVersion:
    modules = config["target_modules"]
    assert isinstance(modules, list) and isinstance(config["r"], int)
    return NewVersion(
        organization=organization,
        project_id=project_id,
        base_model=base,
        adapter_name=suffix,
        suffix=suffix,
        source=by,
        ulid=ulid,
        object_prefix=prefix,
        manifest=msgspec.to_builtins(manifest),
        manifest_sha256=hashlib.sha256(msgspec.json.encode(manifest)).hexdigest(),
        method=Method.LORA,
        rank=config["r"],
        target_modules=[module for module in TARGET_MODULES if module in modules],
        metrics={UPLOADED: scale_of_upload(config)},
    )
