"""Train random combinations of settings, and compare all results with plain autograd.

Draws models, cuts, documents, samples, activation policies, tiers, schedules, degrees, ZeRO,
precision, and resuming from a checkpoint with other degrees. Losses, gradients, norms and updated
weights are compared with plain autograd in float64; samples with autograd on each sample by itself.
By default ranks are threads of this process, whose messages are delivered at moments that the seed
chooses; with ``--ranks real`` they are processes that communicate over gloo.

    python scripts/random_training.py --count 2000

Prints a line for each mismatch, with the seed that repeats it and the case to paste:

    python scripts/random_training.py --seed 4711 --count 1
    python scripts/random_training.py --case "Case(seed=4711, dtype='fp64')"
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from option_types import positive  # beside this file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    """Parse arguments and run the cases; exit code 1 if any result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next adds one")
    parser.add_argument("--count", type=positive, default=200, help="cases")
    parser.add_argument("--ranks", choices=("emulated", "real"), default="emulated")
    parser.add_argument("--most-ranks", type=positive, default=8, help="of a case, up to 8")
    parser.add_argument("--case", help="run this one, as a mismatch shows it")
    parser.add_argument("--mutation", help="put this defect in, and run the cases that can show it")
    arguments = parser.parse_args()

    import torch

    import tests.random_training.case as case_module
    from tests.random_training.draw import draw
    from tests.random_training.mutations import MUTATIONS
    from tests.random_training.training import faults_of
    from tests.ranks import RankPool

    torch.set_num_threads(1)
    logging.getLogger("sppo").setLevel(logging.ERROR)
    if arguments.case is not None:
        cases = [eval(arguments.case, vars(case_module))]
    else:
        seeds = range(arguments.seed, arguments.seed + arguments.count)
        cases = [draw(seed, most_ranks=arguments.most_ranks) for seed in seeds]
    with ExitStack() as stack:
        if arguments.mutation is not None:
            if arguments.mutation not in MUTATIONS:
                parser.error(
                    f"--mutation {arguments.mutation} is not one of {', '.join(MUTATIONS)}"
                )
            if arguments.ranks == "real":
                parser.error("--mutation changes this process only: leave --ranks real out")
            put_in, may_show = MUTATIONS[arguments.mutation]
            stack.enter_context(put_in())
            cases = [case for case in cases if may_show(case)]
        pool = stack.enter_context(closing(RankPool())) if arguments.ranks == "real" else None
        sys.exit(1 if _run(cases, lambda case: faults_of(case, pool)) else 0)


def _run(cases: Sequence[Any], faults_of: Callable[[Any], list[str]]) -> list[int]:
    """Run all cases and report; return the seeds of the cases with wrong results."""
    start, wrong, several = time.monotonic(), [], 0
    for done, case in enumerate(cases, start=1):
        several += case.num_ranks > 1
        faults = faults_of(case)
        if faults:
            wrong.append(case.seed)
            print(f"seed {case.seed}: {'; '.join(faults)}\n  {case}", flush=True)
        if sys.stderr.isatty() or done % 100 == 0:
            rate = 60 * done / (time.monotonic() - start)
            end = "\r" if sys.stderr.isatty() else "\n"
            line = f"{done} of {len(cases)}, {len(wrong)} wrong, {rate:.0f} a minute"
            print(line, end=end, file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    seeds = f" (seeds {', '.join(map(str, wrong))})" if wrong else ""
    print(
        f"{len(cases)} cases, {several} of them on several ranks, in {seconds:.0f} s "
        f"({60 * len(cases) / seconds:.0f} a minute): {len(wrong)} wrong{seeds}"
    )
    return wrong


if __name__ == "__main__":
    main()
