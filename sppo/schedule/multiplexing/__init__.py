"""Multiplexed sequence partitioning (MSP): which units to cut over ranks that would idle."""
