"""Memory of a run on one CPU device, as the planner predicts it."""

from sppo.cost.candidate import Candidate
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.planning.search.evaluation import evaluate_candidate


def predicted(model, *, dtype="bf16", policy="retain", lengths=(30, 30, 40), sequences=1):
    """Buckets of one device that runs sequences of subsequences of these lengths."""
    workload = Workload(model, PRESETS["laptop-cpu"], dtype=dtype)
    candidate = Candidate(workload, tuple(lengths), sequences=sequences, policy=policy)
    return evaluate_candidate(candidate).memory[0].device
