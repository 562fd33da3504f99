"""Every value of the chart changes what is rendered: a template that ignores one fails here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.deploy.test_helm import CHART, EVERYTHING, MODES, MORE, SCHEMA, VALUES, helm, merged, render
from tests.deploy.test_kubernetes import POD, SIDECAR, VERSIONS, Object, environment

Keys = tuple[str, ...]
# All that can be on at once, with something in each list.
ON: Object = merged(merged(EVERYTHING, MORE), {"image": {"digest": ""}, "engine": {"image": {"digest": ""}}})
# What goes with others only, and has a test of its own.
ELSEWHERE = {
    "apply.existingConfigMap": "test_documents_are_applied_by_a_hook",
    "gateway.adminPort": "test_of_a_gateway",
    "auth.existingSecret": "test_the_token_is_where_lora_fs_looks",
    "mode": "test_clients_reach_the_port_that_loads",
    "replicas": "test_what_scales_replicas_is_alone",
    "storage.readOnly": "test_the_volume_is_read_only_but_for_two_folders",
    "trust.files": "test_the_trust_file_is_where_lora_fs_looks",
}
# Where another value of the type is not one that the schema takes.
OTHERS: Object = {
    "namespaces": ["team-b", "team-a"],
    "autoscaling.metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Value"}}}],
    "apply.documents": {"b.yaml": "kind: LoraAdapter\n"},
    "httpRoute.parentRefs": [{"name": "another"}],
    "httpRoute.hostnames": ["another.example"],
    "engine.maxLoraRank": 128,
    "engine.shmSize": "9Gi",
    "gc.olderThan": "7d",
    "gc.schedule": "1 2 3 4 5",
    "image.digest": f"sha256:{'b' * 64}",
    "engine.image.digest": f"sha256:{'b' * 64}",
    "image.pullPolicy": "Always",
    "engine.image.pullPolicy": "Always",
    "podDisruptionBudget.maxUnavailable": "50%",
    "service.type": "NodePort",
    "sidecar.defaultPolicy": "eager",
    "sidecar.maxLoaded": 7,
    "stage.maxBytes": "7",
    "stage.medium": "",
    "stage.sizeLimit": "30Gi",
    "storage.accessModes": ["ReadWriteMany", "ReadWriteOnce"],
    "storage.init": "never",
    "storage.size": "7Gi",
    "apply.wait": "7s",
    "podMonitor.interval": "7s",
    "strategy.maxSurge": 2,
}


def leaves(values: Object, schema: Object, above: Keys = ()) -> Iterator[Keys]:
    """The path of each value that is no group of others."""
    for name, value in values.items():
        inner = schema.get("properties", {}).get(name, {})
        if inner.get("$ref") == "#/definitions/image":
            inner = SCHEMA["definitions"]["image"]
        if isinstance(value, dict) and "properties" in inner:
            yield from leaves(value, inner, (*above, name))
        else:
            yield (*above, name)


def another(value: Any) -> Any:
    """Of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return "another"
    return [] if isinstance(value, list) else {"another": "value"}


def changed(path: Keys) -> Object:
    """The values with another one there."""
    value: Any = merged(VALUES, ON)
    for key in path:
        value = value.get(key)
    given: Any = OTHERS.get(".".join(path), another(value))
    for key in reversed(path):
        given = {key: given}
    return merged(ON, given)


def rendered(values: Object) -> str:
    """All objects, as helm prints them."""
    done = helm("template", "demo", CHART, "--kube-version", VERSIONS[-1], given=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_value_changes_an_object() -> None:
    """By itself, where all features are on; what a value is for, the tests beside this one say."""
    paths = {".".join(path): path for path in leaves(VALUES, SCHEMA)}
    assert len(paths) > 95
    assert ELSEWHERE.keys() | OTHERS.keys() <= paths.keys()
    asked = [name for name in paths if name not in ELSEWHERE]
    before = rendered(ON)
    with ThreadPoolExecutor(2) as threads:
        after = threads.map(lambda name: rendered(changed(paths[name])), asked)
        ignored = [name for name, text in zip(asked, after, strict=True) if text == before]
    assert ignored == []


def templates(given: Object) -> dict[str, Object]:
    """The pods of everything that makes pods, by its name."""
    return {
        one["metadata"]["name"]: one["spec"].get("jobTemplate", one)["spec"]["template"]
        for one in render(given)
        if one["kind"] in {"Deployment", "Job", "CronJob"}
    }


def containers(template: Object) -> list[Object]:
    """All of a pod's."""
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


@pytest.mark.parametrize("mode", MODES)
def test_no_variable_is_there_twice(mode: str) -> None:
    """A value's variable takes the place of the chart's own: Helm 4 and Flux refuse an object with both."""
    own = {
        "engine": "HOME",
        "sidecar": "LORA_FS_STAGE_MAX_BYTES",
        "gateway": "LORA_FS_SHUTDOWN_TIMEOUT_S",
        "apply": "LORA_FS_TRUST",
    }
    given: Object = {part: {"env": [{"name": name, "value": "own"}]} for part, name in own.items()}
    given["sidecar"]["adminPort"] = None
    pods = templates(merged(ON, {**given, "mode": mode}))
    found = [one for pod in pods.values() for one in containers(pod)]
    for container in found:
        names = [one["name"] for one in container.get("env", ())]
        assert len(names) == len(set(names)), container["name"]
    values = [(name, entry.get("value")) for one in found for name, entry in environment(one).items()]
    assert {name for name, value in values if value == "own"} == set(own.values())


def test_the_jobs_have_what_the_cluster_asks_of_pods() -> None:
    """Each of the three; a volume that a container in the pod mounts never arrives without its annotation."""
    pods = templates(ON)
    for one in [pods.pop(f"demo-{what}")["metadata"] for what in ("init", "gc", "apply")]:
        assert one["annotations"] == ON["jobs"]["podAnnotations"]
        assert ON["jobs"]["podLabels"].items() <= one["labels"].items()
    assert all(ON["podLabels"].items() <= one["metadata"]["labels"].items() for one in pods.values())


def test_every_pod_is_locked_and_pulls_as_the_values_say() -> None:
    """Replicas, gateways and the three Jobs; none gets a token of the cluster, and only vLLM may be root."""
    pull = {"pullPolicy": "Always"}
    pods = templates(merged(ON, {"image": pull, "engine": {"image": pull}}))
    assert len(pods) == 5
    for pod in pods.values():
        spec = pod["spec"]
        assert {one["imagePullPolicy"] for one in containers(pod)} == {"Always"}
        assert spec["imagePullSecrets"] == ON["imagePullSecrets"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"] == POD["securityContext"]
        own = [one for one in containers(pod) if one["name"] != "vllm"]
        assert [one["securityContext"] for one in own] == [SIDECAR["securityContext"]] * len(own)
