"""The Kubernetes example against the API's own schemas, the settings and itself."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lora_fs.sidecar.settings import Settings

FOLDER = Path(__file__).parents[2] / "examples/kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
# Native sidecars are on by default since 1.29; the newest is what the validator ships.
VERSIONS = ("1.29", "1.33")
ENGINE_PORT = 8000
SIDECAR_PORT = 8001
Object = dict[str, Any]


def read(name: str) -> Object:
    """One file, one object."""
    (document,) = yaml.safe_load_all((FOLDER / name).read_text())
    assert isinstance(document, dict)
    return document


DEPLOYMENT = read("deployment.yaml")
SERVICE = read("service.yaml")
KUSTOMIZATION = read("kustomization.yaml")
POD: Object = DEPLOYMENT["spec"]["template"]["spec"]
(SIDECAR,) = POD["initContainers"]
(ENGINE,) = POD["containers"]


def environment(container: Object) -> dict[str, Object]:
    """The container's variables, by name."""
    return {entry["name"]: entry for entry in container.get("env", [])}


def mounts(container: Object) -> dict[str, Object]:
    """The container's mounts, by volume."""
    return {mount["name"]: mount for mount in container["volumeMounts"]}


def option(engine: Object, name: str) -> int:
    """The number of one of vLLM's arguments."""
    (found,) = (argument for argument in engine["args"] if argument.startswith(f"--{name}="))
    return int(found.partition("=")[2])


def check_reached(pod: Object, port: int | str) -> int:
    """The number of the container's port that a Service or a NetworkPolicy means.

    Before Kubernetes 1.33 neither finds a name that only a native sidecar's port has.
    """
    exposed = [one for one in pod["containers"] for one in one.get("ports", [])]
    beside = [one for one in pod["initContainers"] for one in one.get("ports", [])]
    (found,) = (one for one in (*exposed, *beside) if port in (one["containerPort"], one["name"]))
    assert found not in beside or port == found["containerPort"]
    number: int = found["containerPort"]
    return number


def slack_s(pod: Object) -> int:
    """Seconds from the last moment that requests may take to the one when the pod is killed."""
    (engine,) = pod["containers"]
    program, seconds = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    grace: int = pod["terminationGracePeriodSeconds"]
    return grace - int(seconds) - option(engine, "shutdown-timeout")


