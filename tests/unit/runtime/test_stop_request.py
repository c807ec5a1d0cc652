"""The first signal asks, the second ends."""

import os
import signal
import time

import pytest

from rlinf_vl.runtime.stop_request import Interrupted, StopRequest


@pytest.fixture
def request_():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = StopRequest()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_run_is_graceful_a_signal_ends_it(request_, number):
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert request_.number == number


def test_the_first_signal_asks_and_the_second_ends(request_):
    request_.graceful = True
    request_.check()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"):
        request_.check()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert request_.number == signal.SIGINT


def test_a_grace_period_ends_it_in_time(request_, caplog):
    request_.graceful, request_.grace_period = True, 0.5
    os.kill(os.getpid(), signal.SIGTERM)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        while time.monotonic() < began + 30:
            time.sleep(0.01)
    assert request_.number == signal.SIGTERM
    assert (
        "within 0.5 s (runner.grace_period)" in caplog.text
        and "0.5 s do not suffice" in caplog.text
    )


def test_a_run_that_ends_in_time_leaves_no_signal_behind():
    stop = StopRequest()
    with stop.installed():
        stop.graceful, stop.grace_period = True, 0.2
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.4)  # a signal now would end this process
