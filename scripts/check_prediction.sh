#!/usr/bin/env bash
# How well steps are predicted on this machine: measures it, predicts, trains a few steps, compares.
# Arguments go to check_prediction.py, e.g. prediction --steps 9 --output prediction.json
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment "[dev]"
exec "$venv/bin/python" "$repository/scripts/check_prediction.py" "$@"
