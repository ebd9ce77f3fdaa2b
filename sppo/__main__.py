"""Entry point of the ``sppo`` command and of ``python -m sppo``, which also starts the ranks."""

import logging
import signal


def main() -> None:
    """Run the ``sppo`` command; SIGTERM and SIGINT end it with a message and code 128 + signal.

    Both signals are blocked until the handlers that print the message are installed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    from sppo.cli.stop_signals import stop_signals
    from sppo.parallel.job.timed_call import without_calls_left_behind

    with without_calls_left_behind(), stop_signals():
        from sppo.cli.app import app
        from sppo.cli.exit_codes import standard_output
        from sppo.report.lines import StderrFormatter

        if logging.lastResort is not None:  # prints warnings where nothing else handles them
            logging.lastResort.setFormatter(StderrFormatter())
        with standard_output():
            app()


if __name__ == "__main__":
    main()
