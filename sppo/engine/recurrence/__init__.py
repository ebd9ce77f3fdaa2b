"""Linear attention of the running subsequence: the store of its states, and its recurrence."""
