"""Parts of training state sharded over devices (ZeRO, Megatron), and their collectives' seconds."""
