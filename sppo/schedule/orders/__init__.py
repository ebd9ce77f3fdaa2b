"""Order of the compute of each rank: schedules by name, and the steps that they pair."""
