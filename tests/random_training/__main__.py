"""Train random combinations of settings, and compare all results with plain autograd.

Draws models, cuts, documents, samples, activation policies, tiers, schedules, degrees, ZeRO,
precision, and resuming from a checkpoint with other degrees. Losses, gradients, norms and updated
weights are compared with plain autograd in float64; samples with autograd on each sample by itself.
By default ranks are threads of this process, whose messages are delivered at moments that the seed
chooses; with ``--ranks real`` they are processes that communicate over gloo. Prints a line for each
mismatch, with the seed that repeats it and the case to paste::

    python -m tests.random_training --count 2000
    python -m tests.random_training --seed 4711 --count 1
    python -m tests.random_training --case "Case(seed=4711, dtype='fp64')"
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from contextlib import ExitStack, closing

import torch

import tests.random_training.case as case_module
from tests.random_training.draw import draw
from tests.random_training.mutations import MUTATIONS
from tests.random_training.training import faults_of
from tests.ranks import RankPool

_EVERY = 100
"""Cases from one line of progress to the next."""


def main() -> None:
    """Run the cases; exit code 1 if any result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next adds one")
    parser.add_argument("--count", type=int, default=200, help="cases")
    parser.add_argument("--ranks", choices=("emulated", "real"), default="emulated")
    parser.add_argument("--most-ranks", type=int, default=8, help="of a case, up to 8")
    parser.add_argument("--case", help="run this one, as a mismatch shows it")
    parser.add_argument(
        "--mutation", choices=MUTATIONS, help="put this defect in, and run cases that can show it"
    )
    options = parser.parse_args()
    if options.mutation is not None and options.ranks == "real":
        parser.error("--mutation changes this process only: leave --ranks real out")
    torch.set_num_threads(1)
    logging.getLogger("sppo").setLevel(logging.ERROR)
    seeds = range(options.seed, options.seed + options.count)
    cases = [draw(seed, most_ranks=options.most_ranks) for seed in seeds]
    if options.case is not None:
        cases = [eval(options.case, vars(case_module))]
    with ExitStack() as stack:
        if options.mutation is not None:
            put_in, may_show = MUTATIONS[options.mutation]
            stack.enter_context(put_in())
            cases = [case for case in cases if may_show(case)]
        pool = stack.enter_context(closing(RankPool())) if options.ranks == "real" else None
        start, wrong = time.monotonic(), []
        for done, case in enumerate(cases, start=1):
            if faults := faults_of(case, pool):
                wrong.append(case.seed)
                print(f"seed {case.seed}: {'; '.join(faults)}\n  {case}", flush=True)
            if done % _EVERY == 0 or done == len(cases):
                seconds = time.monotonic() - start
                print(
                    f"{done} of {len(cases)} cases in {seconds:.0f} s, wrong: {wrong}", flush=True
                )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
