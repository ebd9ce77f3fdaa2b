"""Simulation of programs with predicted costs: times, waits, memory."""
