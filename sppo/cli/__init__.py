"""The sppo command line."""
