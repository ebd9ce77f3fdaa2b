"""Arguments and options of commands, read and checked."""
