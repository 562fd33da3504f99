"""Every value of the chart changes what is rendered: a template that ignores one fails here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.deploy.test_helm import CHART, EVERYTHING, SCHEMA, VALUES, helm, merged, render
from tests.deploy.test_kubernetes import VERSIONS, Object

Keys = tuple[str, ...]
MOUNT: Object = {"name": "own", "mountPath": "/own"}
VOLUME: Object = {"name": "own", "emptyDir": {}}
# All that can be on at once, with something in each list.
ON: Object = merged(
    EVERYTHING,
    {
        "sidecar": {"adminPort": 8002},
        "gateway": {"enabled": True, "env": [{"name": "A", "value": "b"}]}
        | {"extraVolumeMounts": [MOUNT], "extraVolumes": [VOLUME]},
        "networkPolicy": {"adminFrom": [{"namespaceSelector": {}}]},
        "image": {"digest": ""},
        "engine": {"image": {"digest": ""}},
    },
)
# What goes with others only, and has a test of its own.
ELSEWHERE = {
    "apply.existingConfigMap": "test_documents_are_applied_by_a_hook",
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


def test_every_pod_pulls_as_the_values_say() -> None:
    """Replicas, gateways and the three Jobs; none gets a token of the cluster."""
    pull = {"pullPolicy": "Always"}
    specs = [
        one["spec"].get("jobTemplate", one)["spec"]["template"]["spec"]
        for one in render(merged(ON, {"image": pull, "engine": {"image": pull}}))
        if one["kind"] in {"Deployment", "Job", "CronJob"}
    ]
    assert len(specs) == 5
    for spec in specs:
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        assert {one["imagePullPolicy"] for one in containers} == {"Always"}
        assert spec["imagePullSecrets"] == ON["imagePullSecrets"]
        assert spec["automountServiceAccountToken"] is False
