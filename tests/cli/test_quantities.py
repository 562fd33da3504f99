"""Durations and sizes have one grammar, on the command line and in the environment."""

from __future__ import annotations

import httpx
import pytest
from pydantic import ValidationError

from lora_fs.sidecar.quantities import bytes_of, seconds_of
from lora_fs.sidecar.server.connection import configured
from lora_fs.sidecar.settings import load_settings, refusal


@pytest.mark.parametrize(
    ("variable", "value", "means"),
    [
        ("LORA_FS_STAGE_MAX_BYTES", "4Gi", 4 << 30),
        ("LORA_FS_HOST_BYTES", "500M", 500_000_000),
        ("LORA_FS_FETCH_TIMEOUT_S", "2h", 7200.0),
        ("LORA_FS_DEFAULT_TTL_S", "15m", 900),
        ("NIM_PEFT_REFRESH_INTERVAL", "30", 30.0),
    ],
)
def test_a_variable_takes_a_unit(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, means: float
) -> None:
    """As an option does: one ConfigMap serves the sidecar, which has the option, and the plugin."""
    monkeypatch.setenv(variable, value)
    settings = load_settings()
    assert means in (getattr(settings, name) for name in type(settings).model_fields)


@pytest.mark.parametrize("value", ["4Qi", "-1", "1e9", "4 Gi", "inf", "１"])
def test_what_is_no_quantity(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It is refused, with the variable and what to write."""
    monkeypatch.setenv("LORA_FS_STAGE_MAX_BYTES", value)
    with pytest.raises(ValidationError) as caught:
        load_settings()
    assert refusal(caught.value).startswith("LORA_FS_STAGE_MAX_BYTES=")
    assert "write 1000, 500M, 5GB or 50Gi" in refusal(caught.value)
    for parse in (bytes_of, seconds_of):
        with pytest.raises(ValueError, match="write"):
            parse(value)


def test_a_connection_outlives_the_clients_own() -> None:
    """Where both give up after the same time, a client now and then sends on a closed connection."""
    kept = httpx.Limits().keepalive_expiry
    assert kept is not None
    assert configured(None).timeout_keep_alive > kept
    assert configured(None).timeout_keep_alive > 60  # an ALB's
