"""``python -m sppo`` is the ``sppo`` command; its own ranks are started so."""

from sppo.cli.app import main

if __name__ == "__main__":
    main()
