"""Search over degrees, cuts, policies and schedules of a request: pricing, simulation, ranking."""
