#!/usr/bin/env bash
# SPPO beside transformers on this CPU: step time and peak memory, alternating in one run.
# Arguments go to compare_cpu.py, e.g. --lengths 8192,16384,32768,65536 --steps 3 --output results.json
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment "[dev]"
exec "$venv/bin/python" "$repository/scripts/compare_cpu.py" "$@"
