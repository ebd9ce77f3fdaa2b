#!/usr/bin/env bash
# Writes the tokens of the tutorials and how-to pages into data/: parts of Python's standard library as bytes,
# data/code to learn from and data/held_out to evaluate on. Nothing changes if they are there already.
set -euo pipefail
stdlib=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
sppo data prepare --tokenizer bytes --glob '*.py' --out data/code "$stdlib/json" "$stdlib/asyncio"
sppo data prepare --tokenizer bytes --glob '*.py' --out data/held_out "$stdlib/argparse.py" "$stdlib/typing.py"
