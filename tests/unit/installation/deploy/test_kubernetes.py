"""deploy/kubernetes/access.yaml: rights in one namespace, and nodes that reach no metadata service.

tests/integration/capacity/test_kubernetes.py compares the rights with what the adapter calls.
"""

from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import yaml

FILE = Path(__file__).resolve().parents[4] / "deploy/kubernetes/access.yaml"
OBJECTS = {each["kind"]: each for each in yaml.safe_load_all(FILE.read_text())}


def test_the_rights_end_at_the_namespace_and_name_each_verb() -> None:
    assert set(OBJECTS) == {"Namespace", "ServiceAccount", "Secret", "Role", "RoleBinding", "NetworkPolicy"}
    space = OBJECTS["Namespace"]["metadata"]
    assert space["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    spaces = {each["metadata"]["namespace"] for kind, each in OBJECTS.items() if kind != "Namespace"}
    assert spaces == {space["name"]}
    assert all("*" not in values for rule in OBJECTS["Role"]["rules"] for values in rule.values())
    account = OBJECTS["ServiceAccount"]["metadata"]["name"]
    [subject] = OBJECTS["RoleBinding"]["subjects"]
    assert (subject["kind"], subject["name"], subject["namespace"]) == ("ServiceAccount", account, space["name"])
    assert OBJECTS["RoleBinding"]["roleRef"]["kind"] == "Role"
    assert OBJECTS["RoleBinding"]["roleRef"]["name"] == OBJECTS["Role"]["metadata"]["name"]
    assert OBJECTS["Secret"]["metadata"]["annotations"] == {"kubernetes.io/service-account.name": account}


@pytest.mark.parametrize("address", ["169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192"])
def test_no_pod_reaches_a_metadata_service(address: str) -> None:
    policy = OBJECTS["NetworkPolicy"]["spec"]
    assert (policy["podSelector"], policy["policyTypes"]) == ({}, ["Ingress", "Egress"])
    allowed = [to["ipBlock"] for rule in policy["egress"] for to in rule["to"]]

    assert not any(
        ip_address(address) in ip_network(block["cidr"])
        and not any(ip_address(address) in ip_network(left_out) for left_out in block["except"])
        for block in allowed
    )
