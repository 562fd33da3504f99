#!/bin/bash
# Make a folder that a machine with a GPU, torch and Triton needs nothing else for but pytest and numpy: kernels, their tests
# and benchmarks, at most 64 MiB. There: FOLDER/run OUT.
#   benchmarks/gpu/pack.sh FOLDER
set -eu
folder=${1:?"usage: $0 FOLDER"}
[ ! -e "$folder" ] || { echo "$folder exists: name a new folder" >&2; exit 1; }
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$folder/lora_fs" "$folder/tests"
folder=$(cd "$folder" && pwd)
cd "$root"
cp -r kernels "$folder/lora_fs/kernels"
cp -r tests/ops "$folder/tests/ops"
cp -r benchmarks "$folder/benchmarks"
find "$folder" -name __pycache__ -prune -exec rm -r {} +
printf '#!/bin/bash\ncd "$(dirname "$0")" || exit 2\nPYTHONPATH=$PWD exec benchmarks/gpu/run.sh "$@"\n' >"$folder/run"
chmod +x "$folder/run"
size=$(du -sk "$folder" | cut -f1)
[ "$size" -le 65536 ] || { echo "$folder takes $size KiB, more than 64 MiB" >&2; exit 1; }
echo "$folder: $size KiB"
