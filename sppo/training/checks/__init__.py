"""Checks before a run starts: inputs, plan, and the memory and disk space available."""
