"""deploy/helm: rendered by Helm, checked against Kubernetes' own schemas, the table of programs and compose.yaml."""

import json
import re
import shlex

import jsonschema_rs
import pytest
import yaml

from scripts.installation.clients import KUBERNETES_SCHEMAS
from scripts.processes import CONTAINER, CONTROL_OPTIONS, PROGRAMS, Program
from tests.integration.deploy.helm.chart import (
    HELM_FOLDER,
    SERVICES,
    Helm,
    Object,
    Rendering,
    container_of,
    from_secrets,
    objects_of,
    pods,
    variables,
)

# Defined by KEDA and by the Prometheus operator, whose schemas the tests do not have.
OF_OTHERS = {"ScaledObject", "ScrapeConfig", "PodMonitor", "PrometheusRule"}
IN_CHART = [program for program in PROGRAMS if not program.is_embedded_only]
# Variables of the README that the chart takes in another way, or never.
NOT_SETTINGS = {
    "of a Secret": {
        "ANNEAL_SECRET_KEY", "ANNEAL_SECRET_KEY_FALLBACKS", "ANNEAL_KEY_PEPPER", "ANNEAL_SIGNING_KEY", "REDIS_URL",
        "CELERY_BROKER_URL", "DATABASE_OWNER_URL", "DATABASE_APP_URL", "DATABASE_SYS_URL", "DATABASE_INTERNAL_URL",
        "DATABASE_GATEWAY_URL", "ANNEAL_EMAIL_URL", "ANNEAL_FROM_EMAIL", "STRIPE_SECRET_KEY", "STRIPE_WEBHOOK_SECRET",
        "STRIPE_PORTAL_CONFIGURATION", "STRIPE_TAX", "STRIPE_METER", "OTEL_EXPORTER_OTLP_HEADERS",
    },
    "a value with a name of its own": {
        "ANNEAL_PUBLIC_URL", "ANNEAL_INTERNAL_URL", "ANNEAL_OBJECT_STORE", "ANNEAL_CANARY_ENGINE", "ANNEAL_POOL",
    },
    "the same in each cluster": {
        "DATABASE_URL", "ANNEAL_GATEWAY_URL", "ANNEAL_BASE_MODEL_ROOTS", "ANNEAL_HOME", "ANNEAL_WORK_DIR",
        "ANNEAL_WORKER_CREDENTIAL_FILE", "FORWARDED_ALLOW_IPS",
    },
    "of the launcher, or of machines outside of the chart": {
        "ANNEAL_WEB_HOST", "ANNEAL_NODE_ADDRESS", "ANNEAL_REPLICA_PORT",
    },
    "of one command": {"BACKUP_AWS_ACCESS_KEY_ID", "BACKUP_AWS_SECRET_ACCESS_KEY"},
}  # fmt: skip
VALUES_SCHEMA = json.loads((HELM_FOLDER / "anneal/values.schema.json").read_text())


@pytest.fixture(params=IN_CHART, ids=lambda program: program.name)
def program(request: pytest.FixtureRequest) -> Program:
    return request.param


# --- Kubernetes and Helm accept it ------------------------------------------------------------------------------------


class Schemas:
    """The schemas of one version of Kubernetes, in which unknown fields are errors."""

    def __init__(self, version: str) -> None:
        self._folder = KUBERNETES_SCHEMAS / f"v{version}.0-local-strict"
        definitions = json.loads((self._folder / "_definitions.json").read_text())
        self._registry = jsonschema_rs.Registry([("json-schema:///api/_definitions.json", definitions)])

    def errors(self, each: Object) -> list[str]:
        group, _, version = each["apiVersion"].rpartition("/")
        parts = [each["kind"].lower(), *([group.split(".")[0]] if group else []), version]
        schema = json.loads((self._folder / f"{'-'.join(parts)}.json").read_text())
        validator = jsonschema_rs.validator_for(schema, registry=self._registry)
        return [f"{each['kind']} {each['metadata']['name']}: {error.message}" for error in validator.iter_errors(each)]


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_every_object_fits_the_schema_of_kubernetes(version: str, rendered: Rendering) -> None:
    schemas = Schemas(version)
    own = [each for each in rendered if each["kind"] not in OF_OTHERS]

    assert len(own) > 60 and {each["kind"] for each in rendered} >= OF_OTHERS
    assert [error for each in own for error in schemas.errors(each)] == []
    [job] = [each for each in own if each["kind"] == "Job"]
    assert schemas.errors(job | {"spec": job["spec"] | {"unknownField": 1}})


