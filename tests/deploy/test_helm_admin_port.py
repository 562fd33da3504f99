"""The chart's ``sidecar.adminPort``: operations on a port of their own, and all that has to find it there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from lora_fs.demo.process import LOCAL, free_port
from lora_fs.demo.sidecar import start_sidecar
from tests.cli.conftest import root as root
from tests.deploy import test_kubernetes as plain
from tests.deploy.test_helm import (
    CHART,
    MODES,
    VALUES,
    helm,
    merged,
    notes,
    render,
    values_of,
)
from tests.deploy.test_kubernetes import Object, environment

Objects = dict[tuple[str, str], Object]
PORT = 8002
ON: Object = {"sidecar": {"adminPort": PORT}}
WHOLE: Object = merged(ON, {"gateway": {"enabled": True}, "podMonitor": {"enabled": True}})
GATEWAY: Object = {"gateway": {"enabled": True, "adminPort": PORT}, "podMonitor": {"enabled": True}}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
ROOT = plain.FOLDER.parents[1]


def named(given: Object, release: str = "demo") -> Objects:
    """What would be applied, by kind and name."""
    return {(one["kind"], one["metadata"]["name"]): one for one in render(given, release)}


def sidecar(found: Objects) -> Object:
    """The sidecar's container."""
    (container,) = found["Deployment", "demo"]["spec"]["template"]["spec"]["initContainers"]
    return dict(container)


def ports(container: Object) -> dict[str, int]:
    """The container's ports by name."""
    return {one["name"]: one["containerPort"] for one in container["ports"]}


@contextmanager
def running(root: Path, work: Path) -> Iterator[tuple[Objects, dict[int, str]]]:
    """A sidecar by the environment that the chart gives it; yields what is rendered, and URLs by port.

    The admin port is the one of the values, a free one here. The other is another one here than in a pod.
    """
    number = free_port()
    found = named(merged(WHOLE, {"sidecar": {"adminPort": number}}))
    told = {name: entry.get("value") for name, entry in environment(sidecar(found)).items()}
    process = start_sidecar(
        "sidecar",
        "http://127.0.0.1:9",
        log=work / "sidecar.log",
        env={
            "LORA_FS_ROOT": str(root),
            "LORA_FS_MODEL": "tiny",
            "LORA_FS_STAGE_DIR": str(work / "stage"),
            "LORA_FS_ADMIN_PORT": str(told["LORA_FS_ADMIN_PORT"]),
        },
    )
    try:
        process.wait_ready("/health")
        yield found, {8001: process.url, number: f"http://127.0.0.1:{number}"}
    finally:
        process.stop()


def test_what_the_chart_asks_is_answered_on_the_port_that_it_asks(root: Path, tmp_path: Path) -> None:
    """Of a real sidecar: probes, the scrape, both Services' calls, and what the gateway's polls ask."""
    with running(root, tmp_path) as (found, urls), httpx.Client(**LOCAL) as http:
        container = sidecar(found)
        by_name = {name: urls[port] for name, port in ports(container).items()}
        for probe in PROBES:
            asked = container[probe]["httpGet"]
            answer = http.get(by_name[asked["port"]] + asked["path"])
            assert answer.status_code == (503 if asked["path"] == "/readyz" else 200), probe
        (scrape,) = found["PodMonitor", "demo"]["spec"]["podMetricsEndpoints"]
        assert "lora_fs_ready 0" in http.get(by_name[scrape["port"]] + scrape["path"]).text
        (scraped,) = plain.scraped(found["Deployment", "demo"])
        assert http.get(f"{urls[scraped]}/metrics").status_code == 200
        (admin,) = found["Service", "demo-admin"]["spec"]["ports"]
        (replicas,) = found["Service", "demo-replicas"]["spec"]["ports"]
        load = {"lora_name": "x", "lora_path": "/nowhere"}
        told = http.post(f"{urls[admin['targetPort']]}/v1/load_lora_adapter", json=load)
        assert (told.status_code, "/nowhere" in told.text) == (400, True), told.text
        polled = http.get(f"{urls[replicas['targetPort']]}/metadata")
        assert polled.json()["ready"] is False
        question = {"model": "x", "prompt": "x"}
        prompt = http.post(f"{urls[replicas['targetPort']]}/v1/completions", json=question)
        assert (prompt.status_code, "engine" in prompt.text) == (503, True), prompt.text
        kept = http.post(f"{urls[replicas['targetPort']]}/v1/load_lora_adapter", json=load)
        assert (kept.status_code, f"port {admin['port']}" in kept.text) == (404, True)


