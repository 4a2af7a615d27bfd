"""fetch_data.sh against a server on this machine that behaves well, and badly."""
import contextlib
import functools
import hashlib
import http.server
import json
import os
import pathlib
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from cases import parametrize

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED = pathlib.Path(ROOT).parent / "shared" / "data"
PLAY = b"".join(b"%07d Enter a citizen, speaking.\n" % i for i in range(16000))         # 560,000 bytes
PAGE = b" \t\r\n\v\f" * 200_000 + b"\xef\xbb\xbf\r\n\xef\xbb\xbf <!DOCTYPE html><html>Log in</html>"
PACKED = b"\x1f\x8b\x08\0" + hashlib.shake_128(b"as if gzip had made it").digest(600_000)
SEPARATOR = "\n\n<|endoftext|>\n\n"
DEADLINE = 600                                  # seconds after which a hang ends; no verdict depends on the speed of
#                                                 anything: where two things must meet, one waits for the other

# The real curl with further options, of two that are alike the last one counts: however slow this machine is.
PATIENT_CURL = f"exec '{shutil.which('curl')}' \"$@\" --speed-time {10 * DEADLINE} --connect-timeout {10 * DEADLINE}"

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="curl is missing")


def until(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_on(descriptor):
    """What comes next, b"" at the end: when nobody has the other end open any more."""
    assert select.select([descriptor], [], [], DEADLINE)[0]
    return os.read(descriptor, 1000)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each request as the next of `place.modes` says, and as it should when there is none left."""
    def log_message(self, *_):
        pass

    def hold(self):
        """Wait until the test releases this answer, or ends."""
        self.wfile.flush()
        event = threading.Event()
        self.server.place.held.append(event)
        event.wait()

    def send_anything(self, code, body, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        with contextlib.suppress(ConnectionError):      # whoever asked may have gone
            self.answer()

    def answer(self):
        place = self.server.place
        ranged = self.headers.get("Range")
        place.requests.append((self.path, ranged, self.headers.get("User-Agent")))
        mode = place.modes.pop(0) if place.modes else "whole"
        body = mode if isinstance(mode, bytes) else place.files.get(self.path)
        start = int(ranged[len("bytes="):-1]) if ranged and mode != "no ranges" else 0
        if isinstance(mode, int):               # this answer, with a text that is as good as the right one
            self.send_anything(mode, PLAY)
        elif body is None:
            self.send_error(404)
        elif mode == "elsewhere":
            self.send_anything(302, b"Moved.\n" * 100_000, Location=self.path)
        elif mode in ("endless", "huge"):       # without an announced length, and with one
            headers = {"Content-Length": "5000000001"} if mode == "huge" else {}
            self.send_anything(200, PLAY * 40, **headers)       # as good as endless: then one waits for more
            self.hold()
        elif start and start >= len(body):
            self.send_error(416)
        else:
            headers = {"Content-Length": str(len(body) - start)}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            middle = start + 200_000
            self.send_anything(206 if start else 200, body[start:middle], **headers)
            if mode == "held":
                self.hold()
            if mode != "cut":
                self.wfile.write(body[middle:])


class Place:
    """A folder to fetch into, another one in it with the script, and the server's files: a play, books by number, ..."""
    def __init__(self, folder, server):
        self.folder = folder
        server.place = self
        vars(self).update(requests=[], modes=[], files={}, held=[])
        self.data = folder / "data"
        self.file = self.data / "tiny.txt"
        self.part = self.data / "tiny.txt.part"
        self.base = f"http://127.0.0.1:{server.server_port}"
        self.path = f"{folder}/bin:{os.environ['PATH']}"
        self.started = []
        self.stand_in("curl", PATIENT_CURL)
        self.stand_in("python3", f"exec '{sys.executable}' \"$@\"")
        self.files["/input.txt"] = PLAY
        (folder / "code").mkdir()
        self.script = shutil.copy(os.path.join(ROOT, "fetch_data.sh"), folder / "code")

    def stand_in(self, name, text, folder="bin"):
        """A shell script that comes before the real command of this name."""
        path = self.folder / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, *words, preexec_fn=None, **environment):
        """-> (exit code, standard output, standard error), from another folder than the script's."""
        process = self.start(*words, preexec_fn=preexec_fn, **environment)
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err

    def makes(self, word="tiny", **environment):
        """What the word asks for is made, without a warning; the play is whole.  -> standard output"""
        code, out, err = self.run(word, **environment)
        assert (code, err) == (0, ""), err
        assert word != "tiny" or self.file.read_bytes() == PLAY
        return out

    def fails(self, message, *words, **environment):
        """One sentence on standard error and exit code 2; no file has its final name."""
        before = self.names()
        code, _, err = self.run(*(words or ("tiny",)), **environment)
        assert (code, err.count("\n")) == (2, 1) and err.startswith("error: ") and message in err, err
        assert all(name.endswith((".part", ".new", ".settings")) for name in self.names() - before)

    def names(self):
        """The files; what a killed run leaves of its lock is none."""
        names = {str(path.relative_to(self.data)) for path in self.data.rglob("*") if path.is_file()}
        return {name for name in names if not name.startswith("fetch.lock/")}

    def start(self, *words, pass_fds=(), preexec_fn=None, **environment):
        self.started.append(subprocess.Popen(
            [self.script, *words], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, pass_fds=pass_fds, preexec_fn=preexec_fn,
            env={**os.environ, "TINY_URL": f"{self.base}/input.txt", "GUTENBERG_URL": f"{self.base}/epub",
                 "FINEWEB_URL": "it's mine", "ALPACA_URL": f"{self.base}/alpaca.json",
                 "SMOLLM2_URL": f"{self.base}/smollm2", "FETCH_PAUSE": "0", "no_proxy": "*", "PATH": self.path,
                 **environment}))
        return self.started[-1]

    def interrupt(self, number, ready, *words, **environment):
        """Send the signal to the script, and to nothing that it has started, when `ready()` is true.
        -> (exit code, standard error, function that returns b"" when all that it has started has ended)"""
        read, write = os.pipe()                 # they inherit it
        process = self.start(*words, pass_fds=(write,), **environment)
        os.close(write)
        until(lambda: ready() or process.poll() is not None)
        process.send_signal(number)
        _, err = process.communicate(timeout=DEADLINE)
        return process.returncode, err, functools.partial(read_on, read)

    def release(self, number):
        """Let the answer that was held as this one, counted from 0, go on."""
        until(lambda: len(self.held) > number)
        self.held[number].set()

    def ranges(self):
        return [ranged for _, ranged, _ in self.requests]

    def paths(self):
        return [path for path, _, _ in self.requests]

    def some_has_come(self):
        return self.part.exists() and self.part.stat().st_size > 0

    def add_book(self, number, text, encoding="utf-8"):
        self.files[f"/epub/{number}/pg{number}.txt"] = text.encode(encoding)

    def add_books(self, *numbers):
        for number in numbers:
            self.add_book(number, HEAD + START + BODY + END)

    def book(self, number):
        return self.data / "books" / f"{number}.txt"

    def books(self):
        """-> the documents of the file of all books"""
        return (self.data / "books.txt").read_text("utf-8").removesuffix("\n").split(SEPARATOR)


