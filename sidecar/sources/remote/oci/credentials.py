"""The password of a registry, from files that the settings name. It starts no helper program.

It reads the netrc file first, then docker's ``config.json``, which podman, skopeo and a Secret of the type
``kubernetes.io/dockerconfigjson`` share.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.sources.remote.oci.reference import DOCKER_HUB
from lora_fs.sidecar.sources.remote.passwords import of_netrc

_HUB = "https://index.docker.io/v1/"  # what docker calls Docker Hub in its file


def basic(place: str, repository: str, options: Options) -> str | None:
    """The ``Authorization`` header for a registry; None if no file has a password for it.

    Raises:
        InputError: a file cannot be read.
    """
    found = of_netrc(place, options.netrc_file) or _of_docker(place, repository, options.registry_auth_file)
    return f"Basic {base64.b64encode(found.encode()).decode()}" if found else None


def _of_docker(place: str, repository: str, path: Path | None) -> str | None:
    """``user:password``: of the repository, else of a part of its path, else of the registry."""
    if path is None:
        return None
    try:
        auths = json.loads(path.read_bytes()).get("auths") or {}
        places = DOCKER_HUB if place in DOCKER_HUB else (place,)
        parts = repository.split("/")
        keys = ["/".join((one, *parts[:upto])) for upto in range(len(parts), -1, -1) for one in places]
        keys += [f"https://{place}", f"https://{place}/v2/", *([_HUB] if place in DOCKER_HUB else [])]
        entry = next((auths[key] for key in keys if key in auths), None)
        if entry is None:
            return None
        text: str = base64.b64decode(entry["auth"], validate=True).decode() if entry.get("auth") else ""
        text = text or f"{entry.get('username', '')}:{entry.get('password', '')}"
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(
            f"the registry auth file {path} cannot be read as docker's config.json ({type(error).__name__})"
        ) from error
    return text.rstrip("\0") if text.strip(":") else None
