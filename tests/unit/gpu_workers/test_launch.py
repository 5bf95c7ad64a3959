"""How vLLM is launched: each option guards against something seen (docs/serving.md), so none may get lost."""

import os
from pathlib import Path

import msgspec
import pytest

from apps.contracts.adapter_files import ALL_LINEAR
from apps.contracts.serving import MAX_CHOICES
from gpu_workers.common.config import REPOSITORY, ConfigError, EngineConfig, read_engine_config, read_serving_config
from gpu_workers.common.process_tree import identify
from gpu_workers.engine import launcher
from gpu_workers.engine.command import build_command, build_environment, hash_settings
from gpu_workers.engine.launcher import EngineParts
from gpu_workers.engine.state import EnginePaths, ReplicaBase, record_part

MODEL = str(REPOSITORY / "demo" / "base_model")
BASE = ReplicaBase(served_name="b-demo", path=MODEL)
PATHS = EnginePaths(Path("/run"))


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(work_dir=tmp_path, max_loras=4, max_cpu_loras=32, max_lora_rank=16, drain_seconds=120)


@pytest.fixture
def command(config: EngineConfig) -> list[str]:
    return build_command(config, BASE, model_path=MODEL, paths=PATHS)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--served-model-name", "b-demo"),
        ("--uds", "/run/engine/vllm.sock"),
        ("--api-server-count", "1"),
        ("--max-loras", "4"),
        ("--max-cpu-loras", "32"),
        ("--max-lora-rank", "16"),
        ("--generation-config", "vllm"),
        ("--max-logprobs", "20"),
        ("--max-num-queued-reqs", "512"),
        ("--shutdown-timeout", "120"),
        ("--fingerprint-mode", "none"),
        ("--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}'),
    ],
)
def test_an_option_has_its_value(command: list[str], option: str, value: str) -> None:
    assert command[command.index(option) + 1] == value


@pytest.mark.parametrize(
    "own", [("--tool-call-parser", "hermes"), ("--tool-call-parser=hermes",), ("--structured-outputs-config", "{}")]
)
def test_an_operators_tool_parser_or_grammars_leave_the_choice_of_grammars_to_them(config, own) -> None:
    config = msgspec.structs.replace(config, extra_arguments=own)
    command = build_command(config, BASE, model_path=MODEL, paths=PATHS)

    assert not [word for word in command if "guidance" in word]
    assert command[-len(own) :] == list(own)


@pytest.mark.parametrize(
    ("is_cpu", "server"),
    [
        (True, ["gpu_workers.engine.forking_server", "/run/engine/parts.jsonl"]),
        (False, ["vllm.entrypoints.openai.api_server"]),
    ],
)
def test_only_the_cpu_build_forks_its_processes_and_compiles_nothing(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, is_cpu: bool, server: list[str]
) -> None:
    """To compile, a start would take twice as long and need a C++ compiler."""
    monkeypatch.setattr("gpu_workers.engine.command._is_cpu_build", lambda: is_cpu)

    command = build_command(config, BASE, model_path=MODEL, paths=PATHS)

    assert command[1 : command.index("--model")] == ["-m", *server]
    assert ("--enforce-eager" in command) is is_cpu
    assert ("TORCH_COMPILE_DISABLE" in build_environment(config)) is is_cpu


@pytest.mark.parametrize(
    "switch",
    [
        "--enable-lora",
        "--enable-force-include-usage",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
        "--disable-fastapi-docs",
    ],
)
def test_a_switch_is_on(command: list[str], switch: str) -> None:
    assert switch in command


def test_every_module_the_trainer_adapts_is_wrapped_and_nothing_dangerous_is_on(command: list[str]) -> None:
    first = command.index("--lora-target-modules") + 1
    assert tuple(command[first : first + len(ALL_LINEAR)]) == ALL_LINEAR
    forbidden = {
        "--trust-remote-code",
        "--trust-request-chat-template",
        "--api-key",
        "--tool-server",
        "--host",
        "--port",
    }
    assert not forbidden & set(command)


