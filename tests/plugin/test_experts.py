"""Adapters of experts, in both of their layouts: every slot's weights are what PEFT computes with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.request import LoRARequest

from lora_fs.worker_patch.worker.load.resident import size_bytes
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from tests.plugin.block import SLOTS, WORDS, Make, Model
from tests.plugin.test_room import worker

pytestmark = pytest.mark.since("0.32", "the layers of experts are made otherwise")

EXPERTS, HIDDEN, INNER, RANK, ID = 4, 16, 24, 2, 7
NAME = "model.layers.0.mlp.experts"
OLD_NAME = "model.layers.0.block_sparse_moe.experts"  # vLLM's, and transformers' before it was version 5
LISTED = ("gate_proj", "down_proj", "up_proj")  # in the order of vLLM's packing
LORA = LoRAConfig(max_lora_rank=8, max_loras=SLOTS, lora_dtype=torch.float32)

Deltas = dict[str, torch.Tensor]  # of gate, up and down: [experts, out, in]


def fused(folder: Path) -> Deltas:
    """An adapter of a Mixtral, whose experts are one parameter, as PEFT saves it."""
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        vocab_size=WORDS,
    )
    lora = LoraConfig(
        r=RANK,
        lora_alpha=3 * RANK,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    model = get_peft_model(MixtralForCausalLM(config), lora)
    model.save_pretrained(folder)
    found = {
        module.parameter_name: module.get_delta_weight("default").detach()
        for module in model.modules()
        if hasattr(module, "parameter_name")
    }
    gate, up = found["gate_up_proj"].chunk(2, dim=1)
    return {"gate_proj": gate, "up_proj": up, "down_proj": found["down_proj"]}


class Expert(nn.Module):  # type: ignore[misc]
    """One of a list, as models had them before transformers 5."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)


def listed(folder: Path) -> Deltas:
    """An adapter of a model whose experts are layers each."""
    tree = nn.Module()
    tree.model = nn.Module()
    layer = nn.Module()
    layer.mlp = nn.Module()
    layer.mlp.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
    tree.model.layers = nn.ModuleList([layer])
    lora = LoraConfig(
        r=RANK, lora_alpha=3 * RANK, use_rslora=True, target_modules=list(LISTED), init_lora_weights=False
    )
    model = get_peft_model(tree, lora)
    model.save_pretrained(folder)
    experts = model.base_model.model.model.layers[0].mlp.experts
    return {
        name: torch.stack([getattr(expert, name).get_delta_weight("default").detach() for expert in experts])
        for name in LISTED
    }


def stacks(kind: type[FusedMoEWithLoRA]) -> Any:
    """vLLM's layer of experts with its stacks, without the base model's kernels, which no CPU has."""
    layer: Any = object.__new__(kind)
    nn.Module.__init__(layer)
    parallel = SimpleNamespace(ep_rank=0, use_ep=False)
    layer.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        intermediate_size_per_partition=INNER,
        num_local_experts=EXPERTS,
        num_experts=EXPERTS,
        moe_parallel_config=parallel,
    )
    layer.tp_size, layer.tp_rank, layer.device = 1, 0, torch.device("cpu")
    layer.enable_moe_shared_loras = False
    layer._w13_slices = 1 if kind is FusedMoE3DWithLoRA else 2
    model: Any = SimpleNamespace(architectures=["MixtralForCausalLM"])
    layer.create_lora_weights(SLOTS, LORA, model)
    return layer


def deltas(layer: Any, slot: int) -> Deltas:
    """What the slot's weights come to."""
    of_w13 = [
        b[slot] @ a[slot] for a, b in zip(layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, strict=True)
    ]
    gate, up = of_w13 if len(of_w13) == 2 else of_w13[0].chunk(2, dim=1)
    down = layer.w2_lora_b_stacked[0][slot] @ layer.w2_lora_a_stacked[0][slot]
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


def serving(make: Make, layer: Any, *, mixed: bool, name: str = NAME) -> TieredWorkerManager:
    """A worker whose model has that layer; ``mixed``: with ``--enable-mixed-moe-lora-format``."""
    found = worker(make, 1 << 20)
    manager: Any = found._adapter_manager
    manager.modules[name] = layer
    manager.packed_modules[name] = [f"{name}.{n}.{part}" for n in range(EXPERTS) for part in LISTED]
    manager.supported_lora_modules = [*manager.supported_lora_modules, "experts"]
    manager.packed_modules_mapping = {
        **Model.packed_modules_mapping,
        "experts": [f"experts.{n}.{part}" for n in range(EXPERTS) for part in LISTED],
    }
    manager._enable_mixed_moe_lora_format = mixed
    manager._is_3d_moe_model = isinstance(layer, FusedMoE3DWithLoRA)
    manager.model.config = SimpleNamespace(architectures=["MixtralForCausalLM"])
    if manager._is_3d_moe_model:
        del manager.packed_modules[name]
    return found


@pytest.mark.parametrize(
    ("made", "kind", "mixed", "name"),
    [
        (listed, FusedMoEWithLoRA, False, NAME),
        (listed, FusedMoEWithLoRA, True, NAME),
        (fused, FusedMoE3DWithLoRA, False, NAME),
        (fused, FusedMoEWithLoRA, True, NAME),
        (fused, FusedMoE3DWithLoRA, False, OLD_NAME),
        (fused, FusedMoEWithLoRA, True, OLD_NAME),
    ],
)
def test_experts_are_pefts(make: Make, tmp_path: Path, made: Any, kind: Any, mixed: bool, name: str) -> None:
    """Nobody has to say which layout an adapter has, nor whose name its experts: its files do."""
    wanted = made(tmp_path)
    layer = stacks(kind)
    manager = serving(make, layer, mixed=mixed, name=name)
    resident = manager._prepare(LoRARequest("experts", ID, str(tmp_path)), passing=True)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "its files may change, or go"
    manager._adapter_manager.admit(resident, size_bytes(resident))
    manager._adapter_manager.activate_adapter(ID)
    found = deltas(layer, manager.tiers.slots.index(ID))
    for name, delta in wanted.items():
        assert delta.abs().max() > 0
        torch.testing.assert_close(found[name], delta, atol=1e-5, rtol=1e-5)


def test_fused_experts_where_the_engine_takes_none(make: Make, tmp_path: Path) -> None:
    """The load is refused, and says with which option the engine takes them."""
    fused(tmp_path)
    manager = serving(make, stacks(FusedMoEWithLoRA), mixed=False)
    with pytest.raises(ValueError, match="--enable-mixed-moe-lora-format"):
        manager._prepare(LoRARequest("experts", ID, str(tmp_path)))
