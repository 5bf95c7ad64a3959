"""Parts that a job promised beside the adapter and did not deliver, each with cause and fix.

Making a part has no price, and storage is charged by the stored bytes, so a missing part costs nothing.
"""

import msgspec
from django.utils.translation import gettext_noop

from apps.adapters.models import AdapterVersion
from apps.contracts import runs as wire
from apps.finetuning.models import FineTuningJob
from apps.finetuning.recipes.stored_requests import stored_request

_EVALUATION = "evaluation"
_LABELS = {
    _EVALUATION: gettext_noop("the evaluation, with the certificate's probe,"),
    "merged_16bit": gettext_noop("the merged model"),
    "gguf": gettext_noop("the GGUF file"),
}
_UNMADE = {
    _EVALUATION: "The evaluation, with the certificate's probe, could not be made",
    "merged_16bit": "The merged model could not be delivered",
    "gguf": "The GGUF file could not be delivered",
}
_OTHER_FIX = "Start the job again if you need it."
_FIXES = {
    _EVALUATION: "The adapter can be used: compare it with the base model in the playground.",
    "merged_16bit": "Order it on the adapter's page, or merge it yourself with merge_and_unload of PEFT.",
    "gguf": "Order it on the adapter's page, or convert the merged model with llama.cpp.",
}
_MAX_CHARACTERS = 300


class UndeliveredPart(msgspec.Struct, frozen=True, kw_only=True):
    """One missing part, as shown to its owner."""

    kind: str
    label: str
    cause: str
    fix: str

    @property
    def message(self) -> str:
        return f"{_UNMADE.get(self.kind, f'{self.label} could not be delivered')}: {self.cause}. {self.fix}"


def find_missing(job: FineTuningJob, outcome: wire.Succeeded) -> list[dict[str, str]]:
    """Return the promised parts that the outcome lacks.

    A missing part is found even if the worker did not report it. An evaluation is promised if rows were held out, and
    the run then has a validation loss.
    """
    causes = {each.kind: each.cause[:_MAX_CHARACTERS] for each in outcome.missing}
    delivered = {export.kind for export in outcome.exports}
    promised = [kind for kind in stored_request(job).exports if kind not in delivered]
    if outcome.report is None and (outcome.valid_loss is not None or _EVALUATION in causes):
        promised.insert(0, _EVALUATION)
    unsaid = "the worker did not deliver it and gave no reason"
    return [{"kind": kind, "cause": causes.get(kind) or unsaid} for kind in promised]


def list_missing(version: AdapterVersion | None) -> list[UndeliveredPart]:
    """Return the promised parts that a version lacks."""
    return [
        UndeliveredPart(
            kind=each["kind"],
            label=_LABELS.get(each["kind"], each["kind"]),
            cause=each["cause"],
            fix=_FIXES.get(each["kind"], _OTHER_FIX),
        )
        for each in (version.missing if version else ())
    ]
