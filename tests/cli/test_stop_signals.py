"""Commands that receive a signal end with one line and the exit code, whatever they were doing."""

import signal
import subprocess
import sys

import pytest

NUMBERS = (signal.SIGTERM, signal.SIGINT)


def ended(code):
    """A process that runs ``code`` with the signals blocked, as it does from its first line on."""
    before = "import os, signal, sys, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, (15, 2))\n"
    words = [sys.executable, "-c", before + code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_the_command_is_loaded(number):
    code = f"""
os.kill(os.getpid(), {int(number)})
import sppo.__main__
sppo.__main__.main()
"""
    assert ended(code) == (128 + number, "", f"error: stopped by {number.name}\n")


@pytest.mark.parametrize("number", NUMBERS)
def test_what_was_begun_is_taken_back(number):
    code = f"""
from sppo.cli.stop_signals import stop_signals
with stop_signals():
    try:
        os.kill(os.getpid(), {int(number)})
        time.sleep(60)
    except Exception:
        print("taken for an error")
    finally:
        print("tidied")
"""
    assert ended(code) == (128 + number, "tidied\n", f"error: stopped by {number.name}\n")


@pytest.mark.parametrize("imported", ["", "import sys; sys.modules['tempfile'] = None"])
def test_an_import_that_lets_no_exception_pass(tmp_path, imported):
    """Also if what is half imported then is a module that other parts of the command use."""
    (tmp_path / "optional.py").write_text(
        f"{imported}\nimport os\nos.kill(os.getpid(), 15)\nfor _ in range(9): pass\n"
    )
    code = f"""
from sppo.cli.stop_signals import stop_signals
sys.path.insert(0, {str(tmp_path)!r})
with stop_signals():
    try:
        import optional
    except:
        print("taken for absent")
    time.sleep(9)
"""
    assert ended(code) == (143, "", "error: stopped by SIGTERM\n")


DROPPED = {
    "destructor": """
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), 15)
dropped = Dropped()
""",
    "callback": """
import weakref
class Dropped:
    pass
dropped = Dropped()
seen = weakref.ref(dropped, lambda _: os.kill(os.getpid(), 15))
""",
}


@pytest.mark.parametrize("of", DROPPED)
def test_what_python_ignores_exceptions_of(of):
    """The collector of garbage calls it, and may have taken long by then."""
    code = f"""
from sppo.cli.stop_signals import stop_signals
{DROPPED[of]}
with stop_signals():
    del dropped
    time.sleep(9)
"""
    assert ended(code) == (143, "", "error: stopped by SIGTERM\n")


def test_another_error_after_the_signal_is_its_consequence():
    code = """
from sppo.cli.stop_signals import stop_signals
with stop_signals():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except:
        raise AttributeError("no such name")
"""
    assert ended(code) == (143, "", "error: stopped by SIGTERM\n")


def test_a_second_signal_ends_the_tidying():
    code = """
from sppo.cli.stop_signals import stop_signals
with stop_signals():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
"""
    assert ended(code)[0] == -signal.SIGINT