@pytest.mark.slow
def test_helm_finds_no_fault(helm: Helm) -> None:
    done = helm("lint", "--strict", f"--values={HELM_FOLDER / 'example.yaml'}")

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--set=publicUrl="], "publicUrl"),
        (["--set=settings.ANNEAL_BRAND_NAMES=x"], "ANNEAL_BRAND_NAMES"),
        (["--set=network.database.peers=null"], "network/database"),
        (["--set-json=network.database.peers=[]"], "network.database.peers"),
        (["--set=monitoring.tokenSecret="], "monitoring.tokenSecret"),
        (["--namespace=anneal"], "capacity.enabled"),
        (["--set=pools[0].scaling.minReplicas=0"], "minReplicas"),
    ],
)
def test_a_wrong_value_is_named(options: list[str], named: str, helm: Helm) -> None:
    done = helm("template", f"--values={HELM_FOLDER / 'example.yaml'}", *options)

    assert done.returncode != 0 and named in done.stderr


# --- The same programs as everywhere ----------------------------------------------------------------------------------


def test_every_program_runs_with_the_command_and_the_ports_of_the_table(program: Program, rendered: Rendering) -> None:
    pod, container = container_of(rendered, program.name)

    assert container["command"] == [word.replace("${ANNEAL_POOL}", "h100") for word in CONTAINER.command(program)]
    asked = re.search(r"--port (\d+)", shlex.join(container["command"]))
    assert [int(asked[1])] == [each["containerPort"] for each in container["ports"]] if asked else True
    pause = ["sleep", "5"] if asked and program.role else []  # behind a Service, which still sends connections
    assert container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []) == pause
    assert pod["terminationGracePeriodSeconds"] >= program.stop_seconds + sum(map(int, pause[1:]))


def test_every_program_gets_the_variables_it_needs_and_no_others(program: Program, rendered: Rendering) -> None:
    given = variables(container_of(rendered, program.name)[1])
    compose = SERVICES[program.name]["environment"]
    of_image = {"ANNEAL_HOME"}

    assert program.needs - given.keys() - of_image == set()
    assert given.keys() - compose.keys() <= {"POD_NAME", "DJANGO_SETTINGS_MODULE"} | program.options
    for name in given.keys() & {"DJANGO_SETTINGS_MODULE", "ANNEAL_DEBUG", "FORWARDED_ALLOW_IPS", "CELERY_SKIP_CHECKS"}:
        assert given[name]["value"] == compose.get(name, "apps.config.settings.prod")


def test_every_variable_of_compose_is_a_variable_or_a_value(program: Program, rendered: Rendering) -> None:
    given = set(variables(container_of(rendered, program.name)[1]))
    properties = VALUES_SCHEMA["properties"]
    lists = {"trainer": properties["pools"]["items"]["properties"]}
    settings = properties if program.role else lists.get(program.name, properties["replicas"]["items"]["properties"])

    assert set(SERVICES[program.name]["environment"]) - given - set(settings["settings"]["properties"]) == set()


def test_the_settings_that_the_schema_knows_are_those_of_the_control_plane() -> None:
    known = set(VALUES_SCHEMA["properties"]["settings"]["properties"])

    assert known == CONTROL_OPTIONS - {
        "FORWARDED_ALLOW_IPS", "ANNEAL_SECRET_KEY_FALLBACKS", "OTEL_EXPORTER_OTLP_HEADERS",
    }  # fmt: skip


