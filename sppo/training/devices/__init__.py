"""Devices that a rank computes on (CPU or GPU), and the choice of the device of a run."""
