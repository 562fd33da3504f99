"""The Helm chart, rendered and linted by helm itself; what comes out goes through the API's own schemas."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import kubernetes_validate
import pytest
import yaml

from lora_fs.sidecar import __version__
from lora_fs.sidecar.server.middleware import tokens
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.trust import Trust
from tests.cli.conftest import LoraFs, parse
from tests.cli.conftest import lora_fs as lora_fs
from tests.cli.conftest import root as root
from tests.deploy import test_kubernetes as plain
from tests.deploy.test_kubernetes import Object, environment, mounts
from tests.registry.conftest import write_adapter
from tests.trust.conftest import new_key

CHART = plain.FOLDER.parent / "helm/lora-fs"
META: Object = yaml.safe_load((CHART / "Chart.yaml").read_text())
VALUES: Object = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())
EVERYTHING: Object = {
    "namespaces": ["team-a", "team-b"],
    "imagePullSecrets": [{"name": "mine"}],
    "engine": {
        "args": ["--tensor-parallel-size=2", '--chat-template={{"}}"'],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        "cacheClaim": "models",
        "image": {"digest": f"sha256:{'e' * 64}"},
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/ssl/mine"}],
    },
    "sidecar": {
        "maxLoaded": None,
        "env": [{"name": "LORA_FS_LOG_LEVEL", "value": "debug"}],
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/ssl/mine"}],
    },
    "image": {"digest": f"sha256:{'a' * 64}"},
    "autoscaling": {
        "enabled": True,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": "lora_fs_in_flight"},
                    "target": {"type": "AverageValue", "averageValue": "8"},
                },
            }
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 900}},
    },
    "strategy": {"maxUnavailable": 1, "maxSurge": 0},
    "ingress": {"enabled": True, "className": "nginx", "host": "llm.example", "tlsSecret": "tls"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm2.example"]},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "gc": {"enabled": True, "olderThan": "48h"},
    "apply": {
        "documents": {"adapters.yaml": "kind: LoraAdapter\n"},
        "owner": "ml",
        "prune": True,
        "wait": "120s",
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/ssl/mine"}],
        "extraVolumes": [{"name": "certificates", "configMap": {"name": "mine"}}],
    },
    "jobs": {"podLabels": {"team": "ml"}, "podAnnotations": {"gke-gcsfuse/volumes": "true"}},
    "extraVolumes": [{"name": "certificates", "configMap": {"name": "mine"}}],
    "storage": {"storageClassName": "nfs"},
    "stage": {"medium": "Memory"},
    "auth": {"token": "one\ntwo name=b"},
    "trust": {"existingConfigMap": "signers"},
    "nim": {"claim": "nim-store", "path": "loras"},
    "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"role": "arn:aws:iam::1:role/x"}},
    "podDisruptionBudget": {"maxUnavailable": "25%"},
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}],
        "egress": [{"ports": [{"port": 9000, "protocol": "TCP"}]}],
    },
    "podLabels": {"team": "ml"},
    "podAnnotations": {"prometheus.io/scrape": "true"},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
}
NOTHING: Object = {
    "storage": {"existingClaim": "there"},
    "auth": {"enabled": False},
    "serviceAccount": {"create": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
ALONE: Object = {
    "replicas": 1,
    "strategy": {"maxUnavailable": 1, "maxSurge": 0},
    "storage": {"accessModes": ["ReadWriteOnce"]},
}
NOT_KUBERNETES = {"HTTPRoute", "PodMonitor"}  # of the gateway API and the Prometheus operator: no schema here
ON_DEMAND = {"HorizontalPodAutoscaler", "Ingress", "CronJob", "ConfigMap", *NOT_KUBERNETES}
CASES = {"defaults": {}, "everything": EVERYTHING, "nothing": NOTHING}
MODES = ("sidecar", "plugin")
# What one more Deployment and one more port bring, beside everything.
MORE: Object = {
    "sidecar": {"adminPort": 8002},
    "gateway": {
        "enabled": True,
        "env": [{"name": "A", "value": "b"}],
        "extraVolumeMounts": [{"name": "own", "mountPath": "/own"}],
        "extraVolumes": [{"name": "own", "emptyDir": {}}],
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "pool", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "networkPolicy": {"adminFrom": [{"namespaceSelector": {}}]},
}
KINDS = {
    "Deployment",
    "Service",
    "PersistentVolumeClaim",
    "Secret",
    "ServiceAccount",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "Job",
}


def merged(defaults: Object, given: Object) -> Object:
    """As helm merges: maps key by key, anything else replaced; null removes a default."""
    found = deepcopy(defaults)
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = merged(found[name], value)
        elif value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def helm(*arguments: str | Path, given: Object | None = None) -> subprocess.CompletedProcess[str]:
    """Run it with these values on its standard input; the venv's own before the machine's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("helm", path=path)
    assert program is not None, "no helm: `make env` brings it for Linux on x86_64, elsewhere install helm 3"
    command = [program, *map(str, arguments), "--values", "-"]
    return subprocess.run(command, input=json.dumps(given or {}), capture_output=True, text=True, check=False)


def render(given: Object, release: str = "demo", *, version: str = plain.VERSIONS[-1]) -> list[Object]:
    """All that would be applied, as ``helm template`` says it."""
    return _rendered(json.dumps(given), release, version)


