"""Pipeline schedules as data: actions, generators, messages, copies, and their simulation."""
