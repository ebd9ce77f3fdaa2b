"""Placement of saved activations between forward and backward, as plans decide it."""
