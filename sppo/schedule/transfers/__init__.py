"""Placement of messages and copies between the compute actions of a program."""
