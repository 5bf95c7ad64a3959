"""References to base models for workers."""

from apps.catalog.models import BaseModel
from apps.catalog.queries import open_hub_token
from apps.contracts.runs import BaseModelRef


def base_model_ref(base_model: BaseModel, *, has_token: bool) -> BaseModelRef:
    """Return the place where a worker finds the model, with the token of its repository only if `has_token`."""
    return BaseModelRef(
        id=base_model.pk,
        name=base_model.name,
        path=base_model.path or None,
        repo=base_model.repo or None,
        revision=base_model.revision or None,
        files_sha256=base_model.files_sha256,
        chat_template=base_model.chat_template,
        chat_template_sha256=base_model.chat_template_sha256,
        hub_token=open_hub_token(base_model=base_model) if has_token else None,
    )
