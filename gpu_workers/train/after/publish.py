"""One part after training, made from exported files: `python -m gpu_workers.train.after.publish SPEC DIR`.

Standard input names the part. The evaluation loads the 16-bit base and then the exported adapter, as serving will. It
compares the two on held-out rows, and writes the probe of the parity certificate into the adapter's folder. The other
parts merge or convert. Each part runs in a separate process, so a failure loses that part, but never the adapter. Parts
are not billed.
"""

import importlib.metadata
import logging
import os
import shutil
import sys
from pathlib import Path

import msgspec
import torch

from apps.contracts.parity import PARITY_FILE
from apps.contracts.runs import Manifest, RunSpec
from gpu_workers.common.artifacts import folder_bytes, read_manifest, seal_folder
from gpu_workers.common.events import ADAPTER_FOLDER
from gpu_workers.common.pulse import open_pulse
from gpu_workers.train.after.examination import examine_result, is_adapter
from gpu_workers.train.after.gguf import NotConverted, convert_model
from gpu_workers.train.after.merge import NotMergeable, merge_adapter
from gpu_workers.train.failure_codes import is_disk_full, is_out_of_memory
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.model.base_model import fetch_base_model
from gpu_workers.train.model.streamed import NotStreamable
from gpu_workers.train.model.tensor_files import UnknownNumbers
from gpu_workers.trainer import publication
from gpu_workers.trainer.publication import Made, PublishSecrets, SealedFolder, write_made

PUBLISHED_FOLDER, MERGED_FOLDER, GGUF_FOLDER = "published", "merged", "gguf"
EXIT_DONE, EXIT_FAILED = 0, 3
NO_SECRETS = PublishSecrets()

log = logging.getLogger("gpu_workers.train.after.publish")


def main(spec_path: Path, work_dir: Path) -> int:
    """Make one part and store its result; return the exit code."""
    secrets = msgspec.json.decode(sys.stdin.buffer.readline() or b"{}", type=PublishSecrets)
    open_pulse(work_dir)
    spec = msgspec.json.decode(spec_path.read_bytes(), type=RunSpec)
    made = make(work_dir, spec, secrets)
    write_made(work_dir, secrets.part, made)
    return EXIT_FAILED if made.problem else EXIT_DONE


def make(work_dir: Path, spec: RunSpec, secrets: PublishSecrets) -> Made:
    """Return the result of a part, even for a failure."""
    try:
        base = fetch_base_model(spec.base_model, hub_token=secrets.hub_token)
        match secrets.part:
            case publication.MERGED_EXPORT:
                return Made(sealed=_merge(work_dir, base))
            case publication.GGUF_EXPORT:
                return Made(sealed=_convert(work_dir, base))
            case _:
                return examine(work_dir, spec, base, secrets=secrets)
    except (NotConverted, NotMergeable, NotStreamable, UnknownNumbers) as reason:
        return Made(problem=str(reason).rstrip("."), is_lasting=True)
    except Exception as error:  # process edge: every end must be reported
        log.exception("%s could not be made", secrets.part)
        return Made(problem=_in_words(error))


def _in_words(error: Exception) -> str:
    """Return the cause as the end of a sentence, without paths and host names."""
    if is_out_of_memory(error):
        return "it did not fit into the memory of the machine"
    if is_disk_full(error):
        return "the disk of the machine was full"
    if isinstance(error, TrainingFailed):
        return error.message.rstrip(".")
    return f"it stopped unexpectedly ({type(error).__name__})"


def examine(work_dir: Path, spec: RunSpec, base: Path, *, secrets: PublishSecrets = NO_SECRETS) -> Made:
    """Compare base and tuned model, and reseal the adapter's folder with the probe of its certificate."""
    trained = work_dir / ADAPTER_FOLDER
    report, probe = examine_result(work_dir, spec, base, trained, secrets)
    temporary = work_dir / f"tmp-{PUBLISHED_FOLDER}"
    _copy(trained, temporary)
    if probe is not None:
        (temporary / PARITY_FILE).write_bytes(msgspec.json.encode(probe))
    manifest = read_manifest(trained)
    return Made(sealed=_seal(temporary, work_dir / PUBLISHED_FOLDER, manifest, kind=manifest.kind), report=report)


def _merge(work_dir: Path, base: Path) -> SealedFolder:
    temporary = work_dir / f"tmp-{MERGED_FOLDER}"
    shutil.rmtree(temporary, ignore_errors=True)
    merge_adapter(base, work_dir / ADAPTER_FOLDER, temporary)
    return _seal(temporary, work_dir / MERGED_FOLDER, read_manifest(work_dir / ADAPTER_FOLDER), kind="model")


def _convert(work_dir: Path, base: Path) -> SealedFolder:
    """Convert the merged model, or a fully trained one. Merges first if no export asked for the merged model."""
    trained = work_dir / ADAPTER_FOLDER
    if is_adapter(trained) and not (work_dir / MERGED_FOLDER).is_dir():
        _merge(work_dir, base)
    temporary = work_dir / f"tmp-{GGUF_FOLDER}"
    shutil.rmtree(temporary, ignore_errors=True)
    model = work_dir / MERGED_FOLDER if is_adapter(trained) else trained
    convert_model(model, temporary, threads=torch.get_num_threads())
    return _seal(temporary, work_dir / GGUF_FOLDER, read_manifest(trained), kind="model")


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in read_manifest(source).files:
        os.link(source / file.name, target / file.name)


def _seal(temporary: Path, final: Path, manifest: Manifest, *, kind: str) -> SealedFolder:
    metadata = manifest.metadata | {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "trl", "safetensors")
    }
    digest = seal_folder(
        temporary,
        final,
        lambda files: msgspec.structs.replace(manifest, kind=kind, files=files, metadata=metadata),
    )
    return SealedFolder(folder=final.name, manifest_sha256=digest, bytes=folder_bytes(read_manifest(final)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    torch.set_num_interop_threads(1)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
