"""Arguments and options of commands: declaration, parsing and checks."""
