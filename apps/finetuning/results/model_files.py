"""The files of a trained model for its owner: weights, exports, and the documents that are written when asked for."""

import hashlib
import json
import mimetypes

import msgspec
from django.utils.translation import gettext

from apps.adapters.models import AdapterVersion
from apps.adapters.queries import find_files
from apps.core.errors import NotFound
from apps.finetuning.queries import find_jobs_of_adapters
from apps.finetuning.recipes.start_points import UPLOADED
from apps.finetuning.results.model_cards import CARD_FILE, model_card, uploaded_card
from apps.finetuning.results.provenance import BUNDLE_FILE, reproducibility

_TYPES = {".safetensors": "application/octet-stream", ".md": "text/markdown; charset=utf-8"}


class ModelFile(msgspec.Struct, frozen=True):
    """One file of a model or of its export `export`. Its bytes are the object `key`, or `text` if there is none."""

    name: str
    export: str
    bytes: int
    sha256: str
    key: str = ""
    text: str = ""

    @property
    def content_type(self) -> str:
        extension = f".{self.name.rpartition('.')[2]}"
        return _TYPES.get(extension) or mimetypes.guess_type(self.name)[0] or "application/octet-stream"


def list_files(*, version: AdapterVersion) -> list[ModelFile]:
    """Return the files of the version, then those of each export, with the documents after the stored ones."""
    return [file for export in ("", *(each["kind"] for each in version.exports)) for file in _files(version, export)]


def find_file(*, version: AdapterVersion, name: str, export: str = "") -> ModelFile:
    """Return one file of the version or of its export. Raises NotFound."""
    found = {file.name: file for file in _files(version, export)}
    if name not in found:
        raise NotFound(
            gettext("This model has no file '%(name)s'. It has %(found)s.")
            % {"name": name[:100], "found": ", ".join(found)},
            param="name",
        )
    return found[name]


def documents(*, version: AdapterVersion, export: str = "") -> dict[str, str]:
    """Return the model card and the reproducibility file by name; the card alone for an uploaded version."""
    job = find_jobs_of_adapters(organization=version.organization_id, versions=[version]).get(version.pk)
    if job is None:
        return {CARD_FILE: uploaded_card(version=version)} if UPLOADED in version.metrics else {}
    bundle = json.dumps(reproducibility(job=job, version=version), indent=2, default=str)
    return {CARD_FILE: model_card(job=job, version=version, export=export), BUNDLE_FILE: bundle + "\n"}


def _files(version: AdapterVersion, export: str) -> list[ModelFile]:
    prefix, manifest = find_files(version=version, export=export)
    texts = documents(version=version, export=export)
    stored = [
        ModelFile(file["name"], export, file["bytes"], file["sha256"], key=f"{prefix}/{file['name']}")
        for file in manifest["files"]
        if file["name"] not in texts
    ]
    written = [(name, text, text.encode()) for name, text in texts.items()]
    return stored + [
        ModelFile(name, export, len(raw), hashlib.sha256(raw).hexdigest(), text=text) for name, text, raw in written
    ]
