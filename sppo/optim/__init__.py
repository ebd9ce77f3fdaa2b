"""AdamW with state on device, host or disk, sharding of the state over ranks, learning rate."""