@cache
def _rendered(given: str, release: str, version: str) -> list[Object]:
    done = helm(
        "template", release, CHART, "--namespace", "ml", "--kube-version", version, given=json.loads(given)
    )
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def objects(given: Object, release: str = "demo") -> dict[str, Object]:
    """What would be applied, by kind; without the hook, which is a second Job."""
    found = [one for one in render(given, release) if not hooks(one)]
    kinds = {one["kind"]: one for one in deepcopy(found)}
    assert len(kinds) == len(found)
    return kinds


def hooks(one: Object) -> str:
    """When helm runs an object of a release by itself; empty: never."""
    return str((one["metadata"].get("annotations") or {}).get("helm.sh/hook", ""))


def notes(given: Object, work: Path, *more: str) -> str:
    """What `helm install blue` says at its end, or with more arguments `helm upgrade`."""
    chart = shutil.copytree(CHART, work / "lora-fs")
    (chart / "templates/NOTES.txt").rename(chart / "NOTES.txt")  # `helm template` does not say the notes
    (chart / "templates/notes.yaml").write_text('notes: {{ tpl (.Files.Get "NOTES.txt") . | toJson }}\n')
    done = helm(
        "template", "blue", chart, "--namespace", "ml", "-s", "templates/notes.yaml", *more, given=given
    )
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["notes"])


def pod(kinds: dict[str, Object]) -> Object:
    spec: Object = kinds["Deployment"]["spec"]["template"]["spec"]
    return spec


