# Sourced by train_1m_*.sh after environment.sh: plan a long run, show the plan, measure the machine, train.
#
# All of it is set by environment variables; those scripts name their defaults. On several machines sppo train cannot
# start its own ranks: train_1m_slurm.sh has another `start`.

train_long_run() { # RUN.yaml [KEY=VALUE...]
    local run=$1 plan=$output.plan.json machine=()
    shift
    local overrides=("sequence.length=$length" "train.steps=$steps" "data.tokens=$tokens" "train.output=$output" "$@")
    [ -z "$model" ] || overrides+=("model.preset=$model")
    if [ -z "${SPPO_DRY_RUN:-}" ] && [ ! -e "$tokens/meta.json" ]; then
        echo "error: no tokens in $tokens: sppo data prepare --tokenizer tokenizer.json --out $tokens FILE..., or set" \
            "SPPO_TOKENS; SPPO_DRY_RUN=1 plans without" >&2
        return 2
    fi
    # On a CPU offloaded activations wait on a disk; behind a GPU there is host memory for that.
    overrides+=("activations.disk=$disk")
    mkdir -p "$(dirname "$output")"
    if [ -e "$hardware" ]; then
        echo "planning with $hardware"
        machine=("hardware.file=$hardware")
    else
        echo "planning with ${preset:-the machine of $run}, analytic rates: there is no $hardware of sppo bench"
        [ -z "$preset" ] || machine=("hardware.preset=$preset")
    fi
    "$sppo" solve "$run" "${overrides[@]}" "${machine[@]}" -o "$plan"
    if [ -n "${SPPO_DRY_RUN:-}" ]; then
        echo "dry run: nothing was started; the plan is in $plan"
        return 0
    fi
    refuse_without_device "$plan" || return 1
    mkdir -p "$disk"
    if [ ! -e "$hardware" ]; then
        "$sppo" bench all --run "$run" --disk "$disk" -o "$hardware"
        machine=("hardware.file=$hardware")
        "$sppo" solve "$run" "${overrides[@]}" "${machine[@]}" -o "$plan"
        refuse_without_device "$plan" || return 1
    fi
    start "$(of_plan "$plan" ranks)" "$sppo" train "$run" "${overrides[@]}" "${machine[@]}" --plan "$plan"
}

start() { # RANKS COMMAND...: on one machine the command starts its own ranks
    shift
    "$@"
}

refuse_without_device() { # PLAN: before the machine is measured for a plan that it cannot run
    local kind
    kind=$(of_plan "$1" kind)
    if [ "$kind" = cuda ] && ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "error: this plan is for GPUs, and torch sees none here: SPPO_PRESET=laptop-cpu, and a smaller SPPO_MODEL" \
            "and SPPO_LENGTH, or SPPO_DRY_RUN=1 to plan only" >&2
        return 1
    fi
}

of_plan() { # PLAN ranks|kind
    "$venv/bin/python" - "$@" <<'PY'
import sys
from pathlib import Path

from sppo.planning.plan import read_plan

plan = read_plan(Path(sys.argv[1]))
ranks = plan.data_parallel_degree * plan.pipeline_parallel_degree * plan.sequence_parallel_degree
print({"ranks": ranks, "kind": plan.hardware.device.kind}[sys.argv[2]])
PY
}
