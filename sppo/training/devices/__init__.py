"""Devices that a rank computes on: a CPU or a GPU, and which of them a run gets."""
