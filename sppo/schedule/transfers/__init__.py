"""Placement of messages, copies and reductions between the compute actions of a program."""
