"""fetch_data.sh against a server on this machine that behaves well, and badly."""
import http.server
import os
import re
import shutil
import subprocess
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLAY = b"".join(b"%07d Enter a citizen, speaking.\n" % i for i in range(16000))         # 592,000 bytes

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="curl is missing")


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, ranged = self.server, self.headers.get("Range")
        server.requests.append((ranged, self.headers.get("User-Agent")))
        mode, start = server.modes.pop(0), 0
        if mode == "missing":
            self.send_error(404)
            return
        if mode == "stall":
            time.sleep(3)
            return
        body = {"page": b"\n <!DOCTYPE html><html>Log in</html>" + b" " * 600_000, "short": PLAY[:1000]}.get(mode, PLAY)
        if ranged and mode != "no ranges":
            start = int(re.fullmatch(r"bytes=(\d+)-", ranged)[1])
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:start + 200_000 if mode == "cut" else None])


class Place:
    """A folder with the script in it, and a server that answers each request as the next of `modes` says."""
    def __init__(self, folder, server):
        self.folder, self.server = folder, server
        self.file, self.part = folder / "data" / "tiny.txt", folder / "data" / "tiny.txt.part"
        self.url = f"http://127.0.0.1:{server.server_port}/input.txt"
        shutil.copy(os.path.join(ROOT, "fetch_data.sh"), folder)

    def run(self, *words, **environment):
        """-> (exit code, standard output, standard error), from another folder than the script's."""
        environment = {**os.environ, "TINY_URL": self.url, "no_proxy": "*", "NO_PROXY": "*", **environment}
        done = subprocess.run([self.folder / "fetch_data.sh", *words], cwd="/", env=environment, capture_output=True,
                              text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    def fails(self, message, **environment):
        code, _, err = self.run("tiny", **environment)
        assert (code, err.count("\n")) == (2, 1) and err.startswith("error: ") and message in err, err
        assert not self.file.exists()


@pytest.fixture
def place(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.modes = [], []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield Place(tmp_path, server)
    server.shutdown()
    server.server_close()


def test_complete_and_only_once(place):
    place.server.modes = ["whole"]
    assert place.run("tiny")[::2] == (0, "")
    assert place.file.read_bytes() == PLAY
    assert os.listdir(place.folder / "data") == ["tiny.txt"]
    code, out, _ = place.run("tiny")
    assert code == 0 and "nothing to fetch" in out and len(place.server.requests) == 1
    assert place.server.requests[0][0] is None and "NanoEuler" in place.server.requests[0][1]


def test_a_cut_connection_is_resumed(place):
    place.server.modes = ["cut", "cut", "whole"]
    place.fails("run this again to go on")
    assert place.part.read_bytes() == PLAY[:200_000]
    place.fails("run this again to go on")
    assert place.run("tiny")[0] == 0
    assert place.file.read_bytes() == PLAY and not place.part.exists()
    assert [ranged for ranged, _ in place.server.requests] == [None, "bytes=200000-", "bytes=400000-"]


def test_a_server_that_cannot_resume(place):
    place.server.modes = ["cut", "no ranges", "no ranges"]
    place.fails("run this again to go on")
    assert place.run("tiny")[0] == 0
    assert place.file.read_bytes() == PLAY


def test_killed_between_the_last_byte_and_the_rename(place):
    place.server.modes = ["whole", "whole"]     # the first answers that nothing is left (416); then it starts anew
    place.part.parent.mkdir()
    place.part.write_bytes(PLAY)
    assert place.run("tiny")[0] == 0
    assert place.file.read_bytes() == PLAY and not place.part.exists()


@pytest.mark.parametrize("mode, message", [("missing", "error: 404"), ("page", "gave a web page instead of the text"),
                                           ("short", "gave 1000 bytes, fewer than the 500000")])
def test_a_wrong_answer_is_refused(place, mode, message):
    place.server.modes = [mode, "whole"]
    place.fails(message)
    assert not place.part.exists()
    assert place.run("tiny")[0] == 0 and place.file.read_bytes() == PLAY


def test_no_network(place):
    place.fails("run this again to go on when the network is back", TINY_URL="http://127.0.0.1:9/input.txt")
    place.fails("Could not resolve host", TINY_URL="http://no-such-host.invalid/input.txt", FETCH_TIMEOUT="10")
    assert not list((place.folder / "data").iterdir())


def test_time_limit(place):
    place.server.modes = ["stall"]
    began = time.monotonic()
    place.fails("timed out", FETCH_TIMEOUT="1")
    assert time.monotonic() - began < 2.9


def test_an_unwritable_folder(place):
    (place.folder / "data").write_text("a file in the way")
    code, _, err = place.run("tiny")
    assert (code, err) == (2, "error: data/ cannot be written to.\n")


@pytest.mark.parametrize("words, environment, code, message", [
    ((), {}, 2, "usage: ./fetch_data.sh"), (("--help",), {}, 0, "usage: ./fetch_data.sh"),
    (("novels",), {}, 2, "error: there is no corpus 'novels'"), (("tiny", "novels"), {}, 2, "no corpus 'novels'"),
    (("tiny",), {"FETCH_TIMEOUT": "soon"}, 2, "error: FETCH_TIMEOUT must be a whole number of seconds")])
def test_words(place, words, environment, code, message):
    found, out, err = place.run(*words, **environment)
    assert found == code and message in (out if code == 0 else err)
    assert not place.server.requests and not place.file.exists()
