"""Damage input files and options at random, and report every outcome that is not documented.

python scripts/fuzz.py --count 20000
python scripts/fuzz.py --target programs --seed 4711 --count 1
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzzing.harness import Finding, run_case
from tests.fuzzing.targets import TARGETS

_SHOWN = 5
_ALIKE_CHARACTERS = 40
"""Findings whose last characters are equal, this many of them, are shown once."""
_MEMORY_BYTES = 8 << 30
"""Limit of the address space, so that a case with too much memory fails instead of the machine."""


def main() -> None:
    """Run the campaign; exit code 1 if there are findings."""
    options = _options()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    targets = [options.target] if options.target else list(TARGETS)
    found = [finding for target in targets for finding in _campaign(target, options)]
    first: dict[tuple[str, str], Finding] = {}
    for finding in found:
        first.setdefault((finding.target, finding.what[-_ALIKE_CHARACTERS:]), finding)
    for finding in [*first.values()][: _SHOWN * len(targets)]:
        text = f"\n--target {finding.target} --seed {finding.seed}: {finding.what}"
        print(text.encode("ascii", "backslashreplace").decode())
    sys.exit(bool(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=list(TARGETS), help="one kind of input instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--count", type=int, default=1000, help="cases per target")
    return parser.parse_args()


def _campaign(target: str, options: argparse.Namespace) -> list[Finding]:
    start, found = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(options.seed, options.seed + options.count):
            finding = run_case(target, TARGETS[target], seed=seed, directory=Path(directory))
            if finding is not None:
                found.append(finding)
    seconds = time.perf_counter() - start
    print(f"{target}: {options.count} cases in {seconds:.0f} s, {len(found)} found", flush=True)
    return found


if __name__ == "__main__":
    main()
