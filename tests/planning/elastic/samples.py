"""Samples of many lengths, and the workloads that they are planned for."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from sppo.cost.workload import Workload
from tests.planning.cases import A100, run_config

LONGEST = 1 << 17


@cache
def workload(model: str, degree: int, sequence_parallel: str = "ulysses") -> Workload:
    """Return what is packed for: a model on A100s, subsequences shared by so many ranks."""
    return Workload(
        run_config(model).model,
        A100,
        dtype="bf16",
        sequence_parallel_degree=degree,
        sequence_parallel=sequence_parallel,
    )


@st.composite
def lengths_of_samples(draw, *, longest, most=24):
    """Tokens of the samples of a step: ones, short ones, some of the most there are."""
    tokens = st.one_of(
        st.just(1),
        st.integers(1, min(longest, 40)),
        st.integers(1, max(1, longest // 20)),
        st.integers(1, longest),
        st.just(longest),
    )
    return draw(st.lists(tokens, min_size=1, max_size=most))
