#!/usr/bin/env bash
# From nothing to a trained model: installs SPPO into a virtual environment, prepares the source of
# Python's standard library as training text, trains a byte-level model on 16Ki-token sequences cut into
# eight subsequences, evaluates it on held-out files, and says where the plots are.
#
#   bash scripts/quickstart.sh [DIR [KEY=VALUE...]]
#
# DIR is where data and results go (default: quickstart); the rest replaces values of the run file.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
target=${1:-quickstart}
overrides=(data.eval_tokens=data/held_out)
run=$repository/configs/run/tiny_cpu.yaml

make_environment
sppo="$venv/bin/sppo"
if "$venv/bin/python" -c 'import sys, torch; from sppo.kernels.half_products import needs_casts
sys.exit(not needs_casts(torch.empty(1, dtype=torch.bfloat16)))'; then
    echo "this processor has no bf16 arithmetic (AVX-512): training in fp32, which is several times as fast here"
    overrides+=(train.dtype=fp32)
fi
overrides+=("${@:2}")
mkdir -p "$target"
cd "$target"

# Text that every machine with Python has: packages to learn from, others held out.
stdlib=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
learn=(asyncio collections concurrent ctypes distutils email html http idlelib importlib
    json lib2to3 logging multiprocessing tkinter unittest urllib wsgiref xml xmlrpc)
held_out=(argparse.py ast.py calendar.py datetime.py dis.py enum.py inspect.py pathlib.py typing.py)
existing() { for name in "$@"; do [ -e "$stdlib/$name" ] && echo "$stdlib/$name"; done; }
mapfile -t learn_paths < <(existing "${learn[@]}")
mapfile -t held_out_paths < <(existing "${held_out[@]}")
"$sppo" data prepare --tokenizer bytes --glob '*.py' --out data/stdlib "${learn_paths[@]}"
"$sppo" data prepare --tokenizer bytes --glob '*.py' --out data/held_out "${held_out_paths[@]}"

"$sppo" train "$run" "${overrides[@]}"
"$sppo" eval "$run" "${overrides[@]}" --sequences 2 --png loss_by_position.png

echo
echo "loss plot          $PWD/runs/tiny_cpu/loss.png"
echo "loss by position   $PWD/loss_by_position.png"
echo "summary            $PWD/runs/tiny_cpu/run_summary.json"
echo "next               docs/tutorials/laptop.md, $sppo --help"
