#!/usr/bin/env bash
# A million tokens a sequence: measures the machine once, solves, prints the plan, trains.
#
#   bash scripts/train_1m.sh 1gpu|1node [KEY=VALUE...]                               the rest replaces values of the run file
#   sbatch --nodes=4 --gpus-per-node=8 scripts/train_1m.sh cluster [KEY=VALUE...]    from the top of the repository
#   SPPO_DRY_RUN=1 bash scripts/train_1m.sh 1gpu                                     plan only, on any machine
#   SPPO_DRY_RUN=1 SPPO_NODES=4 bash scripts/train_1m.sh cluster
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

size=${1:-}
nodes=${SPPO_NODES:-${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-}}} # of a cluster
devices=${SPPO_DEVICES:-${SLURM_GPUS_ON_NODE:-8}}              # GPUs of a node
case "$size" in
1gpu) name=llama_1b_1m_1gpu machines=() ;;
1node) name=llama_8b_1m_1node machines=("hardware.devices_per_node=$devices") ;;
cluster) name=llama_8b_1m_cluster machines=("hardware.nodes=$nodes" "hardware.devices_per_node=$devices") ;;
*)
    echo "error: '$size' is not one of 1gpu, 1node, cluster: bash scripts/train_1m.sh 1gpu [KEY=VALUE...]" >&2
    exit 2
    ;;
esac
if [ "$size" = cluster ] && [ -z "$nodes" ]; then
    echo "error: not in a SLURM job: sbatch --nodes=N --gpus-per-node=G scripts/train_1m.sh cluster, or SPPO_DRY_RUN=1" \
        "SPPO_NODES=N to plan" >&2
    exit 2
fi
shift
run=${SPPO_RUN:-$repository/configs/run/$name.yaml}
model=${SPPO_MODEL:-}                        # a preset; empty: the run file's
length=${SPPO_LENGTH:-1Mi}                   # tokens of a sequence
steps=${SPPO_STEPS:-100}
tokens=${SPPO_TOKENS:-data/llama3}           # a directory of sppo data prepare, that all nodes see
output=${SPPO_OUTPUT:-runs/$name}            # checkpoints and metrics, that all nodes see; the plan goes beside it
hardware=${SPPO_HARDWARE:-hardware.json}     # of sppo bench; the first node is measured if it is not there
preset=${SPPO_PRESET:-}                      # what to plan with until then; empty: the run file's
disk=${SPPO_DISK:-$output.offloaded}         # CPU only: where offloaded activations wait
plan=$output.plan.json

start() { # RANKS COMMAND...: on one machine the command starts its own ranks, in a cluster each is a task on its own GPU
    local ranks=$1 tasks=() cores=${SLURM_CPUS_ON_NODE:-}
    shift
    if [ "$size" != cluster ]; then
        "$@"
        return
    fi
    # Both, for srun takes the number of tasks from the job, which has one a node, unless it is told.
    tasks=("--nodes=$(((ranks + devices - 1) / devices))" "--ntasks=$ranks" "--ntasks-per-node=$devices")
    [[ ! $cores =~ ^[0-9]+$ ]] || tasks+=("--cpus-per-task=$((cores > devices ? cores / devices : 1))")
    # One socket after the other, as GPUs are numbered: by default tasks take the sockets in turn.
    tasks+=("--distribution=block:block")
    srun "${tasks[@]}" --kill-on-bad-exit=1 "$@"
}

solve() { # HARDWARE...: write the plan
    "$sppo" solve "$run" "${overrides[@]}" "$@" -o "$plan"
}

refuse_without_device() { # before the machine is measured for a plan that it cannot run
    if [ "$(of_plan kind)" = cuda ] && ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "error: this plan is for GPUs, and torch sees none here: SPPO_PRESET=laptop-cpu, and a smaller SPPO_MODEL" \
            "and SPPO_LENGTH, or SPPO_DRY_RUN=1 to plan only" >&2
        exit 1
    fi
}

of_plan() { # ranks|kind
    "$venv/bin/python" - "$plan" "$1" <<'PY'
import sys
from pathlib import Path

from sppo.planning.plan import read_plan

plan = read_plan(Path(sys.argv[1]))
ranks = plan.data_parallel_degree * plan.pipeline_parallel_degree * plan.sequence_parallel_degree
print({"ranks": ranks, "kind": plan.hardware.device.kind}[sys.argv[2]])
PY
}

make_environment
sppo=$venv/bin/sppo
overrides=("sequence.length=$length" "train.steps=$steps" "data.tokens=$tokens" "train.output=$output")
overrides+=("${machines[@]}" "$@")
[ -z "$model" ] || overrides+=("model.preset=$model")
if [ -z "${SPPO_DRY_RUN:-}" ] && [ ! -e "$tokens/meta.json" ]; then
    echo "error: no tokens in $tokens: sppo data prepare --tokenizer tokenizer.json --out $tokens FILE..., or set" \
        "SPPO_TOKENS; SPPO_DRY_RUN=1 plans without" >&2
    exit 2
fi
# On a CPU offloaded activations wait on a disk; behind a GPU there is host memory for that.
overrides+=("activations.disk=$disk")
mkdir -p "$(dirname "$output")"
if [ -e "$hardware" ]; then
    echo "planning with $hardware"
    solve "hardware.file=$hardware"
else
    echo "planning with ${preset:-the machine of $run}, analytic rates: there is no $hardware of sppo bench"
    solve ${preset:+"hardware.preset=$preset"}
fi
if [ -n "${SPPO_DRY_RUN:-}" ]; then
    echo "dry run: nothing was started; the plan is in $plan"
    exit 0
fi
refuse_without_device
mkdir -p "$disk"
if [ ! -e "$hardware" ]; then
    "$sppo" bench all --run "$run" --disk "$disk" -o "$hardware"
    solve "hardware.file=$hardware"
    refuse_without_device
fi
start "$(of_plan ranks)" "$sppo" train "$run" "${overrides[@]}" "hardware.file=$hardware" --plan "$plan"
