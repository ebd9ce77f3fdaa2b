"""Entry point of the ``sppo`` command and of ``python -m sppo``, as which it starts its ranks."""

import signal


def main() -> None:
    """Run the ``sppo`` command, which SIGTERM and SIGINT end with a line and 128 + their number.

    Signals are held back until it can say that one came.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    from sppo.cli.stop_signals import stop_signals
    from sppo.parallel.job.timed_call import without_calls_left_behind

    with without_calls_left_behind(), stop_signals():
        from sppo.cli.app import app
        from sppo.cli.exit_codes import standard_output

        with standard_output():
            app()


if __name__ == "__main__":
    main()
