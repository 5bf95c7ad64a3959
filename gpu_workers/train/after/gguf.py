"""GGUF export by llama.cpp's converter in a separate process.

The converter may be missing, reject a model, or take too long.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from apps.contracts.struct import Struct
from gpu_workers.common.config import REPOSITORY, child_environment
from gpu_workers.common.gguf_converter import FOLDER, converter_version

GGUF_FILE = "model.gguf"
_LIMIT_SECONDS = 900.0
_BYTES_A_SECOND = 25e6  # read, convert, write and read back, on a slow disk


class NotConverted(Exception):
    """No GGUF was written; the message gives the reason."""


class _Answer(Struct, frozen=True):
    architecture: str = ""
    tensors: int = 0
    problem: str = ""


def convert_model(model: Path, target: Path, *, threads: int = 1, converter: Path = FOLDER) -> _Answer:
    """Write `target`/model.gguf from a folder with a whole 16-bit model; raises NotConverted."""
    if converter_version(converter) is None:
        raise NotConverted("this worker has no converter installed (`make setup-gguf`)")
    target.mkdir(parents=True, exist_ok=True)
    environment = child_environment(
        threads=threads, extra={"PYTHONPATH": str(converter), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    )
    command = [sys.executable, "-m", "gpu_workers.train.after.gguf_child", str(model), str(target / GGUF_FILE)]
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            timeout=_LIMIT_SECONDS + sum(file.stat().st_size for file in model.glob("*.safetensors")) / _BYTES_A_SECOND,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotConverted("the conversion took too long") from error
    sys.stderr.buffer.write(done.stderr[-4_000:])
    lines = done.stdout.splitlines()
    try:
        answer = msgspec.json.decode(lines[-1] if lines else b"", type=_Answer)
    except msgspec.DecodeError as error:
        raise NotConverted("the converter failed on this model") from error
    if answer.problem:
        raise NotConverted(answer.problem)
    return answer
