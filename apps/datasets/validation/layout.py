"""The stored description of a version's file."""

import msgspec

from apps.contracts.splits.split import Split
from apps.datasets.validation.formats import Mapping


class FileLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a file is. `sample` holds its first rows, cut for display; `columns` their names.

    A repaired file has counts of the rows that were `repaired` and `dropped`. `fits` is the id of the base model whose
    chat template chose the rows, if one did. `edited_line` is the line that was replaced or deleted, if one was.
    `split` chose the rows of a part of another version. `written_as` is the kind of the rows that another version was
    made of; "" for a file as it was uploaded.
    """

    container: str = ""
    is_gzip: bool = False
    is_rejected: bool = True  # until it was read to its end
    mapping: Mapping | None = None
    columns: tuple[str, ...] = ()
    sample: tuple[str, ...] = ()
    repaired: int = 0
    dropped: int = 0
    fits: str = ""
    edited_line: int = 0
    split: Split | None = None
    written_as: str = ""