@contextmanager
def cluster(secrets: dict[str, dict[str, str]], jobs: dict[str, Object] | None = None) -> Iterator[str]:
    """Answer as much of the API of a cluster with these objects as helm's ``lookup`` asks; yield its URL.

    Args:
        secrets: the data of each. jobs: the status of each.
    """
    verbs = ["get", "list"]
    pages: dict[str, Object] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/apis/batch/v1": {
            "kind": "APIResourceList",
            "groupVersion": "batch/v1",
            "resources": [{"name": "jobs", "namespaced": True, "kind": "Job", "verbs": verbs}],
        },
        "/api/v1": {
            "kind": "APIResourceList",
            "groupVersion": "v1",
            "resources": [{"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": verbs}],
        },
    }
    for name, data in secrets.items():
        pages[f"/api/v1/namespaces/ml/secrets/{name}"] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": "ml"},
            "data": data,
        }
    for name, status in (jobs or {}).items():
        pages[f"/apis/batch/v1/namespaces/ml/jobs/{name}"] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "namespace": "ml"},
            "status": status,
        }

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            body = json.dumps(page or {"kind": "Status", "reason": "NotFound", "code": 404}).encode()
            self.send_response(200 if page else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def all_of(case: str, mode: str) -> Object:
    """The values of a case; `more` is everything, a gateway, and the admin port of a sidecar."""
    given = merged(EVERYTHING, MORE) if case == "more" else CASES[case]
    return merged(given, {"mode": mode} | ({"sidecar": {"adminPort": None}} if mode == "plugin" else {}))


@pytest.mark.parametrize("version", plain.VERSIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [*CASES, "more"])
def test_what_is_rendered_fits_the_api(case: str, mode: str, version: str) -> None:
    """Whatever the values, every field is one that this Kubernetes knows."""
    found = render(all_of(case, mode), version=version)
    made = {"defaults": KINDS, "nothing": {"Deployment", "Service"}}
    assert {one["kind"] for one in found} == made.get(case, KINDS | ON_DEMAND)
    for one in found:
        if one["kind"] not in NOT_KUBERNETES:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize(
    ("init", "claim", "made"),
    [("new", "", True), ("new", "there", False), ("always", "there", True), ("never", "", False)],
)
def test_who_makes_the_registry(init: str, claim: str, made: bool) -> None:
    """`helm install` does on the chart's own volume, or with `always`; an upgrade never does."""
    given: Object = {"storage": {"init": init, "existingClaim": claim}}
    kinds = objects(given)
    assert ("Job" in kinds) is made
    done = helm("template", "demo", CHART, "--is-upgrade", "--kube-version", plain.VERSIONS[-1], given=given)
    assert "kind: Job" not in done.stdout
    if made:
        (container,) = kinds["Job"]["spec"]["template"]["spec"]["containers"]
        assert parse(container["args"]).info_name == "init"
        (volume,) = kinds["Job"]["spec"]["template"]["spec"]["volumes"]
        assert volume in pod(kinds)["volumes"]
        labels = kinds["Job"]["spec"]["template"]["metadata"]["labels"]
        assert not kinds["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_what_renders_without_a_cluster_renders_alike() -> None:
    """By the page's values for Argo CD an image is all that a new one changes; by the defaults it is not.

    Kubernetes changes no pod of a Job, and a token that is new each time locks clients out.
    """

    def differ(given: Object) -> set[str]:
        first, second = (
            {one["kind"]: json.dumps(one).replace(f"lora-fs:{tag}", "IMAGE") for one in render(values)}
            for tag in ("1", "2")
            for values in [merged(given, {"image": {"tag": tag}})]
        )
        assert first.keys() == second.keys()
        return {kind for kind in first if first[kind] != second[kind]}

    (given,) = (one for one in values_of("kubernetes.md") if one.get("storage", {}).get("init") == "never")
    assert differ({}) == {"Secret"}
    assert differ(given) == set()
    assert [one["kind"] for one in render({}) if one["kind"] == "Job"] == ["Job"]
    assert [one["kind"] for one in render(given) if one["kind"] == "Job"] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [*CASES, "more"])
def test_helm_has_nothing_to_say(case: str, mode: str) -> None:
    """Its linter finds no error and no warning."""
    done = helm("lint", "--strict", CHART, given=all_of(case, mode))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


def test_a_cluster_without_sidecars_is_refused() -> None:
    """Before 1.29 an init container that goes on running kept the engine from starting."""
    done = helm("template", "demo", CHART, "--kube-version", "1.28")
    assert done.returncode == 1
    assert "chart requires kubeVersion" in done.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"mode": "both"}, 'mode must be one of the following: "sidecar", "plugin"'),
        ({"replica": 3}, "Additional property replica is not allowed"),
        ({"namespaces": []}, "namespaces: Array must have at least 1 items"),
        ({"namespaces": ["../x"]}, "namespaces.0: Does not match pattern"),
        ({"engine": {"maxLoraRank": 17}}, "engine.maxLoraRank must be one of"),
        ({"engine": {"args": ["tensor-parallel-size"]}}, "engine.args.0: Does not match pattern"),
        ({"stage": {"maxBytes": 1}}, "stage.maxBytes: Invalid type. Expected: string"),
        ({"storage": {"accessModes": ["ReadOnlyMany"]}}, "storage.accessModes"),
        ({"image": {"digest": "latest"}}, "image.digest: Does not match pattern"),
        (
            {"terminationGracePeriodSeconds": 29},
            "terminationGracePeriodSeconds: Must be greater than or equal to 30",
        ),
        ({"autoscaling": {"enabled": True}}, "autoscaling.metrics: Array must have at least 1 items"),
        ({"strategy": {"maxSurge": "0%"}}, "strategy.maxUnavailable and strategy.maxSurge are both 0"),
        ({"ingress": {"enabled": True}}, "ingress.host: String length must be greater than or equal to 1"),
        ({"httpRoute": {"enabled": True, "hostnames": ["a"]}}, "httpRoute.parentRefs: Array must have"),
        ({"engine": {"maxLoras": 64}}, "engine.maxLoras (64) is over engine.maxCpuLoras (32)"),
        ({"sidecar": {"maxLoaded": 33}}, "sidecar.maxLoaded (33) is over engine.maxCpuLoras (32)"),
        ({"storage": {"accessModes": ["ReadWriteOnce"]}}, "2 replicas cannot mount one ReadWriteOnce"),
        (
            {"replicas": None, "storage": {"accessModes": ["ReadWriteOnce"]}},
            "2 replicas cannot mount one ReadWriteOnce",
        ),
        (
            {"replicas": 1, "storage": {"accessModes": ["ReadWriteOnce"]}},
            "an upgrade's second pod cannot mount one ReadWriteOnce volume",
        ),
        (
            {"autoscaling": {**EVERYTHING["autoscaling"], "minReplicas": 5}},
            "autoscaling.minReplicas (5) is over autoscaling.maxReplicas (4)",
        ),
        (
            {"engine": {"args": ["--shutdown-timeout=300"]}},
            "does not fit terminationGracePeriodSeconds (120): requests would be cut; set that to 330",
        ),
        (
            {"storage": {"readOnly": True}, "nim": {"claim": "store"}},
            "storage.readOnly does not go with nim.claim",
        ),
        ({"gc": {"schedule": "17 3"}}, "gc.schedule: Does not match pattern"),
        ({"gateway": {"env": [{"value": "x"}]}}, "gateway.env.0: name is required"),
        ({"gateway": {"env": [{"name": "LORA_FS_PORT", "value": "9"}]}}, "gateway.env sets LORA_FS_PORT"),
        ({"apply": {"documents": {"a.txt": "x"}}}, "apply.documents: Does not match pattern"),
        (
            {"apply": {"documents": {"a.yaml": "x"}, "existingConfigMap": "mine"}},
            "apply.documents and apply.existingConfigMap exclude each other",
        ),
        (
            {"trust": {"files": {"trust.yaml": "x"}, "existingConfigMap": "mine"}},
            "trust.files and trust.existingConfigMap exclude each other",
        ),
        ({"trust": {"files": {"trust.yml": "x"}}}, "trust.files has no trust.yaml"),
        ({"trust": {"files": {"a/trust.yaml": "x"}}}, "trust.files: Does not match pattern"),
        ({"stage": {"maxBytes": "21474836480"}}, "stage.maxBytes (21474836480) is not below stage.sizeLimit"),
    ],
)
def test_the_schema_refuses(given: Object, told: str) -> None:
    """A typo or a value that cannot work ends `helm install`, not the pod, and helm says which it is."""
    done = helm("template", "demo", CHART, given=given)
    assert done.returncode == 1
    assert told in done.stderr


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "plugin", "engine": {"maxLoras": 64}},
        ALONE,
        {"terminationGracePeriodSeconds": 330, "engine": {"args": ["--shutdown-timeout=300"]}},
        {"strategy": {"maxSurge": 0, "maxUnavailable": 1}},
        {"gc": {"enabled": True, "schedule": "@daily"}},
        {"auth": {"enabled": False}, "ingress": {"enabled": True, "host": "llm.example"}},  # ADR 0025
    ],
)
def test_what_works_is_not_refused(given: Object) -> None:
    """The values next to those that are refused."""
    assert objects(given)["Deployment"]


