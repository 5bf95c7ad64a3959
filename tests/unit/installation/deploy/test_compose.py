"""deploy/compose.yaml against the table of programs: same commands, right logins, nothing a worker should not know."""

import re
import shlex
import sys
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from apps.config.settings.outbox import OUTBOX_MOST_AT_ONCE, OUTBOX_TOPICS
from gpu_workers.common.gguf_converter import FOLDER
from scripts.processes import CONTAINER, PROGRAMS, Program
from tests.bench.neighbours import stage

REPOSITORY = Path(__file__).resolve().parents[4]
DEPLOY = REPOSITORY / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
IN_CONTAINERS = [program for program in PROGRAMS if not program.is_embedded_only]
# Set by the images.
FROM_DOCKERFILE = {"ANNEAL_HOME", "DJANGO_SETTINGS_MODULE"}
WITHOUT_USE = {
    "ANNEAL_MAIL_FOLDER": "mail goes to a server",
    "AWS_SESSION_TOKEN": "the bucket's keys are lasting ones",
    "AWS_DEFAULT_REGION": "the address of the bucket names it",
    "STRIPE_API_BASE": "for tests with a stand-in of Stripe",
    "ANNEAL_BASE_MODELS": "a trainer's folders say which models it has",
    "ANNEAL_GPU_KEY": "a trainer reads it from its GPU",
}


@pytest.fixture(params=IN_CONTAINERS, ids=lambda program: program.name)
def program(request: pytest.FixtureRequest) -> Program:
    return request.param


def test_every_program_is_a_service_with_the_command_of_the_table(program: Program) -> None:
    assert shlex.split(SERVICES[program.name]["command"]) == CONTAINER.command(program)


def test_every_program_gets_the_variables_it_needs(program: Program) -> None:
    given = set(SERVICES[program.name]["environment"]) | FROM_DOCKERFILE

    assert program.needs - given == set()


def test_every_program_gets_the_settings_it_reads(program: Program) -> None:
    assert program.options - set(SERVICES[program.name]["environment"]) <= set(WITHOUT_USE)


def test_the_table_of_programs_names_every_variable_that_the_code_reads() -> None:
    sources = "\n".join(
        (REPOSITORY / path).read_text() for path in ("apps/config/env.py", "gpu_workers/common/config.py")
    )
    known = set().union(*(each.needs | each.options | dict(each.variables).keys() for each in PROGRAMS))
    folded = {"ANNEAL_CANARY", "ANNEAL_ENGINE"}  # beginnings of two names each
    of_one_engine = {"ANNEAL_ENGINE_BASE_MODEL_PATH", "ANNEAL_ENGINE_SERVED_NAME"}  # without a serving agent

    of_nodes = {"ANNEAL_NODE_ADDRESS", "ANNEAL_REPLICA_PORT"}  # of workers that operators or elastic pools start

    read = set(re.findall(r'"((?:ANNEAL|STRIPE)_[A-Z_]+)"', sources))

    assert read - folded - of_one_engine - of_nodes - FROM_DOCKERFILE - known == set()


def test_every_program_logs_in_as_its_own_role(program: Program) -> None:
    url = SERVICES[program.name]["environment"].get("DATABASE_URL", "")

    assert re.findall(r"//anneal_(\w+):", url) == ([program.role] if program.role else [])


@pytest.mark.parametrize("program", [each for each in IN_CONTAINERS if each.role], ids=lambda program: program.name)
def test_celery_starts_without_the_checks_that_import_every_page(program: Program) -> None:
    urls = {str(program.role): "postgresql://x"}

    here = CONTAINER.variables(program, dict.fromkeys(program.needs, "x"), database_urls=urls)

    assert here["CELERY_SKIP_CHECKS"] == SERVICES[program.name]["environment"]["CELERY_SKIP_CHECKS"] == "1"


@pytest.mark.parametrize(
    "program", [each for each in IN_CONTAINERS if "uvicorn" in each.command], ids=lambda program: program.name
)
def test_a_web_server_believes_no_header_that_names_another_caller(program: Program) -> None:
    """uvicorn believes X-Forwarded-For of any caller on this machine, and limits count by address."""
    assert "--no-proxy-headers" in SERVICES[program.name]["command"].split()


def test_every_program_may_take_its_time_to_stop(program: Program) -> None:
    grace_seconds = int(SERVICES[program.name].get("stop_grace_period", "10s").removesuffix("s"))

    assert grace_seconds >= min(program.stop_seconds, 10) and (
        program.stop_seconds <= 15 or grace_seconds >= program.stop_seconds
    )


@pytest.mark.parametrize("name", ["trainer", "vllm", "vllm-canary", "serving-agent"])
def test_a_gpu_box_knows_no_secret_of_the_control_plane_and_reaches_no_database(name: str) -> None:
    service = SERVICES[name]

    text = yaml.safe_dump(service["environment"])
    assert not re.search(r"DATABASE|SECRET|PEPPER|SIGNING|AWS_|CONTROL_PASSWORD", text)
    assert "database" not in service["networks"]