def size_bytes(quantity: str) -> int:
    """Of a Kubernetes quantity: 20Gi."""
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30}[quantity[-2:]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_fits_the_api(name: str, version: str) -> None:
    """Every field is one that this Kubernetes knows: a typo is an error, not a silence."""
    kubernetes_validate.validate(read(name), version, strict=True)


def test_the_validator_sees_a_typo() -> None:
    """The check above has teeth: a misspelt field of a probe is refused."""
    broken = read("deployment.yaml")
    probe = broken["spec"]["template"]["spec"]["initContainers"][0]["livenessProbe"]
    probe["periodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_kustomization_lists_every_file() -> None:
    """A manifest that is not listed is not applied; a listed one that is missing fails."""
    assert sorted(KUSTOMIZATION["resources"]) == MANIFESTS


def test_no_namespace_is_named() -> None:
    """The user's `-n` decides."""
    assert "namespace" not in KUSTOMIZATION
    assert all("namespace" not in read(name)["metadata"] for name in MANIFESTS)


def test_image_is_the_one_that_kustomize_renames() -> None:
    """Changing `newName` reaches the sidecar."""
    (image,) = KUSTOMIZATION["images"]
    assert SIDECAR["image"] == f"{image['name']}:{image['newTag']}"


def test_sidecar_is_native() -> None:
    """`restartPolicy: Always` makes an init container a sidecar; else the pod never starts."""
    assert SIDECAR["restartPolicy"] == "Always"
    assert SIDECAR["args"] == ["sidecar"]


def test_engine_start_does_not_wait_for_itself() -> None:
    """The engine starts after the sidecar's startup probe, which must not need the engine."""
    assert SIDECAR["startupProbe"]["httpGet"]["path"] == "/health"
    assert SIDECAR["livenessProbe"]["httpGet"]["path"] == "/health"
    assert SIDECAR["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_sidecar_is_locked_down() -> None:
    """Not root, no new privileges, no capabilities, a root that cannot be written."""
    context = SIDECAR["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == 10001
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_engine_has_no_powers() -> None:
    """Its image runs as root; nothing is left of that but the user."""
    assert ENGINE["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_volumes_are_the_sidecars() -> None:
    """A new claim's folder is root's; the group that Kubernetes gives it is what lets user 10001 write."""
    for folder in ("", "plugin/"):
        pod = read(f"{folder}deployment.yaml")["spec"]["template"]["spec"]
        assert pod["securityContext"]["fsGroup"] == SIDECAR["securityContext"]["runAsGroup"], folder


def test_no_pod_has_a_token_of_the_cluster() -> None:
    """Neither the account nor the pod asks for one."""
    assert read("serviceaccount.yaml")["automountServiceAccountToken"] is False
    assert POD["automountServiceAccountToken"] is False
    assert POD["serviceAccountName"] == read("serviceaccount.yaml")["metadata"]["name"]


def test_the_service_of_its_name_sets_no_variable() -> None:
    """For the Service vllm it would be VLLM_PORT, an address, and vLLM ends on that at its start."""
    for folder in ("", "plugin/"):
        pod = read(f"{folder}deployment.yaml")["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False, folder


def test_budget_and_policy_are_of_the_pods() -> None:
    """One replica may be away; only the port that clients are sent to is open."""
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    budget, policy = read("pdb.yaml")["spec"], read("networkpolicy.yaml")["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "a replica that still loads blocks no drain"
    (port,) = policy["ingress"][0]["ports"]
    assert check_reached(POD, port["port"]) == SIDECAR_PORT


# On OpenShift the DNS Service's pods listen on 5353, and a rule there is of the pods' ports.
DNS = {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}


@pytest.mark.parametrize("folder", ["", "plugin/"])
def test_the_policy_lets_names_and_https_out(folder: str) -> None:
    """A pod without DNS fetches no model."""
    (rule,) = read(f"{folder}networkpolicy.yaml")["spec"]["egress"]
    assert {(one["port"], one["protocol"]) for one in rule["ports"]} == {*DNS, (443, "TCP")}
    assert "to" not in rule


STORAGE = sorted(path.name for path in (FOLDER / "storage").glob("*.yaml"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", STORAGE)
def test_storage_stands_in_for_the_claim(name: str, version: str) -> None:
    """Each fits the API and binds the claim that the deployment names to a volume for all replicas."""
    documents = [one for one in yaml.safe_load_all((FOLDER / "storage" / name).read_text()) if one]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    kinds = {one["kind"]: one for one in documents}
    volume, claim = kinds["PersistentVolume"], kinds["PersistentVolumeClaim"]
    assert claim["metadata"] == read("pvc.yaml")["metadata"]
    assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


def test_kinds_folder_hands_down_its_group(tmp_path: Path) -> None:
    """The Job's command, with no more rights than the Job has, leaves the bit that new folders inherit."""
    tool = shutil.which("setpriv")
    if tool is None or os.geteuid() != 0:
        pytest.skip("giving up rights needs setpriv, and root")
    documents = list(yaml.safe_load_all((FOLDER / "storage/kind.yaml").read_text()))
    (spec,) = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Job")
    (container,) = spec["containers"]
    kept = ",".join(f"+{one.lower()}" for one in container["securityContext"]["capabilities"]["add"])
    groups = ",".join(map(str, spec["securityContext"].get("supplementalGroups", [0])))
    command = [word.replace("/adapters", str(tmp_path)) for word in container["command"]]
    bounds = [f"--{which}=-all,{kept}" for which in ("bounding-set", "inh-caps")]
    subprocess.run([tool, f"--groups={groups}", *bounds, *command], check=True)
    found = tmp_path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o2775, 10001, 10001)


def test_every_container_asks_for_resources() -> None:
    """Memory is limited for both, so that one cannot starve the other."""
    for container in (SIDECAR, ENGINE):
        assert container["resources"]["requests"]["memory"]
        assert container["resources"]["limits"]["memory"]


def test_the_containers_share_the_stage_folder_alone() -> None:
    """A path that the sidecar names means the same file to the engine, which never sees the registry."""
    ours, theirs = mounts(SIDECAR), mounts(ENGINE)
    assert set(ours) & set(theirs) == {"stage"}
    assert ours["stage"]["mountPath"] == theirs["stage"]["mountPath"]
    assert theirs["stage"]["readOnly"] is True
    assert not any(ours[volume].get("readOnly", False) for volume in ("adapters", "stage"))


def home_is_writable(engine: Object) -> bool:
    """Whether what the engine keeps in its user's home goes to a volume, whoever the user is."""
    volume, told = mounts(engine)["cache"], environment(engine)
    homes = {told[name]["value"] for name in ("HOME", "XDG_CACHE_HOME")}
    return homes == {volume["mountPath"]} and not volume.get("readOnly", False)


def test_the_engines_home_is_a_volume() -> None:
    """A user that the cluster chose cannot write to /root, where vLLM's image has its home."""
    assert home_is_writable(ENGINE)


def test_every_mount_has_its_volume() -> None:
    """No mount without a volume, no volume without a mount; the claim is the one we ship."""
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(volumes) == set(mounts(SIDECAR)) | set(mounts(ENGINE))
    claim = volumes["adapters"]["persistentVolumeClaim"]["claimName"]
    assert claim == read("pvc.yaml")["metadata"]["name"]
    assert "ReadWriteMany" in read("pvc.yaml")["spec"]["accessModes"]


def test_settings_name_the_mounts() -> None:
    """The registry and the stage are where the volumes are mounted."""
    variables = environment(SIDECAR)
    assert variables["LORA_FS_ROOT"]["value"] == mounts(SIDECAR)["adapters"]["mountPath"]
    assert variables["LORA_FS_STAGE_DIR"]["value"] == mounts(SIDECAR)["stage"]["mountPath"]


def named_settings() -> list[str]:
    """Every LORA_FS_ variable in the manifests, the commented ones included."""
    text = "".join(path.read_text() for path in FOLDER.rglob("*") if path.is_file())
    return sorted(set(re.findall(r"\bLORA_FS_[A-Z_]+", text)))


@pytest.mark.parametrize("variable", named_settings())
def test_variable_is_a_setting(variable: str) -> None:
    """A variable that no setting reads would be ignored in silence."""
    assert variable.removeprefix("LORA_FS_").lower() in Settings.model_fields


def test_settings_accept_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar's settings are valid as the pod would read them."""
    for name, entry in environment(SIDECAR).items():
        monkeypatch.setenv(name, entry.get("value", "vllm-0"))
    settings = Settings()
    assert settings.port == SIDECAR_PORT


def test_a_service_named_lora_fs_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Kubernetes sets for it in every pod of the namespace is not the port that was asked for."""
    monkeypatch.setenv("LORA_FS_PORT", "tcp://10.96.0.7:80")
    assert Settings().port == SIDECAR_PORT
    monkeypatch.setenv("LORA_FS_PORT", "9001")
    assert Settings().port == 9001


def test_replica_id_is_the_pods_name() -> None:
    """Two replicas never share a status file."""
    source = environment(SIDECAR)["LORA_FS_REPLICA_ID"]["valueFrom"]
    assert source["fieldRef"]["fieldPath"] == "metadata.name"
    assert DEPLOYMENT["spec"]["replicas"] == 2


def test_engine_serves_adapters_at_runtime() -> None:
    """Without the flag or the variable, a stock vLLM refuses to load."""
    assert "--enable-lora" in ENGINE["args"]
    assert environment(ENGINE)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]["value"] == "True"


def test_sidecar_and_engine_mean_the_same_model_and_port() -> None:
    """The base model and the engine's address are written twice and agree."""
    variables = environment(SIDECAR)
    assert f"--model={variables['LORA_FS_MODEL']['value']}" in ENGINE["args"]
    assert variables["LORA_FS_ENGINE_URL"]["value"] == f"http://127.0.0.1:{ENGINE_PORT}"
    assert {"--host=127.0.0.1", f"--port={ENGINE_PORT}"} <= set(ENGINE["args"])


def test_service_reaches_the_proxy_and_only_it() -> None:
    """Clients get the sidecar's port: the engine would answer 404 for what is not resident."""
    (port,) = SERVICE["spec"]["ports"]
    (exposed,) = SIDECAR["ports"]
    assert check_reached(POD, port["targetPort"]) == exposed["containerPort"] == SIDECAR_PORT
    assert "ports" not in ENGINE


def test_a_stop_leaves_requests_their_time() -> None:
    """Without the option vLLM cuts every stream; it and the engine's own end fit in what the pod has."""
    for folder in ("", "plugin/"):
        pod = read(f"{folder}deployment.yaml")["spec"]["template"]["spec"]
        assert option(pod["containers"][0], "shutdown-timeout") >= 60, folder
        assert slack_s(pod) >= 20, folder


def test_a_rollout_has_the_time_that_a_model_takes_to_load() -> None:
    """A new pod waits for the startup probe, after an old one ended, and 600 s for its images."""
    for folder in ("", "plugin/"):
        spec = read(f"{folder}deployment.yaml")["spec"]
        pod = spec["template"]["spec"]
        startup = pod["containers"][0]["startupProbe"]
        starts_s = startup["periodSeconds"] * startup["failureThreshold"]
        wanted_s = starts_s + pod["terminationGracePeriodSeconds"] + 600
        assert spec["progressDeadlineSeconds"] == wanted_s, folder


def test_replicas_spread_over_nodes() -> None:
    """One node that fails takes as few replicas as it can."""
    for folder in ("", "plugin/"):
        spec = read(f"{folder}deployment.yaml")["spec"]
        (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["labelSelector"] == spec["selector"], folder


def test_bounds_agree_with_the_engine_and_the_stage() -> None:
    """Nothing is registered that the engine refuses, nor loaded that it or the stage folder cannot keep."""
    variables = {name: entry.get("value", "") for name, entry in environment(SIDECAR).items()}
    (stage,) = (volume["emptyDir"] for volume in POD["volumes"] if volume["name"] == "stage")
    assert int(variables["LORA_FS_MAX_LOADED"]) == option(ENGINE, "max-cpu-loras")
    assert int(variables["LORA_FS_MAX_RANK"]) == option(ENGINE, "max-lora-rank")
    assert int(variables["LORA_FS_STAGE_MAX_BYTES"]) < size_bytes(stage["sizeLimit"])


def test_service_selects_the_pods() -> None:
    """Selector, pod labels and the deployment's own selector agree."""
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()


def scraped(deployment: Object) -> list[int]:
    """The ports of a deployment's pods that the example for Prometheus keeps."""
    config = yaml.safe_load((FOLDER.parent / "observability/prometheus.yaml").read_text())
    (relabel,) = (one for one in config["scrape_configs"][0]["relabel_configs"] if "action" in one)
    template = deployment["spec"]["template"]
    known = {
        f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', name)}": value
        for name, value in template["metadata"]["labels"].items()
    }
    pod, found = template["spec"], []
    for exposed in (
        port for one in pod.get("initContainers", []) + pod["containers"] for port in one.get("ports", [])
    ):
        known["__meta_kubernetes_pod_container_port_name"] = exposed["name"]
        if re.fullmatch(relabel["regex"], ";".join(known[name] for name in relabel["source_labels"])):
            found.append(int(exposed["containerPort"]))
    return found


def test_the_scrape_finds_the_pods() -> None:
    """By a label that they have, which Prometheus writes with underscores, and the proxy's port."""
    assert scraped(DEPLOYMENT) == [SIDECAR_PORT]


def test_the_secret_is_the_one_that_the_pages_make() -> None:
    """Its name, its key and where it is mounted are the same wherever they are told."""
    pages = [*(FOLDER.parents[1] / "docs").rglob("*.md"), *FOLDER.parent.rglob("*.md")]
    made = {
        (page.name, *one)
        for page in pages
        for one in re.findall(
            r"create secret generic (\S*lora-fs\S*) --from-(?:file|literal)=(\w+)", page.read_text()
        )
    }
    assert {page for page, *_ in made} == {"security.md", "kubernetes.md", "README.md"}
    assert {(secret, key) for _, secret, key in made} == {("lora-fs-token", "token")}
    for manifest in (FOLDER / "deployment.yaml", FOLDER / "plugin/deployment.yaml"):
        text = manifest.read_text()
        assert "# (key: token)" in text
        assert re.findall(r"# +secretName: (.*)", text) == ["lora-fs-token"]
        assert re.findall(r"# - name: LORA_FS_TOKEN_FILE\n *# +value: (.*)", text) == ["/etc/lora-fs/token"]
        assert re.findall(r"# - name: token\n *# +mountPath: (.*)", text) == ["/etc/lora-fs"]


def test_readme_names_every_file() -> None:
    """The table of the README is the folder."""
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in [*MANIFESTS, "kustomization.yaml", "plugin/", "storage/"])
    assert all(f"`storage/{name}`" in readme for name in STORAGE)
