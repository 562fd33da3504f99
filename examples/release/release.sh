#!/bin/sh
# Release a revision: register it beside what serves, compare both, try it on some users, let it serve the name.
#
#   URL=http://gateway:8001 ./release.sh support v2
#
# The first step that fails ends it, with that step's exit code; the name then serves what it served before.
set -eu
name=$1 revision=$2

lora-fs apply -f adapters.yaml --wait 60
lora-fs evaluate "$name@$revision" --data cases.jsonl --url "$URL" \
    --gate "${GATE:-pass_rate>=0.9 and p_worse>=0.001}"
lora-fs canary "$name" "$revision" --steps "${STEPS:-5,25,100}" --every "${EVERY:-10m}" \
    --gate "${LIVE_GATE:-live_error_rate<=0.01}"
