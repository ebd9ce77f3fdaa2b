"""What commands print: lines, tables and JSON."""
