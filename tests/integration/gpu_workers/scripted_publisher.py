"""A publishing child without torch. Its first argument says how each part ends: "*=publish,merged_16bit=fail".

Of several, "gguf=hang evaluation=hang", the first is of the first attempt's run, and so on.

Ends: publish, slow, fail (each time), once (fails at first), refuse (says why not), hang.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import msgspec

from apps.contracts.evaluation import EvaluationReport
from apps.contracts.runs import RunSpec
from gpu_workers.common.artifacts import folder_bytes, read_manifest, seal_folder
from gpu_workers.trainer.publication import EVALUATION, Made, SealedFolder, write_made

work_dir, line = Path(sys.argv[3]), sys.stdin.readline()
part = json.loads(line)["part"]
attempt = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=RunSpec).attempt
ways = sys.argv[1].split()
ends = dict(pair.split("=") for pair in ways[(attempt - 1) % len(ways)].split(","))
end = ends.get(part, ends.get("*", "publish"))
tries = work_dir.parent.parent / f"tries-{attempt}-{part}"
tries.write_text(str(int(tries.read_text() if tries.exists() else "0") + 1))
if part == EVALUATION:
    (work_dir.parent.parent / "publish-secrets").write_text(line)


def seal(folder: str, extra: str, kind: str) -> SealedFolder:
    temporary = work_dir / f"tmp-{folder}"
    shutil.copytree(work_dir / "adapter", temporary)
    (temporary / extra).write_text("{}")
    manifest = msgspec.structs.replace(read_manifest(temporary), kind=kind)
    digest = seal_folder(temporary, work_dir / folder, lambda files: msgspec.structs.replace(manifest, files=files))
    return SealedFolder(folder=folder, manifest_sha256=digest, bytes=folder_bytes(read_manifest(work_dir / folder)))


if end == "fail" or (end == "once" and tries.read_text() == "1"):
    sys.exit(1)
if end == "refuse":
    write_made(work_dir, part, Made(problem="llama.cpp does not know this model", is_lasting=True))
    sys.exit(3)
if end == "hang":
    time.sleep(600)
time.sleep(2.5 if end == "slow" else 0)  # longer than two heartbeats of the tests
if part == EVALUATION:
    write_made(
        work_dir, part, Made(sealed=seal("published", "parity.json", "adapter"), report=EvaluationReport(rows=3))
    )
else:
    write_made(work_dir, part, Made(sealed=seal(part, "config.json", "model")))
