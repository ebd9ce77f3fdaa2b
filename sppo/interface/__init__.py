"""Functions of ``import sppo``: planning, training and evaluation."""
