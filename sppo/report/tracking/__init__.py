"""Trackers of experiments, which receive the records of a run from the files in its directory."""
