"""The Kubernetes variant with the plugin against the API's schemas, the command, the settings and itself."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from lora_fs.demo.engine import ENGINE_ENV
from lora_fs.sidecar.settings import Settings
from tests.cli.conftest import parse
from tests.deploy import test_kubernetes as sidecar
from tests.deploy.test_kubernetes import Object, environment, mounts

FOLDER = sidecar.FOLDER / "plugin"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
PORT = 8000


def read(name: str) -> Object:
    """One file, one object."""
    (document,) = yaml.safe_load_all((FOLDER / name).read_text())
    assert isinstance(document, dict)
    return document


DEPLOYMENT = read("deployment.yaml")
POD: Object = DEPLOYMENT["spec"]["template"]["spec"]
(INSTALL,) = POD["initContainers"]
(ENGINE,) = POD["containers"]
VARIABLES = environment(ENGINE)


@pytest.mark.parametrize("version", sidecar.VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_fits_the_api(name: str, version: str) -> None:
    """Every field is one that this Kubernetes knows: a typo is an error, not a silence."""
    kubernetes_validate.validate(read(name), version, strict=True)


def test_kustomization_is_that_of_the_sidecar() -> None:
    """The same files under the same labels and image: one can be applied in place of the other."""
    assert read("kustomization.yaml") == sidecar.KUSTOMIZATION
    assert sorted(read("kustomization.yaml")["resources"]) == MANIFESTS
    assert read("pvc.yaml") == sidecar.read("pvc.yaml")


def test_it_takes_the_place_of_the_sidecars_objects() -> None:
    """Same names, same selectors, which cannot be changed afterwards."""
    for name in MANIFESTS:
        assert read(name)["metadata"] == sidecar.read(name)["metadata"]
    assert DEPLOYMENT["spec"]["selector"] == sidecar.DEPLOYMENT["spec"]["selector"]
    assert DEPLOYMENT["spec"]["template"]["metadata"] == sidecar.DEPLOYMENT["spec"]["template"]["metadata"]
    assert read("service.yaml")["spec"]["selector"] == sidecar.SERVICE["spec"]["selector"]


def test_the_init_container_ends() -> None:
    """With `restartPolicy: Always` it would run again for ever, beside the engine."""
    assert "restartPolicy" not in INSTALL
    assert "startupProbe" not in INSTALL


def test_it_installs_where_the_engine_looks() -> None:
    """The command is a real one; its folder is an `emptyDir` at the same path in both, and on PYTHONPATH."""
    place = mounts(INSTALL)["plugin"]["mountPath"]
    assert parse(INSTALL["args"]).params["dir"] == Path(place)
    assert mounts(ENGINE)["plugin"] == {"name": "plugin", "mountPath": place, "readOnly": True}
    assert VARIABLES["PYTHONPATH"]["value"] == place
    assert VARIABLES["VLLM_PLUGINS"]["value"] == "lora_fs"
    (volume,) = (volume for volume in POD["volumes"] if volume["name"] == "plugin")
    assert "emptyDir" in volume


def test_a_connection_outlives_the_clients_own() -> None:
    """vLLM's 5 s would end it under the request of a load balancer, which keeps it for 60 s (an ALB's)."""
    for variables in (ENGINE_ENV, {name: one.get("value") for name, one in VARIABLES.items()}):
        assert int(variables["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] or 0) > 60


def test_the_init_container_is_locked_down_and_bounded() -> None:
    """As the sidecar is; it needs no volume but the one it fills."""
    assert INSTALL["securityContext"] == sidecar.SIDECAR["securityContext"]
    assert INSTALL["image"] == sidecar.SIDECAR["image"]
    assert INSTALL["resources"]["limits"]["memory"]
    assert set(mounts(INSTALL)) == {"plugin"}


def test_every_mount_has_its_volume() -> None:
    """No mount without a volume, no volume without a mount."""
    assert {volume["name"] for volume in POD["volumes"]} == set(mounts(INSTALL)) | set(mounts(ENGINE))


def test_the_engines_home_is_a_volume() -> None:
    """A user that the cluster chose cannot write to /root, where vLLM's image has its home."""
    assert sidecar.home_is_writable(ENGINE)


def test_settings_name_what_the_engine_can_write_to() -> None:
    """The plugin writes to the registry and to the stage folder from inside the engine's container."""
    for variable, volume in (("LORA_FS_ROOT", "adapters"), ("LORA_FS_STAGE_DIR", "stage")):
        assert VARIABLES[variable]["value"] == mounts(ENGINE)[volume]["mountPath"]
        assert not mounts(ENGINE)[volume].get("readOnly", False)


def test_settings_accept_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's settings are valid as the engine would read them."""
    for name, entry in VARIABLES.items():
        monkeypatch.setenv(name, entry.get("value", "vllm-0"))
    settings = Settings()
    assert f"--model={settings.model}" in ENGINE["args"]
    assert settings.replica_id == "vllm-0"
    assert VARIABLES["LORA_FS_REPLICA_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_vllms_own_load_route_is_not_there() -> None:
    """The engine's port is the clients', and that route takes any path."""
    assert "--enable-lora" in ENGINE["args"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in VARIABLES


def test_clients_and_probes_reach_vllms_port() -> None:
    """One port; `/readyz` is the plugin's, so a pod that does not load it gets no traffic."""
    (port,) = read("service.yaml")["spec"]["ports"]
    (exposed,) = ENGINE["ports"]
    (allowed,) = read("networkpolicy.yaml")["spec"]["ingress"][0]["ports"]
    assert sidecar.check_reached(POD, port["targetPort"]) == exposed["containerPort"] == PORT
    assert sidecar.check_reached(POD, allowed["port"]) == PORT
    assert sidecar.scraped(read("deployment.yaml")) == [PORT]
    assert {"--host=0.0.0.0", f"--port={PORT}"} <= set(ENGINE["args"])
    probes = {name: ENGINE[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {exposed["name"]}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/readyz",
    }
