#!/usr/bin/env bash
# One step with multiplexed sequence partitioning and without, in turns: see compare_msp.py for arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment
exec "$venv/bin/python" "$repository/scripts/compare_msp.py" "$@"
