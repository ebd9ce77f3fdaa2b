"""Planning of runs: feasibility, prediction, and the solver. Pure Python and numpy, never torch."""
