"""AdamW, its state on device or host, sharded over ranks, and the learning rate."""