@pytest.mark.parametrize("name", ["trainer", "vllm", "vllm-canary", "serving-agent"])
def test_a_gpu_box_has_no_way_out_but_the_egress_proxy(name: str) -> None:
    networks = SERVICES[name]["networks"]

    assert all(COMPOSE["networks"][network].get("internal") for network in networks)
    has_proxy = SERVICES[name]["environment"].get("HTTPS_PROXY") == "http://egress:3128"
    assert has_proxy == ("egress" in networks)
    assert {one for one, service in SERVICES.items() if "egress" in service.get("networks", ())} == {
        "egress", "trainer", "vllm"
    }  # fmt: skip


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "168.63.129.16", "127.0.0.1", "10.0.0.1",
        "172.17.0.1", "192.168.0.1", "0.0.0.0", "::1", "fe80::1", "fd00:ec2::254", "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1",
    ],
)  # fmt: skip
def test_the_egress_proxy_denies_metadata_and_private_addresses_before_it_allows_any(address: str) -> None:
    lines = [line.split() for line in (DEPLOY / "egress/squid.conf").read_text().splitlines()]
    inside = [ip_network(text) for line in lines if line[:3] == ["acl", "inside", "dst"] for text in line[3:]]
    rules = [line[1:] for line in lines if line[:1] == ["http_access"]]

    asked = ip_address(address)
    asked = getattr(asked, "ipv4_mapped", None) or asked  # as Squid sees it: it keeps each address in 128 bits
    assert any(asked in network for network in inside if network.version == asked.version)
    # Of two networks that overlap, Squid ignores one. To it, IPv4 is ::ffff:0:0/96.
    assert not any(network.overlaps(ip_network("::ffff:0:0/96")) for network in inside if network.version == 6)
    assert rules[0] == ["deny", "inside"] and rules[-1] == ["deny", "all"]
    assert [rule for rule in rules if rule[0] == "allow"] == [["allow", "CONNECT"]]


@pytest.mark.parametrize(
    "name", ["migrate", "web", "celery", "celery-data", "trainer", "vllm", "vllm-canary", "serving-agent"]
)
def test_base_models_are_seen_under_one_path(name: str) -> None:
    service = SERVICES[name]

    assert "./models:/var/lib/anneal/models:ro" in service["volumes"]
    roots = service["environment"].get("ANNEAL_BASE_MODEL_ROOTS", "")
    assert roots == ("" if name.startswith("vllm") else "/var/lib/anneal/models")


@pytest.mark.parametrize("image", ["web", "gpu"])
def test_a_new_volume_belongs_to_the_user_of_the_image(image: str) -> None:
    """A volume gets the owner of the folder that the image has at its path, or root if there is none."""
    dockerfile = (DEPLOY / f"images/{image}.Dockerfile").read_text()
    [made] = re.findall(r"mkdir -p (.*) && chown -R anneal", dockerfile)
    for name, folder in re.findall(r"(\w+)=(/\S+)", dockerfile):
        made = made.replace(f"${name}", folder)

    volumes = [each for service in SERVICES.values() if service.get("image") == f"anneal-{image}"
               for each in service.get("volumes", ())]  # fmt: skip
    named = {each.split(":")[1] for each in volumes if each.split(":")[0] in COMPOSE["volumes"]}
    assert named <= set(made.split())


def test_the_image_of_trainers_has_the_converter_where_they_look_for_it() -> None:
    dockerfile = (DEPLOY / "images/gpu.Dockerfile").read_text()
    [venv] = re.findall(r"python -m venv (\S+)", dockerfile)

    [installed] = re.findall(r"pip install .* --target (\S+) -r /gguf.lock", dockerfile)
    assert installed == f"{venv}/{FOLDER.relative_to(sys.prefix)}"


@pytest.mark.parametrize("image", ["web", "gpu"])
def test_what_an_image_copies_is_sent_to_the_builder(image: str) -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / f"images/{image}.Dockerfile").read_text(), re.MULTILINE)
    sent = re.findall(r"^!(.+)$", (DEPLOY / f"images/{image}.Dockerfile.dockerignore").read_text(), re.MULTILINE)

    assert set(" ".join(copied).split()) == set(sent)


def test_the_first_operator_is_created_where_the_database_allows_it() -> None:
    places = ("deploy/compose.yaml", "deploy/helm/anneal/templates/NOTES.txt", "docs/operations/kubernetes.md")
    roles = {program.name: program.role for program in PROGRAMS}

    for place in places:
        text = (REPOSITORY / place).read_text()
        [program] = re.findall(r"(?:deploy/|exec )(\w+)\s+(?:-- )?python manage\.py createoperator", text)
        assert roles[program] == "sys", place


