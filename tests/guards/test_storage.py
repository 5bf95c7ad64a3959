"""Nothing is stored for a tenant without a check of its storage limit: each place that stores names its check."""

import ast
from collections.abc import Iterator
from pathlib import Path

APPS = Path(__file__).resolve().parents[2] / "apps"
WRITES = {"put_stream", "put_once", "compose", "join_parts", "signed_url"}  # signed_url: where it is asked for a PUT
# The function that writes -> what weighed it.
WEIGHED = {
    "datasets/intake/versions.py:create_version": "cut off at the storage that is left, weighed again by register",
    "datasets/intake/revisions.py:remap_version": "require_storage",
    "datasets/validation/leases.py:_read": "limited",
    "datasets/validation/leases.py:_repair": "limited",
    "datasets/validation/leases.py:_fit": "limited",
    "datasets/validation/leases.py:_edit": "limited",
    "datasets/validation/leases.py:_copy": "require_storage, by derive",
    "datasets/validation/leases.py:_part": "limited",
    "datasets/intake/revisions.py:derive": "one row, beside a version for which require_storage has made room",
    "datasets/inspection/changes.py:store_changes": "line numbers of at most 600 rows",
    "datasets/inspection/inspections.py:inspect_version": "eight bytes a row of a file that was weighed",
    "datasets/intake/uploads.py:add_part": "require_storage",
    "datasets/intake/parts.py:sign_parts": "exact sizes of parts of an upload that counts until the last has expired",
    "datasets/intake/parts.py:compose": "require_storage, by register",
    "finetuning/results/uploaded_adapters.py:upload_adapter": "limited, and weighed again before it is saved",
    "finetuning/results/examinations.py:_add_probe": "one a version, of at most 4 MiB; it counts from then on",
    "finetuning/results/checkpoint_models.py:_copy": "require_any_storage",
    "finetuning/runs/uploads.py:_sign_put": "require_any_storage, when the job was admitted; left_bytes, at an order",
    "finetuning/runs/uploads.py:_join": "joins parts that were weighed so, and are deleted an hour later",
    "batches/files.py:create_file": "cut off at the storage that is left, weighed again before it is saved",
    "batches/operations.py:create_eval_batch": "cut off at the storage that is left",
    "batches/endings.py:_write": "answers that were paid for; they count from then on",
    "catalog/operations.py:_fill_from_folder": "of the platform, no tenant's",
}


def _writers() -> Iterator[str]:
    for path in APPS.rglob("*.py"):
        module = path.relative_to(APPS).as_posix()
        text = path.read_text()
        if module.startswith("core/") or not any(name in text for name in WRITES):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and _writes(function):
                yield f"{module}:{function.name}"


def _writes(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
            is_read = node.func.attr == "signed_url" and not any(
                isinstance(given, ast.Constant) and given.value == "PUT" for given in node.args
            )
            if not is_read:
                return True
    return False


def test_every_place_that_stores_objects_is_known_and_weighed() -> None:
    assert set(_writers()) == set(WEIGHED)
