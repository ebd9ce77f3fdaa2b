"""Many injections one after another, with a line on each, and counts by layout and kind.

python -m tests.chaos --seed 300 --count 300 --output docs/results/injections.json
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path

from experiments import harness
from tests.chaos.faults import FAULTS
from tests.chaos.injections import Injector
from tests.chaos.layouts import LAYOUTS
from tests.training.forked_sppo import ForkedSppo

Counts = dict[str, int]
_ENDS = ("well", "wrong", "not struck")


def main() -> None:
    """Run injections, print a line on each, and write the counts."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=harness.positive, default=len(LAYOUTS) * len(FAULTS))
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory() as disk,
        ForkedSppo(disk=Path(disk)) as sppo,
    ):
        counts = _counts(Injector(Path(directory), sppo), seeds)
    report = {
        **harness.header(),
        "command": f"python -m tests.chaos --seed {seeds.start} --count {len(seeds)}",
        "injections": len(seeds),
        "seconds": round(time.monotonic() - began_s),
        **counts,
    }
    harness.write_report(options.output, report)


def _counts(injector: Injector, seeds: range) -> dict[str, dict[str, Counts]]:
    """Run the injections of seeds; return how many ended in which way, by layout and by kind."""
    by_layout = defaultdict[str, Counts](lambda: dict.fromkeys(_ENDS, 0))
    by_kind = defaultdict[str, Counts](lambda: dict.fromkeys(_ENDS, 0))
    for seed in seeds:
        injection, began_s = injector.draw(seed), time.monotonic()
        verdict = injector.verdict(injection)
        word = "wrong" if verdict.problem else "well" if verdict.struck else "not struck"
        by_layout[injection.layout][word] += 1
        by_kind[injection.kind][word] += 1
        print(f"{word} {time.monotonic() - began_s:.1f} s, {injection}", flush=True)
        if verdict.problem:
            print("  " + verdict.problem.replace("\n", "\n  "), flush=True)
    return {"by_layout": by_layout, "by_kind": by_kind}


if __name__ == "__main__":
    main()
