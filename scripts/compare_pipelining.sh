#!/usr/bin/env bash
# SPPO beside torch.distributed.pipelining on this CPU: two pipeline ranks each, alternating in one run.
# Arguments go to compare_pipelining.py, e.g. --length 32768 --subsequences 8 --sequences 1,2,4 --steps 1
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment "[dev]"
exec "$venv/bin/python" "$repository/scripts/compare_pipelining.py" "$@"
