"""A publishing child without torch: seals the adapter with a probe, fails, or hangs, as its first argument says."""

import shutil
import sys
import time
from pathlib import Path

import msgspec

from apps.contracts.evaluation import EvaluationReport
from gpu_workers.artifacts import folder_bytes, read_manifest, seal_folder
from gpu_workers.publishing import PUBLISHED_FILE, Published, SealedFolder

behaviour, work_dir = sys.argv[1], Path(sys.argv[3])
(work_dir.parent.parent / "publish-secrets").write_text(sys.stdin.readline())


def seal(folder: str, extra: str, kind: str) -> SealedFolder:
    temporary = work_dir / f"tmp-{folder}"
    shutil.copytree(work_dir / "adapter", temporary)
    (temporary / extra).write_text("{}")
    manifest = msgspec.structs.replace(read_manifest(temporary), kind=kind)
    digest = seal_folder(temporary, work_dir / folder, lambda files: msgspec.structs.replace(manifest, files=files))
    return SealedFolder(folder=folder, manifest_sha256=digest, bytes=folder_bytes(read_manifest(work_dir / folder)))


if behaviour in ("publish", "slow"):
    time.sleep(2.5 if behaviour == "slow" else 0)  # longer than two heartbeats of the tests
    published = Published(
        adapter=seal("published", "parity.json", "adapter"),
        merged=seal("merged", "config.json", "model"),
        report=EvaluationReport(rows=3),
    )
    (work_dir / PUBLISHED_FILE).write_bytes(msgspec.json.encode(published))
elif behaviour == "fail":
    sys.exit(1)
else:
    time.sleep(60)
