# Sourced by train_1m_*.sh after environment.sh: plan a long run, show the plan, measure the machine, train.
#
# All of it is set by environment variables; those scripts name their defaults.

train_long_run() { # RUN.yaml [KEY=VALUE...]
    local run=$1 plan=$output.plan.json missing machine=()
    shift
    local overrides=("sequence.length=$length" "train.steps=$steps" "data.tokens=$tokens" "train.output=$output" "$@")
    [ -z "$model" ] || overrides+=("model.preset=$model")
    if [ -z "${SPPO_DRY_RUN:-}" ] && [ ! -e "$tokens/meta.json" ]; then
        echo "error: no tokens in $tokens: sppo data prepare --tokenizer tokenizer.json --out $tokens FILE..., or set" \
            "SPPO_TOKENS; SPPO_DRY_RUN=1 plans without" >&2
        return 2
    fi
    # On a CPU moved activations wait on a disk; plans for GPUs have host memory for that.
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
    missing=$(missing_for "$plan")
    if [ -n "${SPPO_DRY_RUN:-}" ]; then
        [ -z "$missing" ] || echo "note: $missing"
        echo "dry run: nothing was started; the plan is in $plan"
        return 0
    fi
    refuse_if "$missing" || return 1
    mkdir -p "$disk"
    if [ ! -e "$hardware" ]; then
        "$sppo" bench all --run "$run" --disk "$disk" -o "$hardware"
        machine=("hardware.file=$hardware")
        "$sppo" solve "$run" "${overrides[@]}" "${machine[@]}" -o "$plan"
        missing=$(missing_for "$plan")
        refuse_if "$missing" || return 1
    fi
    "$sppo" train "$run" "${overrides[@]}" "${machine[@]}" --plan "$plan"
}

refuse_if() { # REASON or nothing
    [ -n "$1" ] || return 0
    echo "error: $1" >&2
    return 1
}

missing_for() { # PLAN: print what training it needs that this version has not, if anything
    "$venv/bin/python" - "$1" <<'PY'
import sys
from pathlib import Path

from sppo.planning.plan import read_plan

plan = read_plan(Path(sys.argv[1]))
ranks = plan.data_parallel_degree * plan.pipeline_parallel_degree * plan.sequence_parallel_degree
if ranks > 1:
    print(
        f"this plan needs {ranks} ranks, and this version trains on one; sppo simulate {sys.argv[1]} shows what "
        "they would do"
    )
elif plan.hardware.device.kind != "cpu":
    print(
        f"this plan is for a GPU ({plan.hardware.name}), and this version trains on a CPU: "
        "SPPO_PRESET=laptop-cpu, and a smaller SPPO_MODEL and SPPO_LENGTH, or SPPO_DRY_RUN=1 to plan only"
    )
PY
}
