"""What many tests need.

    from cases import parametrize, refusal, rows, value_error, write
"""
import pathlib

import pytest

parametrize = pytest.mark.parametrize
once_a_module = pytest.fixture(scope="module")


def value_error(words):
    """with value_error("a pattern"): the block raises a ValueError whose sentence holds it."""
    return pytest.raises(ValueError, match=words)


def refusal(function, *arguments):
    """-> the sentence with which a call is refused."""
    with pytest.raises(ValueError) as error:
        function(*arguments)
    return str(error.value)


def read(path):
    """The bytes of a file."""
    return pathlib.Path(path).read_bytes()


def write(path, content):
    """Write a file of this text, or of these bytes."""
    data = content if isinstance(content, bytes) else content.encode()
    pathlib.Path(path).write_bytes(data)


def rows(table):
    """The cases of a table, a line each; a bar between two cells, each without the white space around it.

    >>> rows('''--steps 0  | steps must be
    ...         --lr x     | lr must be''')
    [('--steps 0', 'steps must be'), ('--lr x', 'lr must be')]
    """
    return [tuple(cell.strip() for cell in line.split(" | ")) for line in table.strip().splitlines()]


def put(monkeypatch, where, **values):
    """Put these values in place of those of a module or a class, until the test ends."""
    for name, value in values.items():
        monkeypatch.setattr(where, name, value)
