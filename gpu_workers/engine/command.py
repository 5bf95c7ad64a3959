"""The command line and the environment of every vLLM process."""

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

from apps.contracts.adapter_files import adapted_modules
from apps.contracts.serving import MAX_CHOICES
from gpu_workers.common.config import EngineConfig, child_environment
from gpu_workers.engine.state import EnginePaths, ReplicaBase

_NO_HOST = "nowhere.invalid"  # without a list vLLM fetches images from any host; this name never exists (RFC 6761)
# llguidance compiles incrementally, with limits at every step; xgrammar 0.2.8 compiles at once, which takes seconds for
# a counted repetition. Blanks between members are excluded: a small model may write them without end. The tool parsers
# of vLLM 0.32 write for xgrammar only, so with a tool parser vLLM chooses the backend.
_GRAMMARS = '{"backend": "guidance", "disable_any_whitespace": true}'
_GRAMMAR_OPTIONS = ("--structured-outputs-config", "--tool-call-parser")
# A few hundred kilobytes of a PNG can hold 170 million pixels: half a gigabyte, eight times in one request.
_MAX_PIXELS = 2**24
# On a CPU nothing is compiled: the sampler alone takes ten seconds, at the first request for log-probabilities, and
# needs a C++ compiler. vLLM 0.32 compiles no model with adapters there; without --enforce-eager it still prepares for
# that, and computes norms and activations with torch instead of its own kernels.
_CPU_KV_CACHE_BYTES = 256 * 2**20  # room for 80 full sequences of the demo model (6 KiB a token, 512 tokens)
_CPU_SEQUENCES = 2 * MAX_CHOICES  # as on a small GPU; vLLM's 128 of a CPU could be those of one request

_NUMERIC_VARIABLES = ("VLLM_", "TORCH", "CUDA", "CUBLAS", "NVIDIA_")  # they choose kernels and their precision


def build_command(config: EngineConfig, base: ReplicaBase, *, model_path: str, paths: EnginePaths) -> list[str]:
    """Return the command line: one model under its served name, adapters loaded at run time if any, socket only."""
    options = {
        "--model": model_path,
        "--served-model-name": base.served_name,
        "--uds": str(paths.socket),
        "--api-server-count": "1",  # runtime adapters do not work with more
        "--generation-config": "vllm",
        "--max-logprobs": "20",
        "--max-num-queued-reqs": str(config.max_queued_requests),
        "--shutdown-timeout": str(config.drain_seconds),
        "--fingerprint-mode": "none",
    }
    if not any(word.partition("=")[0] in _GRAMMAR_OPTIONS for word in config.extra_arguments):
        options["--structured-outputs-config"] = _GRAMMARS
    if config.max_model_length:
        options["--max-model-len"] = str(config.max_model_length)
    if kv_cache_bytes := config.kv_cache_bytes or (_CPU_KV_CACHE_BYTES if _is_cpu_build() else 0):
        options["--kv-cache-memory-bytes"] = str(kv_cache_bytes)
    if config.gpu_memory_share:
        options["--gpu-memory-utilization"] = str(config.gpu_memory_share)
    adapters: list[str] = []
    if base.has_adapters:
        options["--max-loras"] = str(config.max_loras)
        options["--max-cpu-loras"] = str(config.max_cpu_loras)
        options["--max-lora-rank"] = str(config.max_lora_rank)
        # The engine reserves memory only for the layers that adapters of this model change.
        modules = adapted_modules(json.loads((Path(model_path) / "config.json").read_bytes()))
        adapters = ["--enable-lora", "--lora-target-modules", *modules]
    switches = [
        "--enable-force-include-usage",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
    ]
    server = ["vllm.entrypoints.openai.api_server"]
    if _is_cpu_build():
        server = ["gpu_workers.engine.forking_server", str(paths.parts)]
        switches.append("--enforce-eager")
        options["--max-num-seqs"] = str(_CPU_SEQUENCES)
    pairs = [word for pair in options.items() for word in pair]
    media = ["--allowed-media-domains", *(config.media_hosts or (_NO_HOST,))]
    return [sys.executable, "-m", *server, *pairs, *media, *adapters, *switches, *config.extra_arguments]


def build_environment(config: EngineConfig) -> dict[str, str]:
    """Return the engine's environment: no secrets of this worker, no network, few threads that sleep when idle."""
    extra = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": "",
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
        "VLLM_MAX_N_SEQUENCES": str(MAX_CHOICES),
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "16",
        "VLLM_MAX_IMAGE_PIXELS": str(_MAX_PIXELS),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinned threads would compete with the trainer for one core
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if _is_cpu_build():
        extra["TORCH_COMPILE_DISABLE"] = "1"
    return child_environment(threads=config.threads, extra=extra, has_network=bool(config.media_hosts))


def hash_settings(config: EngineConfig, base: ReplicaBase, *, model_path: str) -> str:
    """Return a hash of what may change the numbers of an engine: its command line, environment and pinned files.

    It is the same after each start with the same settings: the paths of sockets are left out.
    """
    command = build_command(config, base, model_path=model_path, paths=EnginePaths(Path()))
    environment = {
        name: value for name, value in build_environment(config).items() if name.startswith(_NUMERIC_VARIABLES)
    }
    settings = json.dumps([command, environment, base.files_sha256], sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
