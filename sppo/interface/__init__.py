"""What ``import sppo`` offers: planning, training and evaluation as functions."""
