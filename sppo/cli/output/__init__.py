"""Lines, tables and JSON that the commands print."""
