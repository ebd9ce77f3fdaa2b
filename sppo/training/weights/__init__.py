"""Weights that a run starts from, the base that it leaves unchanged, and adapters for PEFT."""