def test_the_schema_knows_every_value() -> None:
    """Nothing in values.yaml is missing from the schema, nor the other way round."""

    def names(schema: Object, where: str = "") -> set[str]:
        found = set()
        for name, inner in schema.get("properties", {}).items():
            found |= {where + name} | names(inner, f"{where}{name}.")
        return found

    def given(values: Object, schema: Object, where: str = "") -> set[str]:
        found = set()
        for name, value in values.items():
            inner = schema.get("properties", {}).get(name, {})
            found |= {where + name}
            if isinstance(value, dict) and "properties" in inner:
                found |= given(value, inner, f"{where}{name}.")
        return found

    assert names(SCHEMA) - {"global"} == given(VALUES, SCHEMA)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_lora_fs_is_locked_down(case: str, mode: str) -> None:
    """Not root, no new privileges, no capabilities, no root that can be written, no token of the cluster."""
    kinds = objects({**CASES[case], "mode": mode})
    (ours,) = pod(kinds)["initContainers"]
    assert ours["securityContext"] == plain.SIDECAR["securityContext"]
    assert pod(kinds)["automountServiceAccountToken"] is False
    assert pod(kinds)["enableServiceLinks"] is False, "a release named vllm would set VLLM_PORT"
    assert pod(kinds)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (engine,) = pod(kinds)["containers"]
    assert engine["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    for container in (ours, engine):
        assert container["resources"]["requests"]["memory"]
        assert container["resources"]["limits"]["memory"]
    if case != "nothing":
        assert kinds["ServiceAccount"]["automountServiceAccountToken"] is False
        assert pod(kinds)["serviceAccountName"] == kinds["ServiceAccount"]["metadata"]["name"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_every_mount_has_its_volume(case: str, mode: str) -> None:
    """No mount without a volume, no volume without a mount; the claim is the one that is made or named."""
    kinds = objects({**CASES[case], "mode": mode})
    spec = pod(kinds)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    (ours,), (engine,) = spec["initContainers"], spec["containers"]
    assert set(volumes) == set(mounts(ours)) | set(mounts(engine))
    if mode == "sidecar":
        assert "adapters" not in mounts(engine), "the engine gets paths under /stage alone"
    made = kinds.get("PersistentVolumeClaim", {"metadata": {"name": "there"}})
    assert volumes["adapters"]["persistentVolumeClaim"]["claimName"] == made["metadata"]["name"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_selectors_agree(case: str, mode: str) -> None:
    """Service, budget and policy are of the pods and of no other release's."""
    kinds = objects({**CASES[case], "mode": mode})
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selector = kinds["Service"]["spec"]["selector"]
    assert selector.items() <= labels.items()
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"] == selector
    assert objects({"mode": mode}, "other")["Service"]["spec"]["selector"] != selector
    if case != "nothing":
        budget = kinds["PodDisruptionBudget"]["spec"]
        assert budget["selector"]["matchLabels"] == selector
        assert (
            budget["unhealthyPodEvictionPolicy"]
            == plain.read("pdb.yaml")["spec"]["unhealthyPodEvictionPolicy"]
        )
        assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == selector


@pytest.mark.parametrize("mode", MODES)
def test_clients_reach_the_port_that_loads(mode: str) -> None:
    """Beside a sidecar its own, in the plugin's mode the engine's; probes ask what is there."""
    kinds = objects({"mode": mode})
    (ours,), (engine,) = pod(kinds)["initContainers"], pod(kinds)["containers"]
    serving = ours if mode == "sidecar" else engine
    (port,) = serving["ports"]
    assert port["containerPort"] == (8001 if mode == "sidecar" else 8000)
    reached = kinds["Service"]["spec"]["ports"][0]["targetPort"]
    assert reached == (8001 if mode == "sidecar" else "http")
    allowed = kinds["NetworkPolicy"]["spec"]["ingress"][0]["ports"][0]["port"]
    assert plain.check_reached(pod(kinds), reached) == port["containerPort"]
    assert plain.check_reached(pod(kinds), allowed) == port["containerPort"]
    assert plain.scraped(kinds["Deployment"]) == [port["containerPort"]]
    assert serving["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert serving["livenessProbe"]["httpGet"]["path"] == "/health"
    assert engine["startupProbe"]["failureThreshold"] * engine["startupProbe"]["periodSeconds"] == 1200
    if mode == "sidecar":
        assert ours["restartPolicy"] == "Always"
        assert ours["startupProbe"]["httpGet"]["path"] == "/health"
        assert "--host=127.0.0.1" in engine["args"]
        assert "ports" not in engine
        assert mounts(engine)["stage"] == {"name": "stage", "mountPath": "/stage", "readOnly": True}
    else:
        assert "restartPolicy" not in ours
        assert str(parse(ours["args"]).params["dir"]) == "/plugin"
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_settings_accept_the_environment(case: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every LORA_FS_ variable is a setting, and what lora-fs reads is what the values said."""
    given = {**CASES[case], "mode": mode}
    spec, values = pod(objects(given)), merged(VALUES, given)
    (container,) = spec["initContainers" if mode == "sidecar" else "containers"]
    for name, entry in environment(container).items():
        if name.startswith("LORA_FS_"):
            assert name.removeprefix("LORA_FS_").lower() in Settings.model_fields
        if name.startswith(("LORA_FS_", "NIM_")):
            monkeypatch.setenv(name, entry.get("value", "demo-0"))
    settings = Settings()
    assert settings.model == values["model"]
    assert settings.namespaces == tuple(values["namespaces"])
    assert settings.max_loaded == values["sidecar"].get("maxLoaded")
    assert settings.max_rank == values["engine"]["maxLoraRank"]
    assert settings.replica_id == "demo-0"
    assert str(settings.root) == mounts(container)["adapters"]["mountPath"]
    assert str(settings.stage_dir) == mounts(container)["stage"]["mountPath"]
    (engine,) = spec["containers"]
    assert f"--model={settings.model}" in engine["args"]


@pytest.mark.parametrize(("mode", "folder"), [("sidecar", ""), ("plugin", "plugin/")])
def test_the_engine_is_that_of_the_manifests(mode: str, folder: str) -> None:
    """By its defaults; what a test says of the manifests' engine holds for the chart's."""
    (ours,) = pod(objects({"mode": mode}))["containers"]
    (theirs,) = plain.read(f"{folder}deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert set(ours["args"]) == set(theirs["args"])
    told = {name: environment(ours)[name] for name in environment(theirs)}
    assert told == environment(theirs)
    parts = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports", "resources")
    assert {part: ours.get(part) for part in parts} == {part: theirs.get(part) for part in parts}
    assert set(mounts(ours)) - {"token"} == set(mounts(theirs))


def test_what_is_loaded_fits_the_engine() -> None:
    """The default values load no more than the engine keeps in memory."""
    assert VALUES["sidecar"]["maxLoaded"] == VALUES["engine"]["maxCpuLoras"]


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_leaves_requests_their_time(mode: str) -> None:
    """All that the pod has but 30 s, whatever that is; the engine's own arguments have the last word."""
    for grace_s in (VALUES["terminationGracePeriodSeconds"], 30, 3600):
        spec = pod(objects({"mode": mode, "terminationGracePeriodSeconds": grace_s}))
        assert plain.option(spec["containers"][0], "shutdown-timeout") == grace_s - 30
        assert plain.slack_s(spec) == 20
    given = {"mode": mode, "engine": {"args": ["--shutdown-timeout=5"]}}
    (engine,) = pod(objects(given))["containers"]
    assert engine["args"][-1] == "--shutdown-timeout=5"


def values_of(page: str) -> list[Object]:
    """What a page gives as yaml."""
    text = (plain.FOLDER.parents[1] / "docs/howto" / page).read_text()
    return [
        yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def test_prometheus_is_let_in() -> None:
    """By the values of its page, from another namespace, and clients of this one as before."""
    (given,) = (values for values in values_of("metrics.md") if "networkPolicy" in values)
    ((by_default,),) = (one["from"] for one in objects({})["NetworkPolicy"]["spec"]["ingress"])
    (ingress,) = objects(given)["NetworkPolicy"]["spec"]["ingress"]
    own, other = ingress["from"]
    assert own == by_default
    assert other["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


def test_traces_are_let_out() -> None:
    """The values of their page let the pods reach the collector that it names, and no less than before."""
    settings, given = values_of("observe.md")
    url = {one["name"]: one["value"] for one in settings["env"]}["OTEL_EXPORTER_OTLP_ENDPOINT"]
    _, namespace, port = re.split(r"[.:]", url.removeprefix("http://"))
    by_default = objects({})["NetworkPolicy"]["spec"]["egress"]
    *kept, added = objects(given)["NetworkPolicy"]["spec"]["egress"]
    assert kept == by_default
    assert added["ports"] == [{"port": int(port), "protocol": "TCP"}]
    (to,) = added["to"]
    assert to["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("auth", [{}, {"existingSecret": "lora-fs-token"}])
def test_the_token_is_where_lora_fs_looks(mode: str, auth: Object) -> None:
    """The folder that the secret is mounted at, the key that the pages give, the secret made or named."""
    kinds = objects({"mode": mode, "auth": auth})
    spec = pod(kinds)
    (container,) = spec["initContainers" if mode == "sidecar" else "containers"]
    file = Path(environment(container)["LORA_FS_TOKEN_FILE"]["value"])
    assert (str(file.parent), file.name) == (mounts(container)["token"]["mountPath"], "token")
    assert ("Secret" in kinds) is (not auth)
    named = kinds["Secret"]["metadata"]["name"] if not auth else "lora-fs-token"
    assert {"name": "token", "secret": {"secretName": named}} in spec["volumes"]


@pytest.mark.parametrize("claim", [ALONE, {}])
def test_a_job_runs_where_it_can_mount_the_volume(claim: Object) -> None:
    """On the replica's node, if the volume is of one node; at zero replicas on any."""
    features: Object = {"gc": {"enabled": True}, "apply": {"existingConfigMap": "mine"}}
    found = render(merged(claim, features))
    jobs = [one["spec"].get("jobTemplate", one)["spec"] for one in found if one["kind"] in {"Job", "CronJob"}]
    assert len(jobs) == 3
    replicas = objects(claim)["Deployment"]["spec"]["selector"]
    for job in jobs:
        spec = job["template"]["spec"]
        rules = spec.get("affinity", {}).get("podAffinity", {})
        term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": replicas}
        wanted = [{"weight": 100, "podAffinityTerm": term}] if claim else None
        assert rules.get("preferredDuringSchedulingIgnoredDuringExecution") == wanted
    for one in found:
        kubernetes_validate.validate(one, plain.VERSIONS[-1], strict=True)


def test_an_installation_has_a_token_of_its_own() -> None:
    """By default registering asks for one that nobody else has and that lora-fs takes."""
    texts = {b64decode(objects({}, release)["Secret"]["data"]["token"]) for release in ("a", "b")}
    assert len(texts) == 2
    for text in texts:
        (token,) = tokens.parse(text.decode()).values()
        assert token.may(tokens.Verb.REGISTER, "default")
        assert len(text) == 48
    given = objects({"auth": {"token": "one\ntwo name=b"}})["Secret"]["data"]["token"]
    assert b64decode(given) == b"one\ntwo name=b"
    off = objects({"auth": {"enabled": False}})
    assert "Secret" not in off
    assert "LORA_FS_TOKEN_FILE" not in environment(pod(off)["initContainers"][0])


def test_an_upgrade_keeps_the_token() -> None:
    """What the cluster has is rendered again, unless a token is given."""
    there = b64encode(b"first").decode()
    with cluster({"demo-token": {"token": there}}) as url:
        for given, token in (({}, there), ({"auth": {"token": "new"}}, b64encode(b"new").decode())):
            done = helm(
                "template", "demo", CHART, "--namespace", "ml", "--is-upgrade", "--dry-run=server",
                "--kube-apiserver", url, "-s", "templates/secret.yaml", given=given,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert yaml.safe_load(done.stdout)["data"] == {"token": token}


def test_everything_reaches_the_pod() -> None:
    """What the values say is where they say it is."""
    kinds = objects(EVERYTHING)
    spec, (engine,) = pod(kinds), pod(kinds)["containers"]
    assert engine["args"][-2:] == EVERYTHING["engine"]["args"]
    assert environment(engine)["HF_TOKEN"] == EVERYTHING["engine"]["env"][0]
    for name in ("nodeSelector", "tolerations", "affinity", "imagePullSecrets"):
        assert spec[name] == EVERYTHING[name]
    (ours,) = spec["initContainers"]
    for container in (ours, engine):
        assert mounts(container)["certificates"]["mountPath"] == "/etc/ssl/mine"
    assert ours["image"] == f"lora-fs@sha256:{'a' * 64}"
    assert engine["image"] == f"vllm/vllm-openai@sha256:{'e' * 64}"
    rolling = {"maxUnavailable": 1, "maxSurge": 0}
    assert kinds["Deployment"]["spec"]["strategy"]["rollingUpdate"] == rolling
    assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("high", "nvidia")
    assert kinds["NetworkPolicy"]["spec"]["ingress"][0]["from"] == EVERYTHING["networkPolicy"]["from"]
    assert EVERYTHING["networkPolicy"]["egress"][0] in kinds["NetworkPolicy"]["spec"]["egress"]
    assert kinds["PersistentVolumeClaim"]["spec"]["storageClassName"] == "nfs"
    assert {"name": "stage", "emptyDir": {"sizeLimit": "20Gi", "medium": "Memory"}} in spec["volumes"]
    assert kinds["PersistentVolumeClaim"]["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize(("startup_s", "grace_s"), [(1200, 120), (3600, 600)])
def test_a_rollout_has_the_time_that_a_model_takes_to_load(startup_s: int, grace_s: int) -> None:
    """No rollout is called failed before the startup probe gives up, an old pod's end and a pull included."""
    given = {"engine": {"startupSeconds": startup_s}, "terminationGracePeriodSeconds": grace_s}
    spec = objects(given)["Deployment"]["spec"]
    probe = spec["template"]["spec"]["containers"][0]["startupProbe"]
    probed_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert spec["progressDeadlineSeconds"] >= probed_s + grace_s + 600


def test_what_scales_replicas_is_alone() -> None:
    """With an autoscaler, the chart's or one outside of it, an upgrade does not set the count back."""
    assert objects({})["Deployment"]["spec"]["replicas"] == 2
    assert "replicas" not in objects({"replicas": None})["Deployment"]["spec"]
    kinds = objects(EVERYTHING)
    assert "replicas" not in kinds["Deployment"]["spec"]
    target = kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == kinds["Deployment"]["metadata"]["name"]


def test_the_pages_example_scales() -> None:
    """The autoscaler that the page gives is one that the API takes, by a metric that the adapter makes."""
    (given,), (rule,) = (
        [one for one in values_of("kubernetes.md") if key in one] for key in ("autoscaling", "rules")
    )
    kinds = objects(given)
    kubernetes_validate.validate(kinds["HorizontalPodAutoscaler"], plain.VERSIONS[-1], strict=True)
    (metric,) = given["autoscaling"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["rules"]["custom"][0]["name"]["as"]


def test_the_pages_zero_is_left_again() -> None:
    """Its values render a gateway that is ready without replicas and scraped, by a PodMonitor or without."""
    (given,) = (one for one in values_of("kubernetes.md") if "readyAtZero" in one.get("gateway", {}))
    made = {(one["kind"], one["metadata"]["name"]): one for one in render(given)}
    (gateway,) = (
        one for kind, one in made.items() if kind[0] == "Deployment" and kind[1].endswith("-gateway")
    )
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/metrics"
    assert plain.scraped(gateway) == [8001]
    (monitor,) = (
        one for kind, one in made.items() if kind[0] == "PodMonitor" and kind[1].endswith("-gateway")
    )
    labels = gateway["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("limit", "kept"), [("20Gi", 10 << 30), ("1.5Gi", 3 << 28), ("800M", 400_000_000), ("2Ti", 1 << 40)]
)
def test_the_stage_folder_is_kept_below_its_limit(limit: str, kept: int) -> None:
    """What lora-fs keeps follows the size of the volume, unless it is said."""
    (ours,) = pod(objects({"stage": {"sizeLimit": limit}}))["initContainers"]
    assert environment(ours)["LORA_FS_STAGE_MAX_BYTES"]["value"] == str(kept)
    (ours,) = pod(objects({"stage": {"sizeLimit": limit, "maxBytes": "7"}}))["initContainers"]
    assert environment(ours)["LORA_FS_STAGE_MAX_BYTES"]["value"] == "7"


@pytest.mark.parametrize("mode", MODES)
def test_the_cluster_may_choose_the_user(mode: str) -> None:
    """OpenShift refuses a pod that names a user or a group; the rest stays locked, and no home is root's."""
    kinds = objects({"arbitraryUser": True, "gc": {"enabled": True}, "mode": mode})
    assert plain.home_is_writable(pod(kinds)["containers"][0])
    jobs = kinds["Job"]["spec"]["template"], kinds["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]
    for template in (kinds["Deployment"]["spec"]["template"], *jobs):
        assert not re.search("runAsUser|runAsGroup|fsGroup'", str(template))
    locked = dict(plain.SIDECAR["securityContext"])
    del locked["runAsUser"], locked["runAsGroup"]
    assert pod(kinds)["initContainers"][0]["securityContext"] == locked


def test_replicas_spread_over_nodes() -> None:
    """By default the release's own pods; a selector that is given stays."""
    kinds = objects({})
    (spread,) = pod(kinds)["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    own = {**spread, "labelSelector": {"matchLabels": {"a": "b"}}}
    assert pod(objects({"topologySpreadConstraints": [own]}))["topologySpreadConstraints"] == [own]


def test_clients_outside_reach_the_models_alone() -> None:
    """Ingress and route lead to the Service, for `/v1`: `/metrics` and the dashboard stay inside."""
    kinds = objects(EVERYTHING)
    ((rule,), (tls,)) = kinds["Ingress"]["spec"]["rules"], kinds["Ingress"]["spec"]["tls"]
    (path,) = rule["http"]["paths"]
    service = kinds["Service"]
    (port,) = service["spec"]["ports"]
    reached = {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
    assert (path["path"], path["backend"]["service"]) == ("/v1", reached)
    assert tls["hosts"] == [rule["host"]] == ["llm.example"]
    (route,) = kinds["HTTPRoute"]["spec"]["rules"]
    assert route["backendRefs"] == [{"name": service["metadata"]["name"], "port": port["port"]}]
    assert [one["path"]["value"] for one in route["matches"]] == ["/v1"]
    (ours,) = pod(kinds)["initContainers"]
    assert environment(ours)["LORA_FS_ALLOWED_HOSTS"]["value"] == "llm.example,llm2.example"


@pytest.mark.parametrize("mode", MODES)
def test_the_monitor_finds_the_port(mode: str) -> None:
    """It selects the release's pods, and a port that one of their containers has."""
    kinds = objects({**EVERYTHING, "mode": mode})
    monitor, spec = kinds["PodMonitor"], pod(kinds)
    assert monitor["spec"]["selector"] == kinds["Deployment"]["spec"]["selector"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    names = [
        port["name"]
        for one in (*spec["initContainers"], *spec["containers"])
        for port in one.get("ports", [])
    ]
    assert names == [endpoint["port"]]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_documents_are_applied_by_a_hook(lora_fs: LoraFs, root: Path, tmp_path: Path) -> None:
    """After an install or an upgrade the Job applies the ConfigMap's files to the replicas' claim."""
    write_adapter(root / "team" / "sql", 1, base="Qwen/Qwen2.5-7B-Instruct")
    text = "apiVersion: lora-fs/v1\nkind: LoraAdapter\nmetadata: {name: sql}\nspec: {source: %s}\n"
    values = {"apply": {"documents": {"a.yaml": text % (root / "team/sql")}, "prune": True, "wait": "10ms"}}
    found = render(values)
    (hook,) = [one for one in found if hooks(one)]
    assert hooks(hook) == "post-install,post-upgrade"
    documents = objects(values)["ConfigMap"]
    assert not hooks(documents)
    template = hook["spec"]["template"]
    (container,) = template["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["adapters"] in pod(objects(values))["volumes"]
    assert volumes["documents"]["configMap"]["name"] == documents["metadata"]["name"]
    for name, content in documents["data"].items():
        (tmp_path / name).write_text(content)
    places = {"--root=/adapters": f"--root={root}", "--filename=/documents": f"--filename={tmp_path}"}
    words = [places.get(word, word) for word in container["args"]]
    assert parse(container["args"]).params["prune"]
    late, again = lora_fs(*words), lora_fs(*words)
    assert (late.out.splitlines()[-1], again.code) == ("1 created", 0)
    (rule,) = hook["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob", "Kubernetes would try again, which hides that no replica followed"
    assert rule["onExitCodes"]["values"] == [late.code]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    selector = objects(values)["Deployment"]["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= template["metadata"]["labels"].items()
    mine = render({"apply": {"existingConfigMap": "mine"}})
    (hook,) = [one for one in mine if hooks(one)]
    assert hook["spec"]["template"]["spec"]["volumes"][1]["configMap"] == {"name": "mine"}
    assert "ConfigMap" not in objects({"apply": {"existingConfigMap": "mine"}})


def test_the_job_of_the_documents_reads_the_pages_password() -> None:
    """The file that its environment names is in a folder that it mounts."""
    (given,) = (one for one in values_of("apply.md") if "extraVolumes" in one.get("apply", {}))
    (hook,) = [one for one in render(merged(given, {"apply": {"existingConfigMap": "mine"}})) if hooks(one)]
    spec = hook["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    file = Path(environment(container)["LORA_FS_REGISTRY_AUTH_FILE"]["value"])
    assert mounts(container)["registry"]["mountPath"] == str(file.parent)
    assert given["apply"]["extraVolumes"][0] in spec["volumes"]


@pytest.mark.parametrize("mode", MODES)
def test_the_trust_file_is_where_lora_fs_looks(mode: str, tmp_path: Path) -> None:
    """The ConfigMap's files are a trust file that lora-fs reads, in each pod and in the Job that applies;
    the whole folder is mounted, so that a change arrives."""
    text = "signers:\n- {name: ops, key: ops.pub}\n"
    files = {"trust.yaml": text, "ops.pub": new_key().public}
    found = render({"mode": mode, "trust": {"files": files}, "apply": {"existingConfigMap": "mine"}})
    (made,) = [one for one in found if one["kind"] == "ConfigMap"]
    assert made["data"] == files
    (hook,) = [one for one in found if hooks(one)]
    (deployment,) = [one for one in found if one["kind"] == "Deployment"]
    for template in (hook["spec"]["template"], deployment["spec"]["template"]):
        spec = template["spec"]
        container = next(
            one
            for one in (*spec.get("initContainers", ()), *spec["containers"])
            if "LORA_FS_TRUST" in environment(one)
        )
        place = Path(environment(container)["LORA_FS_TRUST"]["value"])
        mount = mounts(container)["trust"]
        assert (mount["mountPath"], mount["readOnly"], "subPath" in mount) == (str(place.parent), True, False)
        assert {"name": "trust", "configMap": {"name": made["metadata"]["name"]}} in spec["volumes"]
        for name, content in made["data"].items():
            (tmp_path / name).write_text(content)
        assert [one.name for one in Trust(tmp_path / place.name).signers().every] == ["ops"]


def test_without_trust_nothing_is_mounted() -> None:
    """By default no signature is looked at; a ConfigMap of yours is named, and none is made."""
    assert "LORA_FS_TRUST" not in environment(pod(objects({}))["initContainers"][0])
    mine = objects({"trust": {"existingConfigMap": "mine"}})
    assert {"name": "trust", "configMap": {"name": "mine"}} in pod(mine)["volumes"]
    assert "ConfigMap" not in mine


@pytest.mark.parametrize("mode", MODES)
def test_the_notes_are_commands_that_run(tmp_path: Path, mode: str) -> None:
    """They name the release's own objects, and the commands in them parse."""
    told = notes({"mode": mode}, tmp_path)
    assert "deployment/blue" in told
    assert "http://blue.ml/v1" in told
    for line in told.splitlines():
        if " -- " in line:
            parse(line.split("lora-fs ", 2)[-1].split())


def test_the_notes_of_pods_that_only_read_write_elsewhere(tmp_path: Path) -> None:
    """A command in the pod would fail: the volume is mounted read-only there."""
    told = notes({"storage": {"readOnly": True, "init": "never"}}, tmp_path)
    commands = [line.strip() for line in told.splitlines() if "lora-fs" in line and line.startswith("  ")]
    writing = [line for line in commands if not line.startswith("kubectl ")]
    assert [parse(line.split()[1:]).info_name for line in writing] == ["init", "register"]
    assert [line for line in commands if line not in writing and not line.endswith(" status")] == []


@pytest.mark.parametrize(
    ("jobs", "is_cut"),
    [({"blue-init": {"active": 1}}, True), ({"blue-init": {"succeeded": 1}}, False), ({}, False)],
)
def test_an_upgrade_says_that_it_ended_the_job_of_the_registry(
    tmp_path: Path, jobs: dict[str, Object], is_cut: bool
) -> None:
    """As after an install with an image that no node can pull, which an upgrade corrects."""
    with cluster({}, jobs) as url:
        said = notes({}, tmp_path, "--is-upgrade", "--dry-run=server", "--kube-apiserver", url)
    assert ("exec deploy/blue -c lora-fs -- lora-fs init" in said) is is_cut
    assert ("removed the Job" in said) is is_cut


def test_the_chart_is_the_version_that_it_installs() -> None:
    """The image's default tag is the one that the manifests name."""
    image = pod(objects({}))["initContainers"][0]["image"]
    assert image == plain.SIDECAR["image"] == f"lora-fs:{__version__}"
    assert META["version"] == META["appVersion"] == __version__
    assert META["kubeVersion"].startswith(f">={plain.VERSIONS[0]}")


# Of metadata.name: how long, and what, Kubernetes takes. No schema says it.
NAMES = {
    "Service": r"(?=.{1,63}$)[a-z]([-a-z0-9]*[a-z0-9])?",
    "CronJob": r"(?=.{1,52}$)[a-z0-9][-a-z0-9]*[a-z0-9]",
}


@pytest.mark.parametrize("release", ["qwen2.5-7b", "a" * 53, f"{'a' * 48}.b-c"])
def test_the_cluster_takes_the_names(release: str) -> None:
    """Of any release whose name helm takes; one name stands wherever an object is meant."""
    given = merged(EVERYTHING, {"gateway": {"enabled": True}})
    checked = set()
    for one in render(given, release):
        rule = NAMES.get(one["kind"], r"(?=.{1,63}$)[a-z0-9][-a-z0-9]*[a-z0-9]")
        assert re.fullmatch(rule, one["metadata"]["name"]), one["kind"]
        checked.add(one["kind"])
    assert checked >= NAMES.keys()


def test_a_release_that_no_service_can_be_named_after_is_refused() -> None:
    """Before anything is made: a Service begins with a letter."""
    done = helm("template", "7b-chat", CHART)
    assert done.returncode == 1
    assert "the release's name (7b-chat) begins with a digit" in done.stderr
