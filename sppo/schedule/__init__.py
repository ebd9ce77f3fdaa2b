"""Pipeline schedules as data: actions, generators, validation, simulation, pictures."""
