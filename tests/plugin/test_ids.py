"""Integer ids of 63 bits fit wherever vLLM keeps them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu import lora_utils
from vllm.v1.worker.gpu.mm import lora as mm_lora

from lora_fs.worker_patch.worker import ids

ID = 9043209018138764901


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's state in 64 bits until the test's end, by two calls."""
    monkeypatch.setattr(lora_utils.LoraState, "__init__", lora_utils.LoraState.__init__)
    monkeypatch.setattr(lora_utils.LoraState, "lora_fs", False, raising=False)
    monkeypatch.setattr(mm_lora, "np", np)
    ids.widen()
    made = lora_utils.LoraState.__init__
    ids.widen()
    assert lora_utils.LoraState.__init__ is made


@pytest.mark.usefixtures("widened")
def test_a_step_of_model_runner_v2() -> None:
    """Its mapping has the record's id for every token."""
    state = lora_utils.LoraState(4)
    request = LoRARequest("support", ID, "/stage/x")
    state.add_request("r", 1, request)
    prompts, tokens, active = state.make_lora_inputs(["r"], np.array([1, 0]), np.array([3, 2]))
    assert (prompts, tokens, active) == ((ID, 0), (ID, ID, ID, 0, 0), {request})


@pytest.mark.usefixtures("widened")
def test_the_connector_of_a_tower() -> None:
    """The ids of its tokens are repeated as they are."""
    mappings: list[Any] = []
    manager = SimpleNamespace(
        supports_tower_connector_lora=lambda: True,
        set_active_adapters=lambda requests, mapping: mappings.append(mapping),
    )
    model = SimpleNamespace(
        get_mm_lora_token_counts=lambda **_: (3, 2),
        get_mm_mapping=lambda: SimpleNamespace(connector=["merger"]),
    )
    place = SimpleNamespace(get_num_embeds=lambda: 2)
    feature = SimpleNamespace(modality="image", data=None, mm_position=place)
    state = lora_utils.LoraState(2)
    state.add_request("r", 1, LoRARequest("support", ID, "/stage/x"))
    cache: Any = SimpleNamespace(mm_features={"r": [feature]})
    mm_lora.set_active_mm_loras(model, manager, cache, {"r": 1}, state, {"r": [0]})
    assert [mapping.index_mapping for mapping in mappings] == [(ID,) * 3, (ID,) * 2]


@pytest.mark.parametrize(
    ("towers", "v2", "room"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_what_has_no_room_is_refused_at_the_start(towers: bool, v2: bool, room: bool) -> None:
    config = SimpleNamespace(
        lora_config=SimpleNamespace(enable_tower_connector_lora=towers), use_v2_model_runner=v2
    )
    if room:
        ids.check_room(config)
    else:
        with pytest.raises(ValueError, match="--enable-tower-connector-lora"):
            ids.check_room(config)
