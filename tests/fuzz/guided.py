"""Coverage-guided fuzzing of one reader in its own process: ``guided.py READER SECONDS FINDINGS [SEED]``.

libFuzzer, by atheris, ends the process at the first finding and leaves the input under FINDINGS: an
exception that the reader does not declare, an input that takes longer than ONE_INPUT_S each time, or
memory beyond RSS_MB. Copied into ``corpus/<reader>/`` it is a test from then on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
ONE_INPUT_S = 5
TRIES = 3  # a busy machine leaves a process without a processor once, not each time
RSS_MB = 768
MAX_BYTES = 16_384

sys.path.append(str(ROOT))  # behind everything: the folder `kernels` must not stand in for another
with atheris.instrument_imports(include=["lora_fs.sidecar", "tarfile", "filelock", "email"]):
    from tests.fuzz.readers import HERE, READERS


def main(name: str, seconds: str, findings: str, seed: str = "1") -> None:
    """Fuzz until SECONDS are over or something is found; libFuzzer prints what it covers."""
    reader = READERS[name]
    work = Path(findings)
    corpus = work / f"{name}-corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(reader.seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    words = work / f"{name}.dict"
    quoted = ("".join(f"\\x{byte:02x}" for byte in word.encode(errors="replace")) for word in reader.words)
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    arguments = [
        f"-max_total_time={seconds}",
        f"-timeout={TRIES * ONE_INPUT_S + ONE_INPUT_S}",  # of one that does not end
        f"-rss_limit_mb={RSS_MB}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={work}/{name}-",
        f"-seed={seed}",
        *([f"-dict={words}"] if reader.words else []),
        "-print_final_stats=1",
        str(corpus),
    ]
    kept = HERE / "corpus" / name

    def run(data: bytes) -> None:
        for _ in range(TRIES):
            began = time.monotonic()
            reader.run(data)
            if time.monotonic() - began <= ONE_INPUT_S:
                return
        raise TimeoutError(f"took longer than {ONE_INPUT_S} s, {TRIES} times")

    atheris.Setup([sys.argv[0], *arguments, *([str(kept)] if kept.is_dir() else [])], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
