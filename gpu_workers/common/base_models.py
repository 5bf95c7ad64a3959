"""The location of a base model on this machine."""

from pathlib import Path

import msgspec

from apps.contracts.runs import BaseModelRef


class NotInstalled(Exception):
    """The base model's local path leads to nothing that this worker may read."""


def locate_base_model(base_model: BaseModelRef, roots: tuple[Path, ...]) -> BaseModelRef:
    """Return the reference with an absolute path inside one of `roots`; a hub model is returned unchanged.

    The roots stop a path of the control plane from opening any other folder of this machine.
    """
    if base_model.path is None:
        return base_model
    for root in roots:
        folder = (root / base_model.path).resolve()
        if folder.is_relative_to(root.resolve()) and (folder / "config.json").is_file():
            return msgspec.structs.replace(base_model, path=str(folder))
    raise NotInstalled(f"The base model {base_model.name} is not installed on this machine.")
