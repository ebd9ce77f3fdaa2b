#!/usr/bin/env bash
# What can only be tried on a GPU, in under nine minutes, what matters most first. Results go to OUT (default:
# docs/results/gpu), each with date, device and command; what came of all of it to report.json there. In this order:
#
#   tests      the tests marked gpu, six at a time; sanitizer: queues with the order of every access of memory checked
#   messages   two GPUs: memory of communicators, products beside an open receive by number of thread blocks (CTAs)
#   two_gpus   two GPUs: the tests marked multigpu
#   bench      rates of the machine, of every attention back end, too: hardware.json, bench.json
#   training   a billion parameters, 32Ki and 128Ki tokens: times and memory beside what those rates predict
#
#   SPPO_PYTHON  the interpreter with torch for CUDA (default: python3)
#   SPPO_WHEELS  a directory of wheels, for a machine that reaches no package index: they are installed first, without
#                what they depend on, into a directory that goes with the check. Carry what the machine lacks, e.g.
#                pip download --only-binary=:all: --dest wheels triton pydantic numpy pytest rich typer transformers fla-core
#                Nothing else is installed, and the interpreter's own packages stay as they are.
#   SPPO_GPU_CHECK_QUICK  set: fewer points
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${SPPO_PYTHON:-python3}
out=$(realpath -m "${1:-$repository/docs/results/gpu}")
wheels=${SPPO_WHEELS:+$(realpath -m "$SPPO_WHEELS")}
cd "$repository"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -n "$wheels" ]; then
    if ! compgen -G "$wheels/*.whl" >/dev/null; then
        echo "error: SPPO_WHEELS=$SPPO_WHEELS holds no wheel (*.whl): name a directory that does, or leave it out" >&2
        exit 2
    fi
    if ! "$python" -m pip install --quiet --no-index --no-deps --target "$scratch/packages" "$wheels"/*.whl; then
        echo "error: the wheels of SPPO_WHEELS=$SPPO_WHEELS cannot be installed: carry those of this interpreter" >&2
        exit 2
    fi
    export PYTHONPATH="$PYTHONPATH:$scratch/packages"
fi

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
all_s=500
failed=()
steps=()
try() { # NAME MOST_SECONDS COMMAND...
    local name=$1 most=$2 begin=$SECONDS how=done
    shift 2
    [ "$most" -le $((all_s - SECONDS)) ] || most=$((all_s - SECONDS))
    if [ "$most" -lt 15 ]; then
        echo "== $name: left out, the time is over"
        steps+=("$name:left_out:0")
        return 0
    fi
    echo "== $name"
    if timeout "$most" "$@" >"$out/$name.log" 2>&1; then
        echo "   done in $((SECONDS - begin)) s"
    else
        how=failed
        echo "   FAILED after $((SECONDS - begin)) s; the end of $out/$name.log:"
        tail -n 25 "$out/$name.log"
        failed+=("$name")
    fi
    steps+=("$name:$how:$((SECONDS - begin))")
}
runs=$scratch/runs
mkdir "$runs"
try build 40 "$python" -c 'import pathlib, runpy
build = runpy.run_path("sppo/native_build.py")["build_native"]
build(pathlib.Path("sppo/kernels/_native"))'
try tests 200 "$python" -m pytest -q -m gpu -n 6 -p no:cacheprovider
sanitized="bring_back and CudaLane-host-0"
TORCH_CUDA_SANITIZER=1 try sanitizer 60 "$python" -m pytest -q -m gpu -p no:cacheprovider \
    tests/offload/test_cuda_lane.py -k "$sanitized"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "${gpus:-1}" -ge 2 ]; then
    try messages 60 "$python" scripts/gpu_messages.py "$out/messages.json"
    try two_gpus 120 "$python" -m pytest -q -m multigpu -p no:cacheprovider
fi
try bench 150 "$python" -m sppo bench all $quick -o "$out/hardware.json" --json
measured=()
if [ -e "$out/hardware.json" ]; then measured=(--hardware "$out/hardware.json"); fi
try training 300 "$python" scripts/gpu_training.py "$out/training.json" --directory "$runs" \
    --seconds $((all_s - SECONDS - 5)) "${measured[@]}" $quick
if grep -qs '^{' "$out/bench.log"; then sed -n '/^{/,$p' "$out/bench.log" >"$out/bench.json"; fi
"$python" - "$out" "${steps[@]}" <<'PY'
import json
import sys
from pathlib import Path

out, steps = Path(sys.argv[1]), [step.split(":") for step in sys.argv[2:]]
report = dict(line.split(": ", 1) for line in (out / "where.txt").read_text().splitlines())
report["steps"] = {name: {"end": end, "seconds": int(seconds)} for name, end, seconds in steps}
for name in ("training", "hardware", "bench", "messages"):
    path = out / f"{name}.json"
    try:
        report[name] = json.loads(path.read_text())
    except (OSError, ValueError):
        report[name] = None
lines = (out / "tests.log").read_text().splitlines() if (out / "tests.log").exists() else []
report["tests"] = lines[-1] if lines else None
(out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
PY
echo "results: $out"
if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