@pytest.fixture
def place(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False      # a stalled answer does not hold up the next test
    place = Place(tmp_path, server)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield place
    for event in place.held:
        event.set()
    for process in place.started:
        if process.poll() is None:              # the test has failed
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    server.shutdown()
    server.server_close()


# ---------------------------------------------------------------------------------------------------------------------
# One file: the play
# ---------------------------------------------------------------------------------------------------------------------
def test_complete_and_only_once(place):
    place.makes()
    assert os.listdir(place.data) == ["tiny.txt"]
    assert "nothing to fetch" in place.makes()
    (_, ranged, agent), = place.requests
    assert ranged is None and "NanoEuler" in agent
    assert os.listdir(place.folder / "code") == ["fetch_data.sh"]       # all into the folder where it was called


def test_a_cut_connection_is_resumed(place):
    place.modes = ["cut", "cut", "whole"]
    for size in 200_000, 400_000:
        place.fails("run this again to go on")
        assert place.part.read_bytes() == PLAY[:size]
    place.makes()
    assert place.ranges() == [None, "bytes=200000-", "bytes=400000-"]


def test_a_server_that_cannot_resume(place):
    place.modes = ["cut", "no ranges", "no ranges"]
    place.fails("run this again to go on")
    place.makes()
    place.file.unlink()
    place.modes = [416, 416]             # to whom has nothing yet this is no reason to start anew, for ever
    place.fails("cannot be fetched (The requested URL returned error: 416)")
    assert place.modes.pop()
    place.part.write_bytes(PLAY)                # killed between the last byte and the rename: nothing is left (416)
    place.makes()
    assert place.names() == {"tiny.txt"}


NOT_THAT = "bytes that are not what data/tiny.txt must be (text, at least 500000 bytes); nothing was kept"


@parametrize("mode, message", [(PAGE, "gave a web page ("), (b"", f"gave 0 {NOT_THAT}"),
                                           (PACKED, f"gave 600004 {NOT_THAT}"),
                                           (bytes(len(PLAY)), f"gave 560000 {NOT_THAT}")], ids=range(4))
def test_a_wrong_answer_is_refused(place, mode, message):
    place.modes = [mode]
    place.fails(message)
    assert place.names() == set()


@parametrize("code", [304, 203])
def test_only_the_answer_200_is_kept(place, code):
    """Not the text that comes with another one, nor half a text that was there before and to which nothing came."""
    place.data.mkdir()
    for there in b"", PLAY[:550_000]:
        place.part.write_bytes(there)
        place.modes = [code, code]       # twice where curl sees that the first one is not what is left
        place.fails(f"answered {code} instead of 200; nothing was kept")
        assert place.names() == set()


def test_a_redirect_is_followed_and_its_own_text_is_not_kept(place):
    place.modes = ["elsewhere", "cut", "elsewhere", "whole"]
    place.fails("run this again to go on")
    assert place.part.read_bytes() == PLAY[:200_000]
    place.makes()
    assert place.ranges() == [None, None, "bytes=200000-", "bytes=200000-"]


def test_an_address_is_taken_as_it_is(place):
    """To curl braces and brackets are otherwise many addresses."""
    place.files["/{a,b}[1-2].txt"] = PLAY
    place.makes(TINY_URL=f"{place.base}/{{a,b}}[1-2].txt")
    place.file.unlink()
    (place.folder / "[it].txt").write_bytes(PLAY)
    place.makes(TINY_URL=f"file://{place.folder}/[it].txt")


TOO_LARGE = "has more than the {} bytes that data/{} may have; nothing was kept"


def test_an_endless_answer_is_refused(place):
    place.stand_in("curl", PATIENT_CURL + " --max-filesize 9000000000")         # so curl limits nothing
    place.modes = ["endless"]
    place.fails(TOO_LARGE.format(20_000_000, "tiny.txt"))
    assert place.names() == set()


def test_no_network_is_one_sentence(place):
    # No name server is asked for a part of more than 63 letters, which might take its time or know every name.
    place.fails("Could not resolve host", "books", GUTENBERG_URL=f"http://{'x' * 64}.invalid")


def test_time_limit(place):
    place.modes = ["held"]               # until this test ends, and the curl is patient: it would hang
    place.fails("run this again to go on when the network is back", FETCH_TIMEOUT="1")


def test_an_unwritable_folder(place):
    (place.folder / "out").write_text("a file in the way")
    assert place.run("smollm2")[2] == "error: out/smollm2/ cannot be written to.\n"
    place.data.rmdir()
    place.data.write_text("a file in the way")
    assert place.run("tiny")[::2] == (2, "error: data/ cannot be written to.\n")


def test_of_a_long_complaint_one_line_is_shown(place):
    place.stand_in("curl", "printf 'curl: (60) SSL: no such issuer\\nMore details:\\n\\nhere\\n' >&2; exit 60")
    place.fails("input.txt cannot be fetched (SSL: no such issuer); run this again to go on")


@parametrize("missing", ["curl", "python3"])
def test_a_missing_tool_is_named(place, missing):
    for name in {"bash", "dirname", "curl", "python3"} - {missing}:
        place.stand_in(name, f"exec '{shutil.which(name)}' \"$@\"", folder="few")
    place.fails(f"error: {missing} is missing; install it.", PATH=f"{place.folder}/few")


def limit_file_size():
    """As good as a full disk: no file grows beyond 100,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_full_disk(place):
    place.fails("is there room on the disk?", preexec_fn=limit_file_size)
    assert place.names() == {"tiny.txt.part"}
    place.makes()


@parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_at_once_and_what_has_come_stays(place, number):
    place.modes = ["held", "whole"]      # held until this test ends: a script that waited for curl would hang
    code, err, rest = place.interrupt(number, place.some_has_come, "tiny")
    assert (code, err, rest()) == (130, "Interrupted; run this again to go on.\n", b"")
    assert place.names() == {"tiny.txt.part"} and not (place.data / "fetch.lock").exists()
    place.makes()
    assert place.ranges()[1].startswith("bytes=")


def test_the_curl_of_a_killed_run_does_no_harm(place):
    """Its rest comes while the next run, which goes on with what it has written, is at work."""
    place.modes = ["held", "held"]
    *_, rest = place.interrupt(signal.SIGKILL, lambda: place.held and place.some_has_come(), "tiny")
    size = place.part.stat().st_size
    second = place.start("tiny")
    until(lambda: len(place.held) == 2 and place.part.stat().st_size > size)
    place.release(0)
    assert rest() == b"" and PLAY.startswith(place.part.read_bytes())
    place.release(1)
    assert second.communicate(timeout=DEADLINE)[1] == "" and place.file.read_bytes() == PLAY
    assert os.listdir(place.data) == ["tiny.txt"] and place.ranges()[1]


def test_two_runs_at_once(place):
    place.modes = ["held"]
    first = place.start("tiny")
    until(lambda: place.held)
    place.fails(f"another run (process {first.pid}) is at work; wait for its end", "all")
    place.release(0)
    assert first.communicate(timeout=DEADLINE)[1] == "" and os.listdir(place.data) == ["tiny.txt"]
    place.file.unlink()
    lock = place.data / "fetch.lock"            # of a run that has started this very moment
    lock.mkdir()
    place.fails("another run (process unknown) is at work; wait for its end, or delete data/fetch.lock.")
    assert lock.exists()
    (lock / "owner").write_text("999999999\n")  # of a run that was killed: no system numbers its processes so high
    assert place.run("tiny")[0] == 0 and os.listdir(place.data) == ["tiny.txt"]


def test_usage(place):
    code, _, err = place.run()
    assert code == 2 and err.startswith("usage: ./fetch_data.sh")
    code, out, _ = place.run("--help")
    assert (code, out) == (0, err) and "WEB_MB=2000 " in out and "books         169 classics" in out
    assert "data/ and out/ of the current folder" in out


def test_a_wrong_word_or_setting(place):
    for word, name, value, meaning in [
            ("novels", "WORD", "novels", "one of tiny, books, web, instructions, preferences, blimp, smollm2, all"),
            ("tiny", "FETCH_TIMEOUT", "soon", "a whole number of seconds"),
            ("books", "FETCH_PAUSE", "-1", "a whole number"), ("books", "BOOK_IDS", "Emma", "Project Gutenberg's numbers"),
            ("books", "BOOK_IDS", " ", "Project Gutenberg's"), ("web", "WEB_MB", "0", "a whole number of megabytes, at least 1"),
            ("web", "WEB_LANGUAGE_SCORE", "0.8; DROP", "a number from 0 to 1")]:
        code, _, err = place.run("tiny", word, **{name: value})
        assert code == 2 and err.startswith(f"error: {name} must be {meaning}") and err.endswith(f", not '{value}'.\n")
    assert not place.requests and not place.data.exists()


# ---------------------------------------------------------------------------------------------------------------------
# Books
# ---------------------------------------------------------------------------------------------------------------------
PROSE = ["It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when it was "
         f"checked by a violent gust of wind which swept up the streets of ward {i}--for it is in London that our "
         "scene of mother-in-law-to-be jack-in-the-box merry-go-round counterrevolutionaries lies, rattling along the house-tops. " * 3 + "And so on."
         for i in range(20)]
VERSE = "Tell me not, in mournful numbers,\n  Life is but an empty dream!\nFor the soul is dead that slumbers,\n" \
        "  And things are not what they seem.\n\nOf Man's first disobedience, and the fruit\n" \
        "Of that forbidden tree whose mortal taste\nBrought death into the World, and all our woe,"
LETTER = "    Dear Madam,\n        I have the honour to be\n    yours, etc."
BODY = "THE HEADING\n\n" + "\n\n".join(textwrap.fill(text, 72, break_long_words=False) for text in PROSE[:10]) + \
       f"\n\n\n{VERSE}\n\n{LETTER}\n\n\n\nCHAPTER II\nIn Which It Goes On\n\n" + \
       "\n\n".join(textwrap.fill(text, 70, initial_indent="  ", break_long_words=False) for text in PROSE[10:])
STRIPPED = "\n\n".join(["THE HEADING", *PROSE[:10], VERSE, LETTER, "CHAPTER II\nIn Which It Goes On", *PROSE[10:]]) + "\n"
HEAD = "The Project Gutenberg EBook of A Night, by Nobody\n\nThis eBook is for the use of anyone.  See www.pg.org\n\n"
LICENCE = "\n\n*** START: FULL LICENSE ***\n\nTHE FULL PROJECT GUTENBERG LICENSE\n" + "Section 1.  Terms.\n" * 300
START = "*** START OF THE PROJECT GUTENBERG EBOOK A NIGHT ***\n\n"
END = "\n\n*** END OF THE PROJECT GUTENBERG EBOOK A NIGHT ***\n"
SMALL_PRINT = "THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n"

# Name of the irregularity -> (what stands before the book, what after it)
FORMS = {
    "as today": (HEAD + START, END + LICENCE),
    "no spaces, two lines": (HEAD + "***START OF THE PROJECT GUTENBERG EBOOK A NIGHT IN\nLONDON***\n\n\n",
                             "\n\n***END OF THE PROJECT GUTENBERG EBOOK A NIGHT IN\nLONDON***\n" + LICENCE),
    "two lines, early": (HEAD + "*** START OF THIS PROJECT\nGUTENBERG EBOOK A NIGHT ***\n\n\n",
                         "\n\nEND OF THIS PROJECT\nGUTENBERG EBOOK A NIGHT\n" + LICENCE),
    "stars apart": (HEAD + START.replace("***", "* * *"), END.replace("***", "* * *") + LICENCE),
    "no stars": (HEAD + START.replace("*", "").replace(" PROJECT", "  PROJECT"), END.replace("*", "-") + LICENCE),
    "within a line": (HEAD + "This is it.  " + START, "\n\nThat was it.  " + END.lstrip() + LICENCE),
    "licence alone": (HEAD + START, LICENCE),
    "licence's title alone": (HEAD + START, LICENCE.replace("*** START: FULL LICENSE ***\n\n", "")),
    "this, and credits": (HEAD + START.replace("THE", "THIS") + "\n\nProduced by A. Reader and\nthe Online Distributed "
                          "Proofreading Team\n\n\nNote: Project\n      Gutenberg also has it in HTML\n\nScanned by A. "
                          "Reader\n\nTo our proofreaders\n\nSee http://www.pgdp.net\n\n",
                          "\n\nEnd of the Project Gutenberg EBook of A Night, by Nobody\n" + END + LICENCE),
    "small print before": (("**The Project Gutenberg Etext of A Night**\n\n***START**THE SMALL PRINT!**FOR PUBLIC "
                           f"DOMAIN ETEXTS**START***\nWhy?\n\n*END*{SMALL_PRINT}\n\nThis etext was prepared by A. "
                           "Reader, reader@example.org\n\n"),
                           "\n\nEnd of Project Gutenberg's A Night, by Nobody\n"),
    "small print within": (HEAD + START + f"***Start**The Small Print! ***\n\n*END {SMALL_PRINT}\n",
                           "\n\nEnd of this Project Gutenberg Etext\n"),
    "small print behind": (HEAD + START, ("\n\n***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nTerms.\n"
                           f"*END*{SMALL_PRINT}")),
    "never closed": (HEAD + "*** START OF THE PROJECT GUTENBERG EBOOK A NIGHT\n\n", END),
    "the licence first": (LICENCE + HEAD + START, END),
    "no end": (HEAD + START, "\n\n"),
    "the end": (HEAD + START, "\n\nThe End of Project Gutenberg's A Night\n\n" + LICENCE),
}


# After each line stand some that would pass for a separator: the book is as if they were not there.
PASS_FOR_SEPARATORS = "\r\n<|endoftext|>\r\n  <|endoftext|>\r\n<|endoftext|> \t\r\n\t<|endoftext|>\r\r\n"


def test_books_of_every_form(place):
    for number, (before, after) in enumerate(FORMS.values(), 100):
        place.add_book(number, before + BODY + after)
    expected = dict.fromkeys(range(100, 100 + len(FORMS)), STRIPPED)
    for number, word, line_end, encoding in [
            (200, "stürmische", "\r\n", "latin-1"), (201, "stürmische", "\r\n", "utf-8-sig"),
            (202, "stürmische \u201d", "\n", "cp1252"), (203, "st\0ormy", "\r\r\n", "utf-8"),
            (204, "stormy", "\r", "utf-8"), (205, "<|endoftext|>", PASS_FOR_SEPARATORS, "utf-8")]:
        text = HEAD + START + BODY.replace("stormy", word) + END
        place.add_book(number, text.replace("\n", line_end), encoding)
        expected[number] = STRIPPED.replace("stormy", word.replace("\0", ""))
    order = [201, *expected, 100]               # the list's order; twice named is once taken
    out = place.makes("books", BOOK_IDS="\n  " + ", ".join(map(str, order)))
    for number, text in expected.items():
        assert place.book(number).read_bytes() == text.encode(), number
    assert place.books() == [expected[number][:-1] for number in dict.fromkeys(order)]
    assert place.names() == {"books.txt", *(f"books/{number}.txt" for number in expected)}
    assert f"Book 3 of {len(expected)}:\nFetching" in out

    place.makes("books", BOOK_IDS="100 200")    # another list: another file, nothing fetched
    assert len(place.books()) == 2 and len(place.requests) == len(expected)


REAL = 14881, 15122, 20170
BETWEEN = r"(?s)START OF TH[EI]S? PROJECT GUTENBERG[^*]*\*\*\*(.*?)(\*\*\*END OF THE PROJECT|End of the Project Gutenberg)"


@pytest.mark.skipif(not (SHARED / "raw_gutenberg").exists(), reason="the real texts that this test reads are no part of the repository")
def test_books_of_project_gutenberg(place):
    """Each paragraph of the book is there, with the same letters; nothing else is.  Many are joined."""
    for number in REAL:
        path, = (SHARED / "raw_gutenberg").glob(f"{number}*")
        place.files[f"/epub/{number}/pg{number}.txt"] = path.read_bytes()
        place.makes("books", BOOK_IDS=str(number))
        raw = re.search(BETWEEN, path.read_text("latin-1"))[1]
        expected = [paragraph for paragraph in re.split(r"\n\s*\n", raw) if paragraph.strip()
                    and not re.search(r"Gutenberg|Proofreading", paragraph)]
        found = place.book(number).read_text("utf-8").removesuffix("\n").split("\n\n")
        assert ["".join(text.split()) for text in found] == ["".join(text.split()) for text in expected]
        assert sum(len(text) > 200 and "\n" not in text for text in found) > 50


def test_books_that_cannot_be_had(place):
    """One of ten may be missing, and no more; then the file of all books is the one that was made before."""
    ids = "1 2 3 4 7 5 6 8 9 10"
    place.add_books(1, 2, 3, 4, 7, 8, 9, 10)
    place.add_book(5, HEAD + BODY + END)                                # no line that says where it starts
    place.add_book(6, HEAD + START + "Stolen." + END + LICENCE)
    place.modes = ["whole", 404, PAGE, "endless"]
    code, _, err = place.run("books", BOOK_IDS=ids)
    *warnings, error = err.splitlines()
    no_book = "must be (book, at least 1000 bytes); nothing was kept."
    reasons = ["error: 404", "gave a web page", TOO_LARGE.format(20_000_000, "books/4.txt"), no_book, no_book]
    assert code == 2 and len(warnings) == len(reasons)
    for number, line, reason in zip(range(2, 7), warnings, reasons):
        assert line.startswith(f"warning: book {number} is left out: ") and reason in line
    assert error.startswith("error: 5 of 10 books are missing (2 3 4 5 6), too many")
    assert place.names() == {f"books/{number}.txt" for number in (1, 7, 8, 9, 10)}

    place.add_books(5)
    place.requests.clear()
    code, _, err = place.run("books", BOOK_IDS=ids)
    assert code == 0 and "warning: 1 of 10 books are missing (6); run this again" in err
    assert place.paths() == [f"/epub/{number}/pg{number}.txt" for number in (2, 3, 4, 5, 6)]
    place.book(10).unlink()
    place.files.clear()
    assert "error: 2 of 10 books are missing (6 10), too many" in place.run("books", BOOK_IDS=ids)[2]
    assert place.books() == [STRIPPED[:-1]] * 9


def test_five_misses_in_a_row_end_it_and_a_refusal_does_at_once(place):
    code, out, err = place.run("books")
    assert "Book 1 of 169:" in out and code == 2
    assert err.splitlines()[-1].startswith("error: five books in a row could not be had")
    assert len(place.requests) == 5
    place.modes = [503]
    place.fails("the server refuses for now", "books")


def test_a_pause_after_each_book(place):
    place.add_books(1, 2)
    place.stand_in("sleep", 'echo "$*" $(ls data/books) >>slept')
    for _ in range(2):                          # the second time nothing is fetched, and there is no pause
        place.makes("books", BOOK_IDS="1 2", FETCH_PAUSE="7")
        assert (place.folder / "slept").read_text() == "7 1.txt\n7 1.txt 2.txt\n"


def test_books_on_a_full_disk(place):
    place.add_book(1, HEAD + START + "\xe9" * 90_000 + END, "latin-1")          # as UTF-8 it grows
    place.fails("is there room on the disk?", "books", BOOK_IDS="1", preexec_fn=limit_file_size)
    for number in (1, 2):                       # two books that are there do not fit into one file
        place.book(number).write_text("It is said.\n" * 6000)
    place.fails("data/books.txt.part cannot be written; is there room on the disk?", "books", BOOK_IDS="1 2",
                preexec_fn=limit_file_size)


# ---------------------------------------------------------------------------------------------------------------------
# Instructions
# ---------------------------------------------------------------------------------------------------------------------
RECORDS = [{"instruction": f'Say "output": {i}', "input": "", "output": "It is said." * 10} for i in range(3000)]
ALPACA = json.dumps(RECORDS, indent=4).encode()    # half a megabyte


def test_instructions(place):
    place.files["/alpaca.json"] = ALPACA
    place.modes = ["huge", json.dumps([*RECORDS, {"instruction": "x", "response": "y"}]).encode()]
    place.fails(TOO_LARGE.format(200_000_000, "instructions.json"), "instructions")
    place.fails("bytes that are not what data/instructions.json must be", "instructions")
    place.makes("instructions")
    assert (place.data / "instructions.json").read_bytes() == ALPACA and place.names() == {"instructions.json"}


# ---------------------------------------------------------------------------------------------------------------------
# A model
# ---------------------------------------------------------------------------------------------------------------------
BYTES = hashlib.shake_128(b"as if they were weights").digest(1_200_000)
HEADER = json.dumps({                           # the last tensor of the file is not the last one of the header
    "__metadata__": {"format": "pt"},
    'a "name": [': {"dtype": "BF16", "shape": [100_000, 5], "data_offsets": [200_000, 1_200_000]},
    "model.norm.weight": {"dtype": "BF16", "shape": [100_000], "data_offsets": [0, 200_000]}}).encode()
MODEL = len(HEADER).to_bytes(8, "little") + HEADER + BYTES
JSON = {"config.json": b'{"model_type": "llama", "layers": []}',
        "tokenizer.json": b'{"model": {"vocab": {"a": 0}}}',
        "tokenizer_config.json": b'{"eos_token": "<|im_end|>"}\n'}
FILES = {**JSON, "chat_template.jinja": b"{% for message in messages %}{% endfor %}",
         "model.safetensors": MODEL}            # in the order of the requests
NOT_THE_FILE = "bytes that are not what out/smollm2/{} must be ("


@pytest.fixture
def smollm2(place):
    """The place, whose files are the model's."""
    place.data = place.folder / "out" / "smollm2"
    place.part = place.data / "model.safetensors.part"
    for name, body in FILES.items():
        place.files[f"/smollm2/{name}"] = body
    return place


def contents(smollm2):
    return {name: (smollm2.data / name).read_bytes() for name in smollm2.names()}


def test_smollm2_complete_and_only_once(smollm2):
    assert smollm2.makes("smollm2").endswith("\nTalk to it: python chat.py --model out/smollm2\n")
    assert contents(smollm2) == FILES
    assert smollm2.paths() == [f"/smollm2/{name}" for name in FILES]
    assert smollm2.makes("smollm2").count("nothing to fetch") == 4
    (smollm2.data / "config.json").unlink()     # what is missing is fetched, and nothing else
    smollm2.makes("smollm2")
    assert smollm2.paths()[5:] == ["/smollm2/config.json"]


def test_smollm2_without_a_chat_template(smollm2):
    """It is not asked for again.  A wrong one stops the run, which goes on where it stopped."""
    smollm2.modes = ["whole", "whole", "whole", PACKED]
    assert NOT_THE_FILE.format("chat_template.jinja") in smollm2.run("smollm2")[2]
    assert contents(smollm2) == JSON
    del smollm2.files["/smollm2/chat_template.jinja"]
    for _ in range(2):
        smollm2.makes("smollm2")
        assert contents(smollm2) == {**JSON, "model.safetensors": MODEL} and len(smollm2.requests) == 6


def test_smollm2_wrong_files(smollm2):
    smollm2.modes = [b'["a", "list"]']
    smollm2.fails(NOT_THE_FILE.format("config.json"), "smollm2")
    smollm2.modes = ["whole"] * 4
    for wrong in MODEL[:-1], MODEL + b"\0", (2**64 - 1).to_bytes(8, "little") + MODEL[8:]:
        smollm2.modes.append(wrong)
        assert NOT_THE_FILE.format("model.safetensors") in smollm2.run("smollm2")[2]
        assert smollm2.names() == set(FILES) - {"model.safetensors"}


# ---------------------------------------------------------------------------------------------------------------------
# Web
# ---------------------------------------------------------------------------------------------------------------------
ROWS = 1900                                     # so the first row of the second slice passes


@functools.cache
def page(i):
    """Row i of the Parquet file: (text, language, language_score, score), and the document that it is to become."""
    plain = f"Page {i}.\n" + f"{i} it is said.\n" * 400 + "The end."
    mark = "<|endoftext|>"
    text, document = {1: (plain.replace("\n", "\r\n"), plain),
                      2: (f"{mark}\n{mark}\n{plain}\r\n{mark}\r\nand more\n{mark}", f"{plain}\nand more"),
                      3: (f" \n{plain}, \"quoted\" | \\ 'q' é 日本\n\n", f"{plain}, \"quoted\" | \\ 'q' é 日本"),
                      4: (plain + mark, plain + mark), 5: (" \n", ""), 7: ("nul \0" + plain, "nul " + plain),
                      8: (f" {mark}\t\n  {mark}\n{plain}\n \n {mark}", plain), 9: (None, ""),
                      10: (f"\x01\"{plain}\x01\",\"", f"\x01\"{plain}\x01\",\"")}.get(i % 100, (plain, plain))
    return (text, ("en", "fr", None)[(i % 7 == 6) + (i % 91 == 6)], 0.5 + i % 11 / 20, 2.5 + i % 13 / 8), document


def shard(number, least=3.0):
    """data/web_NUMBER.txt as it must be, by the definition of a slice."""
    pages = [page(i) for i in range(ROWS * number // 20, ROWS * (number + 1) // 20)]
    return SEPARATOR.join(document for (_, language, sure, score), document in pages
                          if document and language == "en" and sure >= 0.8 and score >= least) + "\n"


@pytest.fixture
def duckdb(place):
    """The real one; a stand-in before it on the PATH notes what it is asked."""
    real = shutil.which("duckdb", path=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    if not real:
        pytest.skip("DuckDB's command line is missing (pip install duckdb-cli)")
    place.path = f"{place.folder}/duckdb:{place.path}"
    when(place, real, "no such words", ":")
    return real


def when(place, real, asked, answer):
    """What contains `asked` is answered by these shell commands; what they leave open, by the real DuckDB."""
    place.stand_in("duckdb", f"echo \"$*\" >>'{place.folder}/asked'\n"
                   f"case \"$*\" in *'{asked}'*) {answer};; esac\nexec '{real}' \"$@\"", folder="duckdb")


@pytest.fixture
def parquet(place, duckdb):
    """The folder that FINEWEB_URL names, with the first Parquet file in it, which has FineWeb-Edu's columns."""
    folder = place.folder / "it's mine"
    folder.mkdir()
    rows = place.folder / "rows.json"
    names = "text", "language", "language_score", "score"
    rows.write_text("\n".join(json.dumps({**dict(zip(names, page(i)[0])), "url": ""}) for i in range(ROWS)))
    copy = f"COPY (SELECT * FROM read_json('{rows}')) TO 'it''s mine/000_00000.parquet' (FORMAT parquet)"
    subprocess.run([duckdb, "-c", copy], cwd=place.folder, check=True, timeout=DEADLINE)
    return folder


def shards(place):
    return {name: (place.data / name).read_text("utf-8") for name in sorted(place.names()) if re.match(r"web_\d", name)}


def test_web(place, duckdb, parquet):
    """Filtered, cut into documents; more is added later; nothing is made twice."""
    asked = place.folder / "asked"
    place.makes("web", WEB_MB="1")
    made = shards(place)
    assert made == {f"web_{i:03d}.txt": shard(i) for i in range(len(made))}
    *rest, last = [len(text.encode()) for text in made.values()]
    assert sum(rest) < 1_000_000 <= sum(rest) + last
    assert place.names() - set(made) == {"web.settings"}

    before = asked.read_text()
    assert "nothing to fetch" in place.makes("web", WEB_MB="1") and asked.read_text() == before
    (place.data / "web_000.txt").unlink()       # one that is missing is made, and nothing else
    place.makes("web", WEB_MB="1")
    assert shards(place) == made and "web_001" not in asked.read_text().removeprefix(before)

    # More than this Parquet file has: its last rows, and then the next file, which is missing.
    for i in range(len(made), 19):
        (place.data / f"web_{i:03d}.txt").write_text("as if it had been made")
    _, _, err = place.run("web", WEB_MB="100")
    assert err.startswith("error: data/web_020.txt cannot be made from it's mine/001_00000.parquet (")
    assert shards(place)["web_019.txt"] == shard(19)

    before = asked.read_text()
    place.fails("were made with score >= 3, language_score >= 0.8, not score >= 3.5, language", "web", WEB_SCORE="3.5")
    (place.data / "web.settings").unlink()
    place.fails("were made with others, not score >= 3,", "web", WEB_MB="1")
    assert asked.read_text() == before and "httpfs" not in before
    for name in shards(place):
        (place.data / name).unlink()
    place.fails("no page of data/web_000.txt has WEB_SCORE=5, WEB_LANGUAGE_SCORE=0.8; lower them.", "web", WEB_SCORE="5")
    place.makes("web", WEB_MB="1", WEB_SCORE="3.5")
    assert shards(place) == {f"web_{i:03d}.txt": shard(i, 3.5) for i in range(len(shards(place)))}


@pytest.mark.skipif(not (SHARED / "fineweb_edu_sample.parquet").exists(),
                    reason="the real texts that this test reads are no part of the repository")
def test_web_from_a_file_of_fineweb(place, duckdb):
    """Its columns have these names."""
    (place.folder / "it's mine").mkdir()
    shutil.copy(SHARED / "fineweb_edu_sample.parquet", place.folder / "it's mine" / "000_00000.parquet")
    place.makes("web", WEB_MB="1")
    assert sum(text.count(SEPARATOR) for text in shards(place).values()) > 100


def test_web_without_a_network(place, duckdb):
    when(place, duckdb, "INSTALL httpfs", "echo 'IO Error: Could not connect' >&2; echo 'and more' >&2; exit 1")
    place.fails("10BT/000_00000.parquet (IO Error: Could not connect); run this again to go on.", "web",
                FINEWEB_URL=f"{place.base}/10BT")
    asked = (place.folder / "asked").read_text()
    assert "LOAD httpfs" in asked and "'User-Agent': 'NanoEuler" in asked
    (place.folder / "000_00000.parquet").write_bytes(PAGE)
    place.fails("data/web_000.txt cannot be made from ./000_00000.parquet (", "web", FINEWEB_URL=".")
    assert place.names() == {"web.settings"} and not place.requests


def test_web_troubles_of_duckdb(place, duckdb, parquet):
    """Killed while it writes a file, that file is made again, and what the DuckDB of the killed run still writes does no
    harm."""
    part = place.data / "web_001.txt.part"
    os.mkfifo(place.folder / "go on")
    when(place, duckdb, "web_001", f"exec 3>'{part}'; echo half >&3; read x <'{place.folder}/go on'; echo half >&3; exit 0")
    *_, rest = place.interrupt(signal.SIGKILL, part.exists, "web", WEB_MB="1")
    assert "web_001.txt" not in place.names()
    when(place, duckdb, "web_001", "echo 'IO Error: No space left on device' >&2; exit 1")
    place.fails("web_001.txt cannot be made from it's mine/000_00000.parquet (IO Error: No space left", "web", WEB_MB="1")
    when(place, duckdb, "web_001", "kill -9 $$")
    place.fails("cannot be made from it's mine/000_00000.parquet (no word why); run this again", "web", WEB_MB="1")
    when(place, duckdb, "no such words", ":")
    place.makes("web", WEB_MB="1")
    (place.folder / "go on").write_text("\n")
    assert rest() == b""
    assert shards(place)["web_001.txt"] == shard(1)


def test_web_installs_duckdb_into_the_environment(place, duckdb, parquet):
    """Into that beside the script."""
    place.path = ":".join(folder for folder in place.path.split(":") if not os.path.exists(f"{folder}/duckdb"))
    if not shutil.which("bash", path=place.path):
        pytest.skip("DuckDB and bash lie in one folder here")
    bin = place.folder / "code" / ".venv" / "bin"
    place.fails(f"DuckDB cannot be installed; run make first, or see why: {bin}/python -m pip install", "web")
    bin.parent.mkdir()
    place.stand_in("python", f"case $2 in pip) echo \"$*\" >pip-called; cp '{place.folder}/duckdb/duckdb' '{bin}';; esac", bin)
    assert f"Installing DuckDB's command line into {bin.parent}" in place.makes("web", WEB_MB="1")
    assert (place.folder / "pip-called").read_text().split()[-1] == "duckdb-cli"


@parametrize("word, name, rows, records", [
    ("blimp", "nyu-mll/blimp@~parquet/{}/train/0000.parquet",
     [{"sentence_good": f"Good {i}.", "sentence_bad": "Bad.", "field": "syntax", "UID": f"set_{i}"} for i in range(2)],
     [{"good": f"Good {i}.", "bad": "Bad.", "name": f"set_{i}"} for i in range(2)]),
    ("preferences", "HuggingFaceH4/ultrafeedback_binarized/data/train_prefs-0000{}-of-00002.parquet",
     [{"prompt": "Hi\n", "chosen": [{"content": "Hi\n"}, {"content": f'"{i}"'}], "rejected": [{"content": "No."}], "score": 9}
      for i in range(2)], [{"prompt": "Hi\n", "chosen": f'"{i}"', "rejected": "No."} for i in range(2)])])
def test_pairs(place, duckdb, word, name, rows, records):
    """From a folder of Parquet files as the data set has them, one row each."""
    mirror = {"DATASETS_URL": f"{place.folder}/sets"}
    place.fails(f"data/{word}.jsonl cannot be made from {place.folder}/sets/", word, **mirror)
    for i, row in enumerate(rows):
        path = place.folder / "sets" / name.format(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        (place.folder / "row.json").write_text(json.dumps(row))
        subprocess.run([duckdb, "-c", f"COPY (FROM read_json('row.json')) TO '{path}' (FORMAT parquet)"], cwd=place.folder,
                       check=True, timeout=DEADLINE)
    place.makes(word, **mirror)
    made = (place.data / f"{word}.jsonl").read_text().splitlines()
    assert sorted(map(json.loads, made), key=str) == records and "nothing to fetch" in place.makes(word, **mirror)


def test_all_is_books_web_and_instructions(place):
    place.add_books(1)
    place.files["/alpaca.json"] = ALPACA
    place.data.mkdir()
    (place.data / "web_000.txt").write_bytes(PLAY * 2)
    (place.data / "web.settings").write_text("score >= 3, language_score >= 0.8\n")
    assert " bytes in 1 files; nothing to fetch" in place.makes("all", WEB_MB="1", BOOK_IDS="1")
    assert place.names() == {"books.txt", "books/1.txt", "web_000.txt", "web.settings", "instructions.json"}
