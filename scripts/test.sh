#!/usr/bin/env bash
# Installs SPPO with its development tools and runs lint, types, layer contracts and tests.
# Needs no GPU and, once installed, no network. Arguments go to pytest: bash scripts/test.sh -k config
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment "[dev]"
cd "$repository"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"

echo "== ruff" && "$venv/bin/ruff" check . && "$venv/bin/ruff" format --check .
echo "== mypy" && "$venv/bin/mypy"
echo "== pytest" && "$venv/bin/python" -m pytest "$@"
