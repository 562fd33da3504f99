#!/bin/bash
# Make a folder that a machine with a GPU, torch and Triton needs nothing else for but pytest and numpy: kernels, their tests
# and benchmarks, at most 64 MiB. There: FOLDER/run OUT. SGLang is compared if its wheel is given, and the machine has
# pydantic and msgspec; vLLM if its Python is on the machine's PYTHONPATH.
#   benchmarks/gpu/pack.sh FOLDER [SGLANG_WHEEL]
set -eu
folder=${1:?"usage: $0 FOLDER [SGLANG_WHEEL]"}
[ ! -e "$folder" ] || { echo "$folder exists: name a new folder" >&2; exit 1; }
wheel=${2:+$(realpath "$2")}
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$folder/lora_fs" "$folder/tests"
folder=$(cd "$folder" && pwd)
cd "$root"
cp -r kernels "$folder/lora_fs/kernels"
cp -r tests/ops "$folder/tests/ops"
cp -r benchmarks "$folder/benchmarks"
git describe --always --dirty 2>/dev/null >"$folder/benchmarks/COMMIT" || echo unknown >"$folder/benchmarks/COMMIT"
find "$folder" -name __pycache__ -prune -exec rm -r {} +
[ -z "$wheel" ] || "${PYTHON:-python3}" benchmarks/gpu/pack_peers.py "$folder/peers" "$wheel"
cat >"$folder/run" <<'END'
#!/bin/bash
here=$(cd "$(dirname "$0")" && pwd) || exit 2
PYTHONPATH=$here:$here/peers${PYTHONPATH:+:$PYTHONPATH} exec "$here/benchmarks/gpu/run.sh" "$@"
END
chmod +x "$folder/run"
size=$(du -sk "$folder" | cut -f1)
[ "$size" -le 65536 ] || { echo "$folder takes $size KiB, more than 64 MiB" >&2; exit 1; }
echo "$folder: $size KiB"
