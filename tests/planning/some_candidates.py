"""Candidates of all kinds, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from sppo.planning.search.choices import Degrees
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
from sppo.units import GIB
from tests.planning.cases import candidate_of_subsequences, machine, run_config

SCHEDULES = (
    "sppo",
    "sppo_msp",
    "seq1f1b",
    "seq_zb_h1",
    "1f1b",
    "gpipe",
    "zb_h1",
    "looped_bfs",
    "interleaved_seq1f1b",
)
RATES = (3e8, 1e9, 4e9, 1.1e10, 4e10)
"""Bytes per second of copies: hidden by nothing, to hidden by everything."""


ADAPTERS = ({"rank": 16}, {"rank": 8, "layers": "10-15"}, {"rank": 64, "layers": "3,15"})


@st.composite
def candidates(
    draw,
    schedules=SCHEDULES,
    policies=("auto", "retain", "recompute", "sppo"),
    adapters=(None,),
):
    """A model cut, scheduled and sharded in some way, on a machine that may be too small."""
    schedule = draw(st.sampled_from(schedules))
    name, length = draw(
        st.sampled_from([("gpt-7b", 131072), ("llama-3.2-1b", 262144), ("llama-3.2-1b", 20000)])
    )
    pipeline, group = draw(st.sampled_from([(1, 8), (2, 4), (4, 2), (4, 8), (8, 1)]))
    hardware = machine(
        memory_bytes=int(draw(st.floats(6, 90)) * GIB),
        reserved_bytes=0,
        host_memory_bytes=draw(st.sampled_from([64, 2048])) * GIB,
        d2h_bytes_per_s=draw(st.sampled_from(RATES)),
        h2d_bytes_per_s=draw(st.sampled_from(RATES)),
        nodes=4,
    )
    policy = draw(st.sampled_from(policies))
    kv = ["auto", "retain"]
    if schedule == "looped_bfs":
        kv += ["offload", *(["recompute"] if policy in ("retain", "recompute") else [])]
    run = run_config(
        name,
        length=length,
        train={"sequences_per_step": draw(st.integers(1, 5))},
        parallel={"schedule": schedule},
        activations={
            "policy": policy,
            "kv": draw(st.sampled_from(kv)),
        },
        adapter=draw(st.sampled_from(adapters)),
    )
    return candidate_of_subsequences(
        run,
        hardware=hardware,
        degrees=Degrees(1, pipeline, group),
        num_subsequences=1 if schedule in WHOLE_SEQUENCES else draw(st.integers(1, 17)),
        virtual_stages=draw(st.integers(1, min(5, 16 // pipeline)))
        if schedule in WITH_VIRTUAL_STAGES
        else 1,
    )
