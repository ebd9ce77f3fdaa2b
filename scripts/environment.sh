# Sourced by the other scripts: makes a virtual environment and installs SPPO into it.
#
#   SPPO_VENV    where the environment goes (default: .venv in the repository)
#   SPPO_PYTHON  the interpreter to make it with (default: python3)
#   SPPO_SKIP_INSTALL  set: the environment is there and complete, use it as it is

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -m "${SPPO_VENV:-$repository/.venv}")

# Threads that wait for work should not spin: on busy cores that makes small steps many times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

make_environment() { # EXTRAS, e.g. [dev] or nothing
    [ -z "${SPPO_SKIP_INSTALL:-}" ] || return 0
    local extras=${1:-} python=${SPPO_PYTHON:-python3} stamp="$venv/.sppo-installed" wanted
    # One line for each set of extras that is installed; [dev] holds everything the others have.
    wanted=$(cat "$repository"/setup.py "$repository"/pyproject.toml | cksum)
    if grep -qxF -e "$wanted $extras" -e "$wanted [dev]" "$stamp" 2>/dev/null; then
        return 0
    fi
    if ! command -v "$python" >/dev/null; then
        echo "error: $python not found; SPPO needs Python 3.11 or newer (set SPPO_PYTHON)" >&2
        return 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $("$python" --version) is too old; SPPO needs Python 3.11 or newer (set SPPO_PYTHON)" >&2
        return 1
    fi
    if [ ! -x "$venv/bin/pip" ] && ! "$python" -m venv "$venv"; then
        echo "error: $python cannot make a virtual environment; on Debian: apt install python3-venv" >&2
        return 1
    fi
    echo "installing into $venv"
    # torch is pinned: every machine computes with the same version.
    if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        echo "installing torch 2.13.0, the largest download"
        "$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
    fi
    echo "installing sppo$extras and what it needs, building its native parts"
    # Setuptools warns of every editable installation, in a box of ten lines.
    PYTHONWARNINGS=ignore "$venv/bin/pip" install --quiet --disable-pip-version-check --editable "$repository$extras"
    echo "$wanted $extras" >>"$stamp"
}
