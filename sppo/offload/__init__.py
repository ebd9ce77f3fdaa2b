"""Where saved activations live and how they move."""