def test_services_lead_to_one_port_each() -> None:
    """By number, which a native sidecar's port needs; to the replicas, also where clients ask a gateway."""
    for given in (ON, WHOLE):
        found = named(given)
        deployment, service = found["Deployment", "demo"], found["Service", "demo-admin"]["spec"]
        pod = deployment["spec"]["template"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        (port,) = service["ports"]
        assert port["port"] == port["targetPort"] == PORT
        assert plain.check_reached(pod["spec"], port["targetPort"]) == PORT
    (clients,) = named(ON)["Service", "demo"]["spec"]["ports"]
    assert clients["targetPort"] == 8001
    assert ("Service", "demo-admin") not in named({})
    assert list(ports(sidecar(named({})))) == ["http"]


def test_the_policy_tells_operators_from_clients() -> None:
    """A peer of one list reaches one port; by default each port is open to the release's namespace alone."""
    tenants: Object = {"namespaceSelector": {"matchLabels": {"tenant": "yes"}}}
    operators: Object = {"namespaceSelector": {"matchLabels": {"operator": "yes"}}}
    own: Object = {"podSelector": {}}
    for lists, expected in (
        ({}, {8001: [own], PORT: [own]}),
        ({"from": [tenants]}, {8001: [tenants], PORT: [own]}),
        ({"adminFrom": [operators]}, {8001: [own], PORT: [operators]}),
        ({"from": [tenants], "adminFrom": [operators]}, {8001: [tenants], PORT: [operators]}),
    ):
        policy = named(merged(ON, {"networkPolicy": lists}))["NetworkPolicy", "demo"]["spec"]
        assert {rule["ports"][0]["port"]: rule["from"] for rule in policy["ingress"]} == expected
        assert [len(rule["ports"]) for rule in policy["ingress"]] == [1, 1]
    (only,) = named({"networkPolicy": {"adminFrom": [operators]}})["NetworkPolicy", "demo"]["spec"]["ingress"]
    assert [port["port"] for port in only["ports"]] == [8001]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"sidecar": {"env": [{"name": "LORA_FS_ADMIN_PORT", "value": "8002"}]}},
            "sidecar.env sets LORA_FS_ADMIN_PORT, which probes, Services and the NetworkPolicy do not "
            "follow: set sidecar.adminPort",
        ),
        (merged(ON, {"mode": "plugin"}), "sidecar.adminPort does not go with mode plugin"),
        ({"sidecar": {"adminPort": 8001}}, "sidecar.adminPort (8001) is taken in the pod"),
        ({"sidecar": {"adminPort": 8000}}, "sidecar.adminPort (8000) is taken in the pod"),
        (
            {"gateway": {"env": [{"name": "LORA_FS_ADMIN_PORT", "value": "8002"}]}},
            "gateway.env sets LORA_FS_ADMIN_PORT, which probes, Services and the NetworkPolicy do not "
            "follow: set gateway.adminPort",
        ),
        ({"gateway": {"adminPort": PORT}}, "gateway.adminPort is set, and gateway.enabled is false"),
        (merged(ON, GATEWAY), "gateway.adminPort and sidecar.adminPort exclude each other"),
        (merged(GATEWAY, {"gateway": {"adminPort": 8001}}), "gateway.adminPort (8001) is the gateway's"),
        ({"sidecar": {"adminPort": 80}}, "sidecar.adminPort: Must be greater than or equal to 1024"),
    ],
)
def test_what_does_not_work_is_refused(given: Object, told: str) -> None:
    """A pod that never gets ready ends `helm install` in its place, and the message names the value."""
    done = helm("template", "demo", CHART, given=given)
    assert done.returncode == 1
    assert told in done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_of_a_gateway(mode: str) -> None:
    """What asks it for operations asks at that port. Clients reach the other one, and no replica: those still
    answer everything on one port."""
    tenants, operators = ({"podSelector": {"matchLabels": {"is": who}}} for who in ("tenant", "operator"))
    lists: Object = {"networkPolicy": {"from": [tenants], "adminFrom": [operators]}}
    found = named(merged(merged(GATEWAY, {"mode": mode}), lists))
    template = found["Deployment", "demo-gateway"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    told = {one["name"]: one.get("value") for one in container["env"]}
    assert told["LORA_FS_ADMIN_PORT"] == str(PORT)
    assert ports(container) == {"http": 8001, "admin": PORT}
    (scrape,) = found["PodMonitor", "demo-gateway"]["spec"]["podMetricsEndpoints"]
    probed = [container[f"{name}Probe"]["httpGet"]["port"] for name in ("readiness", "liveness")]
    assert [scrape["port"], *probed] == ["admin"] * 3
    service = found["Service", "demo-admin"]["spec"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [(PORT, PORT)]
    its, replicas = (found["NetworkPolicy", name]["spec"]["ingress"] for name in ("demo-gateway", "demo"))
    assert {rule["ports"][0]["port"]: rule["from"] for rule in its} == {8001: [tenants], PORT: [operators]}
    (rule,) = replicas
    assert rule["from"] == [operators, {"podSelector": {"matchLabels": service["selector"]}}]


def test_the_notes_name_its_service(tmp_path: Path) -> None:
    """Who registers over HTTP asks there, not at the address of the clients."""
    assert "http://blue-admin.ml:8002" in notes(ON, tmp_path / "on")
    assert "http://blue-admin.ml:8002" in notes(GATEWAY, tmp_path / "gateway")
    assert "-admin" not in notes({}, tmp_path / "off")


def test_the_page_and_the_pipeline_name_what_the_chart_makes() -> None:
    """The values of the page on security give the Service that the release pipeline asks."""
    (given,) = (one for one in values_of("security.md") if "adminPort" in one.get("sidecar", {}))
    made = named(merged(given, {"gateway": {"enabled": True}}), "vllm")
    job = yaml.safe_load((ROOT / "examples/release/release.yml").read_text())["jobs"]["release"]
    assert job["env"]["LORA_FS_MODEL"] == VALUES["model"], "a sidecar refuses commands for another model"
    for name, kind in (("LORA_FS_SERVER", "replicas"), ("URL", "gateway")):
        url = urlsplit(job["env"][name])
        service = made["Service", str(url.hostname)]["spec"]
        assert (url.port or 80) in [port["port"] for port in service["ports"]], name
        is_gateways = service["selector"]["app.kubernetes.io/name"].endswith("-gateway")
        assert is_gateways is (kind == "gateway"), name
