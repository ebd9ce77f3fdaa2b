"""Plans for a corpus: degrees of parallelism for steps of samples drawn from it."""
