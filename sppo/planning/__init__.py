"""Plans: what fits, what is fastest, and the solver. Pure Python and numpy, never torch."""