def test_every_queue_has_a_worker_and_those_of_customers_are_measured_beside_an_attack() -> None:
    asked = {program.name: re.search(r"--queues (\S+)", program.command) for program in PROGRAMS}
    celery = {name: found[1] for name, found in asked.items() if found and name.startswith("celery")}
    workers = {queue: name for name, queues in celery.items() for queue in queues.split(",")}

    assert {topic.lane for topic in OUTBOX_TOPICS.values()} | OUTBOX_MOST_AT_ONCE.keys() <= workers.keys()
    # Stripe's, which has no twin there.
    assert set(workers.values()) - stage._PROGRAMS.keys() == {"celery-payments"}


def test_only_services_that_handle_objects_know_the_buckets_keys() -> None:
    with_keys = {name for name, one in SERVICES.items() if "AWS_SECRET_ACCESS_KEY" in one.get("environment", {})}
    granted = {program.name for program in PROGRAMS if "AWS_SECRET_ACCESS_KEY" in program.options}

    data = {"celery-data", "celery-data-middle", "celery-data-small", "celery-batches", "celery-hub-uploads"}
    assert with_keys - {"migrate"} == granted == {"web", "internal", "celery"} | data


def test_only_the_service_that_sends_mail_knows_the_mail_servers_password() -> None:
    with_password = {name for name, one in SERVICES.items() if "ANNEAL_EMAIL_URL" in one.get("environment", {})}
    granted = {program.name for program in PROGRAMS if "ANNEAL_EMAIL_URL" in program.options | program.needs}

    assert with_password == granted == {"celery-mail"}


def address_of_workers(name: str) -> str:
    """Return the host of an address that the control plane gives to workers, as long as .env does not set another."""
    found = re.search(r"\$\{\w+:-(http://[^}]+)\}", SERVICES["internal"]["environment"][name])
    assert found, name
    return urlsplit(found[1]).hostname or ""


@pytest.mark.parametrize("name", ["ANNEAL_INTERNAL_URL", "ANNEAL_WORKER_GATEWAY_URL", "ANNEAL_OBJECT_STORE"])
def test_a_trainer_shares_a_network_with_each_service_whose_address_it_gets(name: str) -> None:
    assert set(SERVICES[address_of_workers(name)]["networks"]) & set(SERVICES["trainer"]["networks"])


def test_ipv6_callers_keep_their_address() -> None:
    """Into a network without IPv6, Docker's own proxy forwards connections, as if all came from one address."""
    assert SERVICES["nginx"]["networks"] == ["front"]
    assert COMPOSE["networks"]["front"] == {"enable_ipv6": True}


def commands_of_docs() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of Compose that the documentation names, with its page."""
    for page in [*REPOSITORY.glob("docs/**/*.md"), DEPLOY / "compose.yaml"]:
        for line in page.read_text().splitlines():
            for found in re.findall(r"docker compose ([^`#|&]+)", line):
                yield page.name, shlex.split(found)


def services_of(words: list[str]) -> set[str]:
    """Return the services that a command names: the first word of `run` and `exec`, all words of the others."""
    with_value, plain = {"-v", "-e", "--profile"}, list[str]()
    rest = iter(words)
    for word in rest:
        if word in with_value:
            next(rest)
        elif not word.startswith("-"):
            plain.append(word)
    verb, *named = plain
    return set(named[:1] if verb in ("run", "exec") else named)


def test_commands_of_the_documentation_name_services_that_exist() -> None:
    commands = list(commands_of_docs())

    assert len(commands) > 15
    assert [(page, words) for page, words in commands if not services_of(words) <= SERVICES.keys()] == []
    runs = [words for page, words in commands if page == "backup.md" and "manage.py" in words]
    assert runs and all("--no-deps" in words for words in runs)  # `migrate` would fill an empty database


def test_the_database_is_on_one_network_without_a_way_out() -> None:
    assert SERVICES["postgres"]["networks"] == ["database"]
    assert COMPOSE["networks"]["database"] == {"internal": True}


def test_only_the_front_door_is_published_to_the_world() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}

    assert published.pop("nginx") == ["80:80", "443:443"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_the_example_of_settings_names_every_variable_the_file_asks_for() -> None:
    asked = set(re.findall(r"\$\{(\w+)[:?}]", (DEPLOY / "compose.yaml").read_text()))
    environments = [service.get("environment", {}) for service in SERVICES.values()]
    passed_on = {name for each in environments for name, value in each.items() if value is None}

    example = (DEPLOY / ".env.example").read_text()
    assert asked == set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    assert passed_on == set(re.findall(r"^#(\w+)=", example, re.MULTILINE))


def test_every_file_and_lock_that_is_mounted_copied_or_built_exists() -> None:
    root = DEPLOY.parent
    copied = re.findall(
        r"^COPY (?!--from)(?:--chown=\S+ )?(\S+)",
        "".join(p.read_text() for p in DEPLOY.glob("images/*.Dockerfile")),
        re.MULTILINE,
    )
    mounted = [v.split(":")[0] for s in SERVICES.values() for v in s.get("volumes", []) if v.startswith("./")]

    missing = [path for path in copied if not (root / path).exists()]
    missing += [path for path in mounted if not (DEPLOY / path).exists() and path != "./certs"]
    assert missing == []
