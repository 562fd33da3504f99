"""Every JSON and YAML block of every page is valid: by the schema it names, for Kubernetes, for the chart."""

from __future__ import annotations

import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from lora_fs import schemas
from lora_fs.sidecar.trust.trust_file import TrustFile
from tests.deploy.test_helm import helm
from tests.docs.blocks import ROOT, Block, told


def strict(**properties: Any) -> dict[str, Any]:
    """The schema of an object with these keys and no other; a list stands for one of its items."""
    shapes = {
        key: {"type": "array", "items": shape[0]} if isinstance(shape, list) else shape
        for key, shape in properties.items()
    }
    return {"type": "object", "properties": shapes, "additionalProperties": False}


LOG_LINE = ("time", "level", "logger", "event", "message")


def is_logged(line: dict[str, Any]) -> None:
    """The module that it names logs this event, with these fields."""
    code = (ROOT / f"{line['logger'].removeprefix('lora_fs.').replace('.', '/')}.py").read_text()
    (fields,) = re.findall(rf'event\(\s*"{re.escape(line["event"])}",?([^()]*(?:\([^()]*\)[^()]*)*)\)', code)
    assert line.keys() - set(LOG_LINE) <= set(re.findall(r"(\w+)=", fields)), line


@pytest.mark.parametrize("block", told("json"))
def test_json_is_what_its_schema_says(block: Block) -> None:
    """Each block names the schema that it is an example of, and fits it; a line of the log is one."""
    if set(LOG_LINE) <= json.loads(block.text).keys():
        is_logged(json.loads(block.text))
        return
    assert block.mark, f"{block}: <!-- schema: NAME --> has to stand above it"
    assert block.mark.startswith("schema: ")
    Draft202012Validator(schemas.load(block.mark.removeprefix("schema: "))).validate(json.loads(block.text))


# Of Prometheus's configuration what the pages use: a misspelt key is refused there, too.
RELABEL = {"source_labels", "regex", "action", "target_label", "replacement"}
SCRAPE = strict(
    scrape_configs=[
        strict(
            job_name={"type": "string"},
            kubernetes_sd_configs=[strict(role={"enum": ["pod", "service", "endpoints", "node"]})],
            relabel_configs=[strict(**{key: {} for key in RELABEL})],
        )
    ]
)
CONTAINER: dict[str, Any] = {"name": "c", "image": "i"}


def manifest(document: dict[str, Any]) -> dict[str, Any] | None:
    """The Kubernetes object that a fragment is a part of: a whole one, a pod's spec, or a container."""
    if {"apiVersion", "kind"} <= document.keys():
        return document
    if document.keys() <= {"initContainers", "containers", "volumes", "securityContext"} and (
        document.keys() & {"initContainers", "containers", "volumes"}
    ):
        whole = {key: [{**CONTAINER, **one} for one in document.get(key, [])] for key in ("initContainers",)}
        pod = {**document, **whole, "containers": document.get("containers") or [CONTAINER]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": with_images(pod)}
    if document.keys() <= {"args", "command", "env", "volumeMounts", "securityContext", "resources", "ports"}:
        pod = {"containers": [{**CONTAINER, **document}]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}
    return None


def with_images(pod: dict[str, Any]) -> dict[str, Any]:
    """The page may leave a container's image out."""
    return {**pod, "containers": [{**CONTAINER, **one} for one in pod["containers"]]}


def values_fit(mark: str, document: dict[str, Any]) -> None:
    """Helm renders the chart with these values, ``<!-- values: examples/helm/lora-fs -->``."""
    done = helm("template", "vllm", ROOT / mark.removeprefix("values: "), given=document)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", told("yaml"))
def test_yaml_is_what_it_is_shown_for(block: Block) -> None:
    """A Kubernetes object, or a part of one, fits the API; Helm values fit the chart; a quotation is one."""
    for document in yaml.safe_load_all(block.text):
        if block.mark and block.mark.startswith("values: "):
            values_fit(block.mark, document)
        elif block.mark and block.mark.startswith("from: "):
            assert block.text.strip() in (ROOT / block.mark.removeprefix("from: ")).read_text(), str(block)
        elif isinstance(document, dict) and document.keys() == {"scrape_configs"}:
            Draft202012Validator(SCRAPE).validate(document)
        elif isinstance(document, dict) and document.get("kind") == "LoraAdapter":
            Draft202012Validator(schemas.load("lora-adapter")).validate(document)
        elif isinstance(document, dict) and "signers" in document:
            TrustFile.model_validate(document)
        else:
            assert isinstance(document, dict)
            whole = manifest(document)
            assert whole is not None, f"{block}: neither an object of Kubernetes nor marked as anything else"
            kubernetes_validate.validate(whole, "1.33", strict=True)


@pytest.mark.parametrize(
    "values", [{"arbitraryUser": "yes"}, {"sidecar": {"adminPort": 8001}}, {"replica": 3}]
)
def test_values_that_the_chart_refuses_fail(values: dict[str, Any]) -> None:
    """A wrong type, one that does not go with others, and a misspelt key."""
    with pytest.raises(AssertionError, match=next(iter(values))):
        values_fit("values: examples/helm/lora-fs", values)


def test_a_misspelt_fragment_fails() -> None:
    """The strictness of the API's schemas reaches fragments."""
    whole = manifest({"args": [], "securityContext": {"runAsNonRot": True}})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(whole, "1.33", strict=True)
