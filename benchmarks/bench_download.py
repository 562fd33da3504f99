"""500 MB from an S3 on loopback: lora-fs to the end, beside fsspec and the AWS CLI, which fetch alone.

moto serves an adapter of 500 MB. In turns, in an order drawn anew, each in a process of its own: ``lora-fs
register`` (fetch, hash, validate, sync, place, record), s3fs as it comes and with one connection, and the
AWS CLI where ``--aws`` names it. Every copy is compared with what was uploaded before a time is told. Goal:
at least 80 % of the rate of the better of s3fs as it comes and the AWS CLI. moto reads a whole object for
each range that is asked of it, so who asks for many parts pays for that here, as on no real S3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent))

from figures import heading, interval

SIZE_BYTES = 500_000_000
RANK, MODULE = 4096, "base_model.model.model.layers.0.self_attn.q_proj"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
S3FS = "import s3fs; s3fs.S3FileSystem({}).get('bench/large/', {!r}, recursive=True)"


def make(folder: Path) -> str:
    """Write an adapter of SIZE_BYTES; returns the SHA-256 of its weights."""
    columns = SIZE_BYTES // 4 // 2 // RANK
    numbers = np.random.default_rng(0)
    tensors = {
        f"{MODULE}.lora_A.weight": numbers.random((RANK, columns), dtype=np.float32) + 0.1,
        f"{MODULE}.lora_B.weight": numbers.random((columns, RANK), dtype=np.float32) + 0.1,
    }
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": "tiny"}))
    return sha256_of(folder / WEIGHTS)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commands(folder: Path, aws: str | None) -> dict[str, list[str]]:
    """What is timed, by name; each leaves the weights somewhere under ``folder``."""
    lora_fs = str(Path(sys.executable).with_name("lora-fs"))
    target = str(folder / "copy")
    found = {
        "lora-fs": [
            lora_fs,
            "--root",
            str(folder),
            "--model",
            "tiny",
            "register",
            "large",
            "s3://bench/large",
            "--create",
        ],
        "s3fs": [sys.executable, "-c", S3FS.format("", target)],
        "s3fs, one connection": [sys.executable, "-c", S3FS.format("max_concurrency=1", target)],
    }
    if aws is not None:
        found["AWS CLI"] = [aws, "s3", "cp", "--quiet", "--recursive", "s3://bench/large", target]
    return found


def timed(name: str, folder: Path, aws: str | None, digest: str) -> float:
    """Seconds that a command takes; raises unless it left the right bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    command = commands(folder, aws)[name]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    took = time.perf_counter() - started
    (weights,) = folder.rglob(WEIGHTS)
    if sha256_of(weights) != digest:
        raise SystemExit(f"{name} left other bytes")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--aws", help="the AWS CLI's command")
    parser.add_argument("--dir", type=Path, help="where to copy to [a temporary folder]")
    given = parser.parse_args()
    title = f"500 MB from S3 on loopback, {given.rounds} rounds"
    heading(title, ("lora-fs", "s3fs", "aiobotocore", "moto", "boto3"))
    with tempfile.TemporaryDirectory(dir=given.dir) as place:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "5577"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            measure(Path(place), given.rounds, given.aws)
        finally:
            server.terminate()
            server.wait()


def measure(place: Path, rounds: int, aws: str | None) -> None:
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:5577",
    }
    digest = make(place / "made")
    client = wait_for_s3()
    for path in (place / "made").iterdir():
        client.put_object(Bucket="bench", Key=f"large/{path.name}", Body=path.open("rb"))
    taken: dict[str, list[float]] = {name: [] for name in commands(place, aws)}
    for _ in range(rounds):
        for name in random.sample(list(taken), len(taken)):
            taken[name].append(timed(name, place / "run", aws, digest))
            print(f"  {name:<22} {taken[name][-1]:6.2f} s", flush=True)
    rates = {name: [SIZE_BYTES / 1e6 / took for took in times] for name, times in taken.items()}
    print(f"\n{'':<22} median s   median MB/s   spread MB/s")
    for name, times in taken.items():
        low, high = min(rates[name]), max(rates[name])
        print(
            f"{name:<22} {statistics.median(times):8.2f}   {statistics.median(rates[name]):11.0f}   "
            f"{low:.0f} to {high:.0f}"
        )
    for peer in rates.keys() - {"lora-fs"}:
        ratios = [a / b for a, b in zip(rates["lora-fs"], rates[peer], strict=True)]
        low, high = interval(ratios)
        print(f"lora-fs / {peer}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")


def wait_for_s3() -> Any:
    client = boto3.client("s3")
    for _ in range(100):
        try:
            client.create_bucket(Bucket="bench")
            return client
        except Exception:
            time.sleep(0.2)
    raise SystemExit("moto does not answer")


if __name__ == "__main__":
    main()