def test_the_experts_of_a_mixture_are_not_wrapped(config: EngineConfig, tmp_path: Path) -> None:
    """vLLM has kernels for adapters of experts on some GPUs only, and an engine elsewhere would not start."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')

    command = build_command(config, BASE, model_path=str(tmp_path), paths=PATHS)

    first = command.index("--lora-target-modules") + 1
    assert command[first : first + 4] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert command[first + 4].startswith("--")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_PLUGINS", ""),
        ("VLLM_COMPUTE_NANS_IN_LOGITS", "1"),
        ("VLLM_MAX_N_SEQUENCES", str(MAX_CHOICES)),
        ("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0"),
        ("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "16"),
        ("VLLM_MAX_IMAGE_PIXELS", "16777216"),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75"),
    ],
)
def test_a_variable_has_its_value(config: EngineConfig, name: str, value: str) -> None:
    assert build_environment(config)[name] == value


def test_the_engine_gets_no_secret_and_no_door_for_developers(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANNEAL_SIGNING_KEY", "s")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")

    environment = build_environment(config)

    assert not {"ANNEAL_SIGNING_KEY", "AWS_SECRET_ACCESS_KEY", "VLLM_SERVER_DEV_MODE"} & set(environment)
    assert "VLLM_ENABLE_RESPONSES_API_STORE" not in environment


def test_a_serving_agent_says_which_variable_is_wrong(tmp_path: Path) -> None:
    environ = {"ANNEAL_WORK_DIR": str(tmp_path), "ANNEAL_INTERNAL_URL": "http://x", "ANNEAL_REPLICA_LISTEN": "/x"}

    assert read_serving_config(environ).capacity == 0
    with pytest.raises(ConfigError, match="ANNEAL_REPLICA_CACHE_BYTES"):
        read_serving_config(environ | {"ANNEAL_REPLICA_CACHE_BYTES": "much"})


@pytest.mark.parametrize("hosts", [(), ("images.example.com", "cdn.example.org")])
def test_the_engine_fetches_media_from_listed_hosts_alone(config: EngineConfig, hosts: tuple[str, ...]) -> None:
    config = msgspec.structs.replace(config, media_hosts=hosts)

    command = build_command(config, BASE, model_path=MODEL, paths=PATHS)

    first = command.index("--allowed-media-domains") + 1
    following = next(place for place in range(first, len(command)) if command[place].startswith("--"))
    assert tuple(command[first:following]) == (hosts or ("nowhere.invalid",))


def test_a_whole_model_is_served_without_any_room_for_adapters(config: EngineConfig) -> None:
    alone = ReplicaBase(served_name="b-own", path="/models/own", has_adapters=False)

    command = build_command(config, alone, model_path="/models/own", paths=PATHS)

    assert not [word for word in command if "lora" in word]
    assert command[command.index("--served-model-name") + 1] == "b-own"
    assert "--enable-force-include-usage" in command


def test_a_canary_engine_is_launched_as_the_replicas_own_engine_but_for_folder_and_memory(tmp_path: Path) -> None:
    environ = {
        "ANNEAL_WORK_DIR": str(tmp_path),
        "ANNEAL_ENGINE_MAX_LORA_RANK": "32",
        "ANNEAL_ENGINE_GPU_MEMORY_SHARE": "0.65",
        "ANNEAL_ENGINE_BASE_MODEL_PATH": "/m",
        "ANNEAL_CANARY_GPU_MEMORY_SHARE": "0.25",
    }
    own, canary = read_engine_config(environ), read_engine_config(environ, is_canary=True)

    assert canary.work_dir == own.work_dir / "canary" and canary.base_model_path == ""  # it waits for its agent
    commands = [build_command(config, BASE, model_path=MODEL, paths=PATHS) for config in (own, canary)]
    assert [(a, b) for a, b in zip(*commands, strict=True) if a != b] == [("0.65", "0.25")]
    with pytest.raises(ConfigError, match="ANNEAL_CANARY_GPU_MEMORY_SHARE"):
        read_engine_config(environ | {"ANNEAL_CANARY_GPU_MEMORY_SHARE": "25"}, is_canary=True)


def test_a_canary_engine_is_off_until_it_is_turned_on(tmp_path: Path) -> None:
    environ = {"ANNEAL_WORK_DIR": str(tmp_path), "ANNEAL_INTERNAL_URL": "http://x", "ANNEAL_REPLICA_LISTEN": "/x"}

    assert read_serving_config(environ).has_canary_engine is False
    assert read_serving_config(environ | {"ANNEAL_CANARY_ENGINE": "on"}).has_canary_engine is True
    with pytest.raises(ConfigError, match="ANNEAL_CANARY_ENGINE must be on or off"):
        read_serving_config(environ | {"ANNEAL_CANARY_ENGINE": "1"})


def test_the_keeper_misses_a_forked_process_that_died_before_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineParts, "_GRACE_SECONDS", -1.0)
    paths = EnginePaths(tmp_path)
    paths.folder.mkdir()
    parts = EngineParts(os.getpid(), paths)
    alive = identify(os.getpid())
    assert alive is not None

    record_part(paths.parts, alive)
    assert not parts.has_lost_one()
    record_part(paths.parts, msgspec.structs.replace(alive, started_ticks=alive.started_ticks - 1))
    assert parts.has_lost_one()


def test_the_keeper_looks_for_processes_only_while_none_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(launcher, "list_descendants", lambda pid, **_: looks.append(pid) or [])
    paths = EnginePaths(tmp_path)
    paths.folder.mkdir()
    parts = EngineParts(os.getpid(), paths)
    alive = identify(os.getpid())
    assert alive is not None

    assert not parts.has_lost_one()
    record_part(paths.parts, alive)
    assert not parts.has_lost_one()

    assert looks == [os.getpid()]


def test_the_hash_of_the_settings_changes_with_what_changes_numbers_not_with_the_folder(config, monkeypatch) -> None:
    def hashed(base: ReplicaBase = BASE, **changes: object) -> str:
        return hash_settings(msgspec.structs.replace(config, **changes), base, model_path=MODEL)

    usual = hashed()
    assert hashed(work_dir=Path("/elsewhere")) == usual
    assert hashed(extra_arguments=("--kv-cache-dtype", "fp8")) != usual
    assert hashed(msgspec.structs.replace(BASE, files_sha256={"model.safetensors": "0" * 64})) != usual
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
    assert hashed() != usual
