#!/usr/bin/env bash
# A million tokens a sequence on one GPU: measures the machine once, solves, prints the plan, trains.
#
#   bash scripts/train_1m_1gpu.sh [KEY=VALUE...]       the rest replaces values of the run file
#   SPPO_DRY_RUN=1 bash scripts/train_1m_1gpu.sh       plan only, on any machine
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# shellcheck source=scripts/long_run.sh
source "$repository/scripts/long_run.sh"

run=${SPPO_RUN:-$repository/configs/run/llama_1b_1m_1gpu.yaml}
model=${SPPO_MODEL:-}                           # a preset; empty: the run file's
length=${SPPO_LENGTH:-1Mi}                      # tokens of a sequence
steps=${SPPO_STEPS:-100}
tokens=${SPPO_TOKENS:-data/llama3}              # a directory of sppo data prepare
output=${SPPO_OUTPUT:-runs/llama_1b_1m_1gpu}    # checkpoints and metrics; the plan goes beside it
hardware=${SPPO_HARDWARE:-hardware.json}        # of sppo bench; measured if it is not there
preset=${SPPO_PRESET:-}                         # what to plan with until then; empty: the run file's
disk=${SPPO_DISK:-$output.offloaded}                # CPU only: where offloaded activations wait

make_environment
sppo=$venv/bin/sppo
train_long_run "$run" "$@"
