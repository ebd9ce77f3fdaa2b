"""``sppo estimate``: predicted memory of a run as it stands, by memory bucket."""

from __future__ import annotations

from sppo.api import estimate as estimate_run
from sppo.cli.arguments.common import Json, Overrides, RunFile
from sppo.cli.arguments.planned_run import load_planned_run
from sppo.cli.exit_codes import exit_codes
from sppo.cli.output.estimate import EstimateReport
from sppo.cli.output.printing import emit


def estimate(run_file: RunFile, overrides: Overrides = None, json_output: Json = False) -> None:
    """Predict memory by bucket, as sppo train would plan the run; nothing is run.

    Degrees that the run file leaves out are those that sppo solve chooses for the machine in the
    section hardware, by default this machine; policy auto is a policy that fits. Needs neither the
    data, nor the weights, nor the machine that is planned for.

        sppo estimate configs/run/gpt_7b_512k_32gpu.yaml sequence.length=4Mi
    """
    with exit_codes():
        found = estimate_run(load_planned_run(run_file, overrides or ()))
    emit(EstimateReport(found), as_json=json_output)
