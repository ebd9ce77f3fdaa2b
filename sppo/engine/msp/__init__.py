"""Multiplexed sequence partitioning (MSP): units whose tokens several pipeline ranks compute."""
