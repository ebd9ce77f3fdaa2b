#!/usr/bin/env bash
# A million tokens a sequence on the nodes of a SLURM job: solves for as many as there are, prints the plan, trains.
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/train_1m_slurm.sh [KEY=VALUE...]      from the top of the repository
#   SPPO_DRY_RUN=1 SPPO_NODES=4 bash scripts/train_1m_slurm.sh                       plan only, on any machine
#
#SBATCH --job-name=sppo-1m
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if [ ! -e "$here/environment.sh" ]; then # sbatch runs a copy that stands alone
    here=${SLURM_SUBMIT_DIR:-.}/scripts
fi
# shellcheck source=scripts/environment.sh
source "$here/environment.sh"
# shellcheck source=scripts/long_run.sh
source "$here/long_run.sh"

run=${SPPO_RUN:-$repository/configs/run/llama_8b_1m_cluster.yaml}
nodes=${SPPO_NODES:-${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-}}}
devices=${SPPO_DEVICES:-${SLURM_GPUS_ON_NODE:-8}} # GPUs of a node
model=${SPPO_MODEL:-}                             # a preset; empty: the run file's
length=${SPPO_LENGTH:-1Mi}                        # tokens of a sequence
steps=${SPPO_STEPS:-100}
tokens=${SPPO_TOKENS:-data/llama3}                # a directory of sppo data prepare, that all nodes see
output=${SPPO_OUTPUT:-runs/llama_8b_1m_cluster}   # that all nodes see; the plan goes beside it
hardware=${SPPO_HARDWARE:-hardware.json}          # of sppo bench; the first node is measured if it is not there
preset=${SPPO_PRESET:-}                           # what to plan with until then; empty: the run file's
disk=${SPPO_DISK:-$output.offloaded}                  # CPU only: where offloaded activations wait

if [ -z "$nodes" ]; then
    echo "error: not in a SLURM job: sbatch --nodes=N --gpus-per-node=G ${BASH_SOURCE[0]}, or SPPO_DRY_RUN=1 SPPO_NODES=N to plan" >&2
    exit 2
fi
start() { # RANKS COMMAND...: one task for every rank, each on a GPU of its own
    local ranks=$1 tasks=() cores=${SLURM_CPUS_ON_NODE:-}
    shift
    # Both, for srun takes the number of tasks from the job, which has one a node, unless it is told.
    tasks=("--nodes=$(((ranks + devices - 1) / devices))" "--ntasks=$ranks" "--ntasks-per-node=$devices")
    [[ ! $cores =~ ^[0-9]+$ ]] || tasks+=("--cpus-per-task=$((cores > devices ? cores / devices : 1))")
    # One socket after the other, as GPUs are numbered: by default tasks take the sockets in turn.
    tasks+=("--distribution=block:block")
    srun "${tasks[@]}" --kill-on-bad-exit=1 "$@"
}

make_environment
sppo=$venv/bin/sppo
train_long_run "$run" "hardware.nodes=$nodes" "hardware.devices_per_node=$devices" "$@"
