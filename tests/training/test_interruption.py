import os
import signal
import subprocess
import sys

import pytest

from sppo.training.interruption import Interrupted, StopRequest

NUMBERS = (signal.SIGTERM, signal.SIGINT)


def handlers():
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_is_a_wish(number):
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.signal_name == number.name
        with pytest.raises(Interrupted, match=number.name):
            stop.check()


def test_handlers_come_back():
    before = handlers()
    with StopRequest():
        assert handlers() != before
    assert handlers() == before
    with pytest.raises(ValueError, match="other"), StopRequest():
        raise ValueError("other")
    assert handlers() == before


def test_a_second_signal_ends_the_process():
    code = """
import os, signal
from sppo.training.interruption import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.signal_name, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == "SIGTERM\n"
