#!/bin/bash
# Kernel tests, three frozen networks and a short run on emulated ARM cores: `make test-arm`.
#
#     test.sh WORKDIR [CPU ...]     # cortex-a72 (Pi 4) and neoverse-n2 unless others are named
#
# WORKDIR holds the emulator that recipe.sh makes, 5.5 GB. Timings say nothing about a real device.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$(mkdir -p "$1" && cd "$1" && pwd)
shift
bash "$here/recipe.sh" "$work"
cd "$root"
PYTHONPATH=src .venv/bin/python tools/arm/networks.py save "$work/x86.safetensors"
export PYTHONPATH=$root/src:$root
[ $# -gt 0 ] || set -- cortex-a72 neoverse-n2
for core in "$@"; do
    echo "== $core"
    export ARM_CPU=$core
    "$work/arm-python" -m pytest -q -p no:cacheprovider tests/freeze/test_kernels.py
    for without in "" legacy; do # the second time as PyTorch will be without quantized tensors
        export COCOFL_WITHOUT=$without COCOFL_CACHE=$work/cache-$core-$without
        "$work/arm-python" tools/arm/networks.py check "$work/x86.safetensors"
        rm -rf "$work/run"
        "$work/arm-python" -c 'from cocofl.cli import main; main()' run --out "$work/run" \
            --no-report --set rounds=1 --set devices.count=4 --set devices.per_round=2 \
            --set engine.workers=1
        test -s "$work/run/model.safetensors"
    done
    unset COCOFL_WITHOUT
done
