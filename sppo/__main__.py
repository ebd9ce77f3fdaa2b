"""``python -m sppo`` is the ``sppo`` command; its own ranks are started so."""

import signal


def main() -> None:
    """Run the ``sppo`` command; signals are held back until it can say that one came."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    from sppo.cli.stop_signals import stop_signals

    with stop_signals():
        from sppo.cli.app import app
        from sppo.cli.exit_codes import standard_output

        with standard_output():
            app()


if __name__ == "__main__":
    main()
