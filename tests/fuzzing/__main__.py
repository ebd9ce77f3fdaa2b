"""Damage input files and options at random, and report every outcome that is not documented.

python -m tests.fuzzing --count 20000
python -m tests.fuzzing --target programs --seed 4711 --count 1
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path

from tests.fuzzing.harness import run_case
from tests.fuzzing.targets import TARGETS

_MEMORY_BYTES = 8 << 30
"""Limit of the address space, so that a case with too much memory fails instead of the machine."""


def main() -> None:
    """Run the cases; exit code 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=list(TARGETS), help="one kind of input instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--count", type=int, default=1000, help="cases per target")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    found = 0
    for target in [options.target] if options.target else TARGETS:
        with tempfile.TemporaryDirectory() as directory:
            for seed in range(options.seed, options.seed + options.count):
                finding = run_case(target, TARGETS[target], seed=seed, directory=Path(directory))
                if finding is not None:
                    found += 1
                    print(ascii(f"--target {target} --seed {seed}: {finding.what}"), flush=True)
        print(f"{target}: {options.count} cases, {found} findings so far", flush=True)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
