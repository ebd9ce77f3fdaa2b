"""Multiplexed sequence partitioning (MSP): units that several pipeline ranks compute in shards."""
