"""Choice of degrees of parallelism for a corpus, by planning steps of samples drawn from it."""
