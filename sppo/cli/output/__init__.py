"""Tables, plots and JSON reports that commands print."""
