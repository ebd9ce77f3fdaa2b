#!/usr/bin/env bash
# Installs SPPO with its development tools and runs lint, types, layer contracts and tests.
# Needs no GPU and, once installed, no network. Without --all the tests are those of the default
# tier, which leaves out those marked exhaustive. Other arguments go to pytest: bash scripts/test.sh -k config
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment "[dev]"
cd "$repository"
# Two processes of one thread each are faster than one of two: most tests are too small for threads.
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Hundreds of processes are started; each would compile the package anew.
unset PYTHONDONTWRITEBYTECODE

tier=default which=()
if [ "${1:-}" = --all ]; then
    shift
    tier=all which=(-m "not gpu and not multigpu and not chaos")
fi

echo "== lines that the last commit changes (budgets of packages: tests/test_line_budgets.py)"
git diff --shortstat HEAD~1 HEAD -- sppo tests 2>/dev/null || true
echo "== ruff"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
# Types are checked beside the tests: mypy has one thread, and a core would idle meanwhile.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$venv/bin/mypy" >"$types" 2>&1 &
checker=$! failed=
echo "== pytest, tier: $tier"
"$venv/bin/python" -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile "${which[@]}" "$@" || failed=1
echo "== mypy"
wait "$checker" || failed=1
cat "$types"
[ -z "$failed" ] || exit 1
echo "passed: lint, types, contracts and tests of tier $tier"
