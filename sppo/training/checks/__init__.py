"""Checks before a run starts: of its inputs, its plan, and the room that it needs."""
