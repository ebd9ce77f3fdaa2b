"""Processes of a job: launch, rank discovery, rendezvous, timeouts, failures and exit."""
