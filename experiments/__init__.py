"""Comparisons of SPPO with itself, with other programs and with papers; not part of the package.

Run from the top of the repository, with the development tools installed::

    OMP_WAIT_POLICY=passive python -m experiments.orders --length 8192 --output orders.json

Each comparison is a module; ``python -m experiments.NAME --help`` describes it.
"""
