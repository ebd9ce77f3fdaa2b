"""Placement of saved activations between forward and backward, as decided by plans."""
