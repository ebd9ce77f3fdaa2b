"""What is looked at before a run starts: its inputs, its plan, and the room that it needs."""
