"""Pipeline schedules as data: actions, orders of the ranks, programs, and their simulation."""
