#!/bin/bash
# What there is to learn of the kernels on a GPU, in eight minutes at most: the tests, then the rows that have targets
# with metadata and transfers. Each part has its own limit, and what one leaves is kept if the next fails. No network.
#   benchmarks/gpu/run.sh OUT              on a machine with a GPU
#   benchmarks/gpu/run.sh --rehearse OUT   without one: the same parts, interpreted at small sizes, and predictions
# OUT gets a log of each part, rows.json, rows.svg, and parts.tsv: part, exit status (124: over its limit), seconds.
set -u
rehearse=
if [ "${1:-}" = --rehearse ]; then rehearse=1; shift; fi
out=${1:?"usage: $0 [--rehearse] OUT"}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
failed=0
: >"$out/parts.tsv"

part() { # name, limit in seconds, command
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  printf '%s\t%s\t%s\n' "$name" "$status" $((SECONDS - began)) | tee -a "$out/parts.tsv"
  [ $status = 0 ] || failed=1
}

if [ $rehearse ]; then
  export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
  part tests 300 "$python" -m pytest -q -p no:cacheprovider tests/ops/gpu/test_landing.py
  part rows 120 "$python" benchmarks/kernels/bench_gpu_ops.py --predict
else
  # They compile hundreds of kernels: half a minute in eight processes, where pytest-xdist is there.
  workers=$("$python" -c 'import os, xdist; print("-n", min(8, os.cpu_count()))' 2>/dev/null)
  part tests 120 "$python" -m pytest -q -p no:cacheprovider $workers tests/ops/gpu
  part rows 330 "$python" benchmarks/kernels/bench_gpu_ops.py --quick --seconds 300 \
    --json "$out/rows.json" --plot "$out/rows.svg"
fi
exit $failed
