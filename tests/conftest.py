"""What holds for all tests: signals as in a terminal, however the suite was started."""
import signal


def pytest_configure():
    """A script's background job has SIGINT ignored, and nohup ignores SIGHUP: whatever the tests start would inherit
    that and never see the signals that they send.  What has a handler here is at its default in a child; SIGHUP's does
    nothing, so that a suite under nohup still outlives its terminal."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
                            (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
