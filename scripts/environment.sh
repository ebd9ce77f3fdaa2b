# Sourced by the other scripts: makes a virtual environment and installs SPPO into it.
#
#   SPPO_VENV    where the environment goes (default: .venv in the repository)
#   SPPO_PYTHON  the interpreter to make it with (default: python3)

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SPPO_VENV:-$repository/.venv}

make_environment() { # EXTRAS, e.g. [dev] or nothing
    local extras=${1:-} python=${SPPO_PYTHON:-python3} stamp="$venv/.sppo-installed"
    if ! command -v "$python" >/dev/null; then
        echo "error: $python not found; SPPO needs Python 3.11 or newer (set SPPO_PYTHON)" >&2
        return 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $("$python" --version) is too old; SPPO needs Python 3.11 or newer (set SPPO_PYTHON)" >&2
        return 1
    fi
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    local wanted
    wanted="$extras $(cksum <"$repository/setup.py")"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing into $venv"
        "$venv/bin/pip" install --quiet --disable-pip-version-check --upgrade pip
        # The CPU build where there is no GPU; an installed torch of the right age is left alone.
        if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
            "$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
        fi
        "$venv/bin/pip" install --quiet --disable-pip-version-check --editable "$repository$extras"
        echo "$wanted" >"$stamp"
    fi
}
