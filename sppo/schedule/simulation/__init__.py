"""Playing programs against costs: times, waits, memory."""
