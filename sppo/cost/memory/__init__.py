"""Memory of each stage by bucket: what it keeps, what is in flight, what runs, what moves."""
