"""Screens and JSON of a solution: of its candidates, why they are fast, and of all of them."""
