"""How long the solver takes, printed: python -m tests.planning.solve_seconds."""

from __future__ import annotations

from time import process_time

from tests.planning.cases import run_config, solved

REQUESTS = (("gpt-7b", "1Mi", 4), ("gpt-7b", "4Mi", 16), ("gpt-65b", "4Mi", 128))
"""Model, length, nodes of eight A100-80GB."""


def main() -> None:
    """A line for each request: processor seconds, degrees, N, predicted step."""
    for model, length, nodes in REQUESTS:
        hardware = {"preset": "a100-80g", "nodes": nodes}
        run = run_config(model, length=length, hardware=hardware)
        begin = process_time()
        best = solved(run).best
        seconds = process_time() - begin
        found = "nothing fits"
        if best is not None:
            num_subsequences = len(best.candidate.lengths)
            how = "closed form" if best.played is None else "simulated"
            found = f"{best.degrees}, N {num_subsequences}, {best.step_s:.1f} s a step ({how})"
        print(f"{model} {length} on {8 * nodes}: {seconds:.2f} s to {found}")


if __name__ == "__main__":
    main()
