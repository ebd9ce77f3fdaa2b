"""Search: degrees, cuts, policies and schedules of a request, priced, simulated and ranked."""
