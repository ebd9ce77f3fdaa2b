"""What is kept of a run: its steps, the last one as executed, and the outcome."""
