"""What holds for all tests: one thread for BLAS, and signals as in a terminal, however the suite was started."""
import os
import signal

import pytest

# Before NumPy loads, which reads them: the bits of a product depend on the number of its threads, so a run within this
# process and one that train.py starts, which sets them too, would differ; and the tests run side by side anyway.
os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"))


def pytest_configure():
    """A script's background job has SIGINT ignored, and nohup ignores SIGHUP: whatever the tests start would inherit
    that and never see the signals that they send.  What has a handler here is at its default in a child; SIGHUP's does
    nothing, so that a suite under nohup still outlives its terminal."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
                            (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def out_text(capsys):
    """-> function: what was printed since it was last asked."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def err_text(capsys):
    """-> function: the same of standard error."""
    return lambda: capsys.readouterr().err


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    """The current folder is a new one, for the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("new"))
        yield
