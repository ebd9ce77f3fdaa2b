#!/usr/bin/env bash
# What can only be tried on a GPU, in under nine minutes: the tests marked gpu, then the benchmarks.
# Their results go to OUT (default: docs/results/gpu), each with date, device and command.
#
#   SPPO_PYTHON  the interpreter with torch for CUDA (default: python3); nothing is installed
#   SPPO_GPU_CHECK_QUICK  set: fewer points
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${SPPO_PYTHON:-python3}
out=$(realpath -m "${1:-$repository/docs/results/gpu}")
cd "$repository"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"

if ! device=$("$python" -c '
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("this torch sees no CUDA device")
print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
'); then
    echo "error: gpu_check.sh needs a CUDA device and a torch built for it (set SPPO_PYTHON)" >&2
    exit 2
fi
mkdir -p "$out"
{
    echo "date: $(date -u +%Y-%m-%d)"
    echo "device: $device"
    echo "commit: $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    echo "command: bash scripts/gpu_check.sh"
} | tee "$out/where.txt"

quick=${SPPO_GPU_CHECK_QUICK:+--quick}

# Everything is tried, whatever fails first: time on a GPU is rare.
failed=()
try() { # NAME COMMAND...
    local name=$1 begin=$SECONDS
    shift
    echo "== $name"
    if "$@" >"$out/$name.log" 2>&1; then
        echo "   done in $((SECONDS - begin)) s"
    else
        echo "   FAILED after $((SECONDS - begin)) s; the end of $out/$name.log:"
        tail -n 25 "$out/$name.log"
        failed+=("$name")
    fi
}
try build timeout 60 "$python" -c 'import pathlib, runpy
build = runpy.run_path("csrc/build_native.py")["build_native"]
build(pathlib.Path("sppo/kernels/_native"))'
try tests timeout 180 "$python" -m pytest -q -m gpu -p no:cacheprovider
try bench timeout 150 "$python" -c 'from sppo.cli.app import main; main()' bench all $quick \
    -o "$out/hardware.json"
try pcie timeout 60 "$python" -c 'from sppo.cli.app import main; main()' bench pcie $quick --json
try overlap timeout 60 "$python" -c 'from sppo.cli.app import main; main()' bench overlap $quick --json
for name in pcie overlap; do
    grep -q '^{' "$out/$name.log" && sed -n '/^{/,$p' "$out/$name.log" >"$out/$name.json"
done
echo "results: $out"
if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
