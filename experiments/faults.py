"""Tables of faults: the training time that they leave, and the seconds of a restart by part.

python -m experiments.faults --table effective --output docs/results/effective_time.json
python -m experiments.faults --table restart --output docs/results/restart_seconds.json
"""

from __future__ import annotations

from experiments import harness
from experiments.effective_time import effective
from experiments.restart_seconds import restart
from sppo.hardware.faults import RESTART_S

TABLES = {"effective": (effective, "simulated"), "restart": (restart, "measured")}
"""Function that makes each table, and how its figures are obtained."""


def main() -> None:
    """Make the table that is asked for, and write its figures."""
    parser = harness.parser(__doc__)
    parser.add_argument("--table", choices=TABLES, required=True)
    parser.add_argument(
        "--restart-s",
        type=float,
        default=RESTART_S,
        help="effective: seconds from a stop to the next step",
    )
    parser.add_argument(
        "--faults", type=harness.positive, default=5, help="restart: number of killed ranks"
    )
    options = parser.parse_args()
    make, provenance = TABLES[options.table]
    harness.write_report(options.output, {**harness.header(provenance), **make(options)})


if __name__ == "__main__":
    main()
