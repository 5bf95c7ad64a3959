"""`anneal estimate` from the outside: what it prints, what it refuses, and that it needs nothing but the repository."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apps.interfaces.cli.__main__ import main
from apps.interfaces.cli.catalog import gpu_types
from scripts import setup

ROOT = Path(__file__).resolve().parents[3]
JOB = ("--model", "Llama-3.1-8B", "--gpu", "h100", "--tokens", "10e6", "--epochs", "3", "--price", "2.69")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


def estimate(capsys, *arguments: str) -> str:
    assert main(["estimate", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    """Return what is said on standard error, with nothing on standard output."""
    try:
        status = main(["estimate", *arguments])
    except SystemExit as stopped:  # argparse's own
        status = stopped.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    return said.err


def asked(**changes: str | None) -> list[str]:
    """The usual job with options changed, or left out where None."""
    options = dict(zip(JOB[::2], JOB[1::2], strict=True)) | {f"--{k.replace('_', '-')}": v for k, v in changes.items()}
    return [word for name, value in options.items() if value is not None for word in (name, value)]


def test_a_table_shows_memory_time_and_cost(capsys) -> None:
    text = estimate(capsys, *asked(method="qlora"))

    assert "Llama-3.1-8B, 8.03 B parameters: QLoRA, rank 16, 30.0 M tokens" in text
    assert "h100-sxm-80  yes" in text
    assert "Base model weights" in text
    assert "$2.69 an hour and GPU, as given" in text
    assert "h100 is read as h100-sxm-80" in text


def test_json_holds_the_question_the_answers_and_the_choice(capsys) -> None:
    answer = json.loads(estimate(capsys, *asked(), "--json"))

    option = answer["options"][0]
    assert answer["parameters"] == 8_030_261_248
    assert answer["request"]["tokens"] == 10_000_000
    assert answer["ranking"]["recommended"] == option["id"] == "h100-sxm-80"
    assert sum(part["bytes"] for part in option["estimate"]["parts"]) == option["estimate"]["peak_bytes"]
    cost, seconds = option["estimate"]["cost_nano_p50"], option["estimate"]["train_seconds_p50"]
    assert cost == pytest.approx(seconds / 3600 * 2.69e9, rel=1e-6)


def test_all_cards_are_ranked_with_their_badges(capsys) -> None:
    answer = json.loads(estimate(capsys, *asked(gpu="all", price=None, method="qlora"), "--json"))

    assert [option["estimate"]["gpu_key"] for option in answer["options"]] == list(gpu_types())
    costs = {
        option["id"]: option["estimate"]["cost_nano_p50"]
        for option in answer["options"]
        if option["estimate"]["cost_nano_p50"] is not None
    }
    assert costs[answer["ranking"]["cheapest"]] == min(costs.values())
    text = estimate(capsys, *asked(gpu="all", price=None, method="qlora"))
    assert all(badge in text for badge in ("recommended", "cheapest", "fastest"))


def test_a_deadline_decides_what_is_recommended(capsys) -> None:
    text = estimate(capsys, *asked(within="0.01"))

    assert "Nothing is done within 0.01 h in nine cases of ten." in text
    assert "recommended" not in text


def test_spot_says_what_its_interruptions_cost(capsys) -> None:
    plain, spot = estimate(capsys, *JOB, "--json"), estimate(capsys, *JOB, "--spot", "0.5", "--json")
    said = estimate(capsys, *JOB, "--spot", "0.5")

    plain, spot = (json.loads(text)["options"][0]["estimate"] for text in (plain, spot))
    assert spot["interruptions"] > 0
    assert spot["cost_nano_p50"] > plain["cost_nano_p50"]
    assert "of work redone and billed" in said


def test_what_does_not_fit_has_ways_out_and_no_time_or_cost(capsys) -> None:
    answer = json.loads(estimate(capsys, *asked(model="Llama-3.1-70B", gpu="l4"), "--json"))
    found = answer["options"][0]["estimate"]

    assert (found["fits"], found["cost_nano_p50"], found["train_seconds_p50"]) == (False, None, None)
    assert "Ways to make it fit" in estimate(capsys, *asked(model="Llama-3.1-70B", gpu="l4"))


def test_each_way_out_has_its_price_on_other_types_and_more_of_them_too(capsys) -> None:
    answer = json.loads(estimate(capsys, *asked(model="Llama-3.1-70B", gpu="h100", method="lora"), "--json"))
    ways = {fix["key"]: fix for fix in answer["options"][0]["estimate"]["fixes"]}

    assert {"method", "gpu_count", "offload", "gpu"} <= set(ways)
    assert ways["gpu_count"]["gpu_count"] == 4
    assert all(way["cost_nano_p50"] > 0 for way in ways.values())


def test_many_gpus_are_several_machines(capsys) -> None:
    """Sixteen cards are two machines, with a network between them."""
    answer = json.loads(estimate(capsys, *asked(gpu="h100", gpus="8,16", method="full", batch="64"), "--json"))
    one, two = (each["estimate"] for each in answer["options"])

    assert one["fits"] and two["fits"]
    assert two["tokens_per_second"] < 2 * one["tokens_per_second"]


def test_machines_share_the_gpus_and_their_network_takes_its_part(capsys) -> None:
    one, two = (
        json.loads(estimate(capsys, *asked(gpus="8", nodes=nodes), "--json"))["options"][0] for nodes in ("1", "2")
    )
    said = estimate(capsys, *asked(nodes="2"))
    (whole,) = json.loads(estimate(capsys, *asked(gpus="16", nodes="2", method="full"), "--json"))["options"]

    assert (one["node_count"], two["node_count"], two["estimate"]["parallelism"]) == (1, 2, "ddp")
    assert two["estimate"]["train_seconds_p50"] > one["estimate"]["train_seconds_p50"]
    assert two["estimate"]["cost_nano_p50"] > one["estimate"]["cost_nano_p50"]
    assert re.search(r"h100-sxm-80:2 is on 2 machines, whose network takes [1-9]\d?% of the time and cost\.", said)
    plan = whole["estimate"]["plan"]
    assert (plan["parallelism"], plan["copies"]) == ("zero3", 2)  # no GPU holds it, and each machine holds a copy


def test_a_reference_belongs_to_preferences(capsys) -> None:
    assert "--no-reference" in refused(capsys, *asked(), "--no-reference")


def test_any_config_json_will_do(capsys, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))

    by_file = json.loads(estimate(capsys, *asked(model=str(path)), "--json"))
    by_folder = json.loads(estimate(capsys, *asked(model=str(tmp_path)), "--json"))

    assert by_file["parameters"] == by_folder["parameters"] == 1_100_048_384


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_a_config_without_a_field_is_refused_by_its_name(capsys, tmp_path, missing) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != missing}))

    said = refused(capsys, *asked(model=str(path)))

    assert "--model" in said
    assert missing in said


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_config_that_is_none_is_refused(capsys, tmp_path, content) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    assert "--model" in refused(capsys, *asked(model=str(path)))


@pytest.mark.parametrize(
    ("changes", "option", "near"),
    [
        ({"model": "Lama-3.1-8B"}, "--model", "Llama-3.1-8B"),
        ({"model": "./none.json"}, "--model", ""),
        ({"gpu": "h10"}, "--gpu", "h100-sxm-80"),
        ({"gpu": "abacus"}, "--gpu", ""),
        ({"gpus": "two"}, "--gpus", ""),
        ({"gpus": "0"}, "--gpus", ""),
        ({"method": "magic"}, "--method", "qlora"),
        ({"rank": "0"}, "--rank", ""),
        ({"rank": "1e9"}, "--rank", ""),
        ({"seq": "0"}, "--seq", ""),
        ({"batch": "0"}, "--batch", ""),
        ({"batch": "1e12"}, "--batch", ""),
        ({"batch": "2.5"}, "--batch", ""),
        ({"epochs": "0"}, "--epochs", ""),
        ({"tokens": "0"}, "--tokens", ""),
        ({"tokens": None}, "--tokens", ""),
        ({"tokens": "nan"}, "--tokens", ""),
        ({"tokens": "1e9", "rows": "10"}, "--tokens", ""),
        ({"trained_tokens": "0"}, "--trained-tokens", ""),
        ({"trained_tokens": "11e6"}, "--trained-tokens", ""),
        ({"rows": "-1"}, "--rows", ""),
        ({"micro_batch": "3"}, "--micro-batch", ""),
        ({"targets": "nose_proj"}, "--targets", "q_proj"),
        ({"optimizer": "hope"}, "--optimizer", ""),
        ({"stack": "of-cards"}, "--stack", ""),
        ({"price": "-1"}, "--price", ""),
        ({"price": "inf"}, "--price", ""),
        ({"price": "1e300"}, "--price", ""),
        ({"targets": ","}, "--targets", ""),
        ({"tokens": "1e40"}, "--tokens", ""),
        ({"tokens": "100", "rows": "1000"}, "--tokens", ""),
        ({"within": "0"}, "--within", ""),
        ({"nodes": "0"}, "--nodes", "between 1 and 64"),
        ({"nodes": "65"}, "--nodes", "between 1 and 64"),
        ({"nodes": "2", "gpus": "3"}, "--gpus", "give a multiple of 2"),
        ({"nodes": "3"}, "--batch", "3 GPUs cannot share"),
    ],
)
def test_bad_input_is_refused_with_the_option_and_near_names(capsys, changes, option, near) -> None:
    said = refused(capsys, *asked(**changes))

    assert option in said
    assert near in said
    assert "Traceback" not in said


def test_a_refusal_is_json_when_json_was_asked_for(capsys) -> None:
    error = json.loads(refused(capsys, *asked(gpu="h10"), "--json"))["error"]

    assert error["param"] == "--gpu"
    assert "h100-sxm-80" in error["near"]


def test_the_installed_command_runs_from_anywhere_without_server_database_or_network(tmp_path) -> None:
    """In a fresh process that may open no socket and where neither Django nor torch can be imported."""
    (tmp_path / "apps").mkdir()  # a folder of the same name where it is called from
    (tmp_path / "sitecustomize.py").write_text(
        "import socket, sys\n"
        "def refuse(*_, **__): raise OSError('no network here')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "sys.modules['django'] = sys.modules['torch'] = sys.modules['psycopg'] = None\n"
    )
    binaries = tmp_path / "a place" / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    (tmp_path / "a place" / "apps").symlink_to(ROOT / "apps")
    setup.install_command(setup.Environment("web", binaries.parent, ()))
    packages = next(path for path in sys.path if path.endswith("site-packages"))

    done = subprocess.run(
        [binaries / "anneal", "estimate", *JOB],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{packages}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "h100-sxm-80  yes" in done.stdout
