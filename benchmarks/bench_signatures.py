"""What verifying a signature adds to a registration: the same adapter, with a trust file and without one.

In turns, into registries of their own. The bytes are read once either way.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from figures import arguments, heading
from numpy import float32, random
from safetensors.numpy import save_file

from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.lifecycle import artifacts, ingest
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.trust import BUNDLE, Trust
from lora_fs.sidecar.trust.sign import sign
from lora_fs.sidecar.validate import Expectation

MIB = 1 << 20


def enlarge(folder: Path, mib: int) -> None:
    """Fill the adapter's weights up to a size, as one of a large rank has them."""
    rows, rank = mib * MIB // (2 * 4 * 64), 64
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    numbers = random.default_rng(0)
    tensors = {
        f"{module}.lora_A.weight": numbers.random((rank, rows), dtype=float32) + 0.1,
        f"{module}.lora_B.weight": numbers.random((rows, rank), dtype=float32) + 0.1,
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = folder / "adapter_config.json"
    config.write_text(
        '{"peft_type": "LORA", "r": 64, "lora_alpha": 8, "target_modules": ["q_proj"],'
        ' "base_model_name_or_path": "tiny"}'
    )


def main() -> None:
    options = arguments(__doc__ or "", mib=500, rounds=5)
    heading("Signatures", ("lora-fs", "cryptography"))
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        adapter = make_adapter(ensure_model(work / "tiny"), work / "adapter", 0)
        enlarge(adapter, options.mib)
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (work / "ops.pub").write_bytes(public)
        (work / "trust.yaml").write_text("signers: [{name: ops, key: ops.pub}]\n")
        (adapter / BUNDLE).write_bytes(sign(adapter, pem))
        taken: dict[str, list[float]] = {"without a trust file": [], "with a trust file": []}
        for number in range(options.rounds + 1):
            for name, trust in zip(taken, (None, Trust(work / "trust.yaml")), strict=True):
                registry = Registry(work / f"registry-{number}-{trust is None}", create=True)
                wanted = ingest.Registration("a", adapter, adapter.as_uri())
                began = time.perf_counter()
                ingest.register(
                    registry, Scope("default", "tiny"), wanted, Expectation(trust=trust), writer="b"
                )
                if number:
                    taken[name].append(time.perf_counter() - began)
                registry.close()
                for file in registry.layout.root.rglob("*.safetensors"):
                    file.unlink()
        for name, times in taken.items():
            print(f"{name:<22} median {statistics.median(times):.3f} s, least {min(times):.3f} s")
        files = artifacts.hash_files(adapter, artifacts.SERVED)
        trust, raw = Trust(work / "trust.yaml"), (adapter / BUNDLE).read_bytes()
        began = time.perf_counter()
        for _ in range(100):
            trust.check("default", files, raw)
        print(f"one check {10 * (time.perf_counter() - began):.2f} ms")


if __name__ == "__main__":
    main()
