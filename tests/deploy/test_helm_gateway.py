"""The gateway in the chart: the release's Service leads to it, and it reaches the replicas alone."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.settings import Settings
from tests.cli.conftest import parse
from tests.deploy import test_kubernetes as plain
from tests.deploy.test_helm import MODES, merged, render
from tests.deploy.test_kubernetes import Object

ON: Object = {"gateway": {"enabled": True}}
PORTS = {"sidecar": 8001, "plugin": 8000}


def named(given: Object) -> dict[tuple[str, str], Object]:
    """What would be applied, by kind and name."""
    return {(one["kind"], one["metadata"]["name"]): one for one in render(given)}


def pod(given: Object) -> Object:
    """The gateway's."""
    found: Object = named(given)["Deployment", "demo-gateway"]["spec"]["template"]["spec"]
    return found


def labels(deployment: Object) -> Object:
    found: Object = deployment["spec"]["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_release_address_is_the_gateway_and_each_replica_has_its_own(mode: str) -> None:
    """The Service selects the gateway's pods alone; the headless one, which it asks, the replicas'."""
    found = named({**ON, "mode": mode})
    gateway, replicas = found["Deployment", "demo-gateway"], found["Deployment", "demo"]
    outer, inner = found["Service", "demo"]["spec"], found["Service", "demo-replicas"]["spec"]
    assert outer["selector"].items() <= labels(gateway).items()
    assert not outer["selector"].items() <= labels(replicas).items()
    assert inner["selector"].items() <= labels(replicas).items()
    assert not inner["selector"].items() <= labels(gateway).items()
    assert inner["clusterIP"] == "None"
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert parse(container["args"]).info_name == "gateway"
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["LORA_FS_REPLICAS"] == f"dns://demo-replicas:{PORTS[mode]}"
    assert [port["port"] for port in inner["ports"]] == [PORTS[mode]]
    (port,) = container["ports"]
    assert environment["LORA_FS_PORT"] == str(port["containerPort"])
    assert port["containerPort"] == Settings.model_fields["port"].default, "as the docs have a gateway's port"
    assert [one["targetPort"] for one in outer["ports"]] == [port["name"]]
    assert container["securityContext"] == plain.SIDECAR["securityContext"]


@pytest.mark.parametrize("mode", MODES)
def test_the_policies_let_the_gateway_through_and_nothing_more(mode: str) -> None:
    """With networkPolicy.from set, the gateway may still reach the replicas, at their port, and DNS."""
    peer: Object = {"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}
    found = named({**ON, "mode": mode, "networkPolicy": {"from": [peer]}})
    replicas, gateway = (found["NetworkPolicy", name]["spec"] for name in ("demo", "demo-gateway"))
    (rule,) = replicas["ingress"]
    own = {"podSelector": {"matchLabels": found["Service", "demo"]["spec"]["selector"]}}
    assert rule["from"] == [peer, own]
    (rule,) = gateway["ingress"]
    assert rule["from"] == [peer]
    names, onward = gateway["egress"]
    assert {(one["port"], one["protocol"]) for one in names["ports"]} == plain.DNS
    assert {(one["port"], one["protocol"]) for one in replicas["egress"][0]["ports"]} == {
        *plain.DNS,
        (443, "TCP"),
    }
    assert onward["to"] == [
        {"podSelector": {"matchLabels": found["Service", "demo-replicas"]["spec"]["selector"]}}
    ]
    assert [one["port"] for one in onward["ports"]] == [PORTS[mode]]


def test_its_probes_let_it_wait_for_a_replica() -> None:
    """A gateway without one lives and gets no request; with `readyAtZero` it gets them."""
    with TestClient(create_gateway(Given(()))) as alone:
        for at_zero, answers in ((False, (503, 200)), (True, (200, 200))):
            given = merged(ON, {"gateway": {"readyAtZero": at_zero}})
            (container,) = pod(given)["containers"]
            asked = [container[f"{name}Probe"]["httpGet"] for name in ("readiness", "liveness")]
            assert tuple(alone.get(one["path"]).status_code for one in asked) == answers
            assert [one["port"] for one in asked] == [port["name"] for port in container["ports"]] * 2


@pytest.mark.parametrize("grace_s", [30, 120, 3600])
def test_a_stop_leaves_streams_their_time(grace_s: int) -> None:
    """All that its pod has, but for the time in which it leaves the Service and 10 s to end."""
    spec = pod(merged(ON, {"terminationGracePeriodSeconds": grace_s}))
    (container,) = spec["containers"]
    program, leaves_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    told = {one["name"]: one.get("value") for one in container["env"]}
    assert spec["terminationGracePeriodSeconds"] == grace_s
    assert int(leaves_s) + int(told["LORA_FS_SHUTDOWN_TIMEOUT_S"]) + 10 == grace_s


def test_it_knows_the_names_by_which_clients_reach_it() -> None:
    """A call without a token through the Ingress gets the replica's 401, not a 403 for its Host."""
    outside: Object = {
        "ingress": {"enabled": True, "host": "llm.example"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm2.example"]},
    }
    for given, hosts in ((outside, "llm.example,llm2.example"), ({}, None)):
        told = {one["name"]: one.get("value") for one in pod(merged(ON, given))["containers"][0]["env"]}
        assert told.get("LORA_FS_ALLOWED_HOSTS") == hosts


def test_without_it_nothing_of_it_is_there() -> None:
    """By default the chart makes no gateway."""
    assert not [name for _, name in named({}) if "gateway" in name or name.endswith("-replicas")]
