"""The ranks of a job: how they start, learn who they are, meet, wait, fail and end."""