def test_every_setting_of_the_readme_is_a_value() -> None:
    text = (HELM_FOLDER.parents[1] / "README.md").read_text().split("## Configuration")[1].split("\n## ")[0]
    named = {name for line in text.splitlines() if line.startswith("| `") for name in
             re.findall(r"`([A-Z]+_[A-Z_]+)`", line.split("|")[1])}  # fmt: skip
    properties = VALUES_SCHEMA["properties"]
    lists = [properties[name]["items"]["properties"]["settings"]["properties"] for name in ("pools", "replicas")]
    values = set().union(properties["settings"]["properties"], *lists)

    assert len(named) > 50 and named - values == set().union(*NOT_SETTINGS.values())


def test_every_program_logs_in_as_its_own_role(program: Program, rendered: Rendering) -> None:
    given = variables(container_of(rendered, program.name)[1])

    keys = [given["DATABASE_URL"]["valueFrom"]["secretKeyRef"]["key"]] if "DATABASE_URL" in given else []
    assert keys == ([f"DATABASE_{program.role.upper()}_URL"] if program.role else [])


def test_every_program_gets_the_secrets_that_compose_gives_it(program: Program, rendered: Rendering) -> None:
    names = "SECRET_KEY|PEPPER|SIGNING|PASSWORD|ACCESS_KEY|EMAIL_URL|FROM_EMAIL|STRIPE|OTLP_HEADERS"
    secret = re.compile(rf"\$\{{\w*({names})\w*(:|\}})")
    compose = {name for name, value in SERVICES[program.name]["environment"].items() if secret.search(str(value))}

    assert from_secrets(container_of(rendered, program.name)[1]) == compose


