"""Tables and JSON that commands print."""
