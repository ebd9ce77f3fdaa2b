"""State sharded over devices (ZeRO, Megatron): its parts, and seconds of their collectives."""