def test_the_migration_runs_first_as_the_owner_of_the_tables(rendered: Rendering) -> None:
    [job] = [each for each in rendered if each["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]

    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert shlex.join(container["command"]) == SERVICES["migrate"]["command"]
    assert variables(container)["DATABASE_URL"]["valueFrom"]["secretKeyRef"]["key"] == "DATABASE_OWNER_URL"
    assert set(variables(container)) - {"DJANGO_SETTINGS_MODULE"} <= set(SERVICES["migrate"]["environment"])
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "default"  # ours is made later


def test_programs_without_work_have_no_pods(helm: Helm) -> None:
    options = [
        "--set=settings.ANNEAL_HUB_PUSHES=",
        "--set=secrets.stripe=",
        "--set-json=pools=[]",
        "--set-json=replicas=[]",
    ]
    done = helm("template", f"--values={HELM_FOLDER / 'example.yaml'}", *options)

    names = {owner["metadata"]["name"] for owner, _ in pods(objects_of(done))}
    control = {each.name for each in IN_CHART if each.role and not each.only_with}
    assert names == control | {"nginx", "migrate"}


def test_a_replica_is_known_by_the_address_that_it_reports(rendered: Rendering) -> None:
    _, gateway = container_of(rendered, "gateway")
    _, agent = container_of(rendered, "serving-agent")

    own = variables(agent)["ANNEAL_REPLICA_URL"]["value"].replace("$(POD_NAME)", "replica-llama-8b-1")
    assert own == "http://replica-llama-8b-1.replica-llama-8b.platform.svc:8003"
    known = variables(gateway)["ANNEAL_REPLICA_ADDRESSES"]["value"].split(",")
    assert own.removeprefix("http://").removesuffix(":8003") in known and len(known) == 3


# --- Pods -------------------------------------------------------------------------------------------------------------


def test_no_pod_is_root_or_may_write_its_image_or_has_a_token(rendered: Rendering) -> None:
    templates = [template["spec"] for _, template in pods(rendered)]

    assert len(templates) > 18
    for pod in templates:
        assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert set(container["resources"]["requests"]) >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_the_users_are_those_of_the_images(rendered: Rendering) -> None:
    users = {pod["spec"]["securityContext"]["runAsUser"] for _, pod in pods(rendered)}
    made = {int(text) for path in HELM_FOLDER.parent.glob("images/*.Dockerfile") for text in
            re.findall(r"useradd .*--uid (\d+)", path.read_text())}  # fmt: skip

    assert users - made == {13, 101}  # Debian's proxy and the nginx of its image


def test_every_mounted_folder_is_a_volume_and_only_disks_are_writable(rendered: Rendering) -> None:
    for owner, template in pods(rendered):
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        volumes |= {each["metadata"]["name"]: {"claim": 1} for each in owner["spec"].get("volumeClaimTemplates", [])}
        for container in template["spec"]["containers"]:
            for mount in container["volumeMounts"]:
                kind = volumes[mount["name"]].keys() - {"name"}
                assert mount.get("readOnly") or kind <= {"emptyDir", "claim"}, (owner["metadata"]["name"], mount)


@pytest.mark.parametrize("program", [each for each in IN_CHART if each.role], ids=lambda each: each.name)
def test_a_server_has_probes_of_an_address_that_it_answers(program: Program, rendered: Rendering) -> None:
    _, container = container_of(rendered, program.name)
    probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}

    if "uvicorn" not in program.command:
        assert probes == {}  # a worker that ends is started again
        return
    assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
    paths = {probe["httpGet"]["path"] for probe in probes.values() if "httpGet" in probe}
    assert paths == {"/healthz"}  # test_probes.py; of the gateway: test_refusals.py


def test_services_budgets_and_scaling_lead_to_pods(rendered: Rendering) -> None:
    owners = {(owner["kind"], owner["metadata"]["name"]) for owner, _ in pods(rendered)}
    labels = [template["metadata"]["labels"] for _, template in pods(rendered)]
    counts = dict.fromkeys(("Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject"), 0)
    for each in rendered:
        counts[each["kind"]] = counts.get(each["kind"], 0) + 1
        spec = each.get("spec", {})
        if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            assert (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) in owners
        if each["kind"] in ("Service", "PodDisruptionBudget"):
            wanted = spec["selector"].get("matchLabels", spec["selector"])
            assert sum(wanted.items() <= own.items() for own in labels) == 1, each["metadata"]["name"]
    assert counts["PodDisruptionBudget"] == counts["Service"] == 9
    assert (counts["HorizontalPodAutoscaler"], counts["ScaledObject"]) == (2, 1)
    scaled = {
        each["metadata"]["name"] for each in rendered if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    }
    fixed = {owner["metadata"]["name"] for owner, _ in pods(rendered) if "replicas" in owner["spec"]}
    assert scaled == {"web", "gateway", "trainer-h100"} and not scaled & fixed


def test_the_files_of_compose_are_used_as_they_are(rendered: Rendering) -> None:
    [files] = [each["data"] for each in rendered if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "nginx"]
    rights = list(yaml.safe_load_all((HELM_FOLDER.parent / "kubernetes/access.yaml").read_text()))

    own = {"upstreams.conf", "serve.sh"}  # a Service keeps its address, and no hook runs after a renewal
    shared = files.keys() - own
    assert shared == {path.name for path in HELM_FOLDER.parent.glob("nginx/*")} - own
    assert all((HELM_FOLDER.parent / "nginx" / name).read_text().strip() == files[name].strip() for name in shared)
    assert [each for each in rights if each not in rendered] == []
    services = {each["metadata"]["name"]: each["spec"] for each in rendered if each["kind"] == "Service"}
    named = {name: spec["ports"][0]["port"] for name, spec in services.items() if name in SERVICES}
    assert named == {"nginx": 80, "egress": 3128, "web": 8000, "internal": 8001, "gateway": 8002}
