"""Where saved activations live, and how they are offloaded and come back."""
