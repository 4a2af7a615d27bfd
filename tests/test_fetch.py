"""fetch_data.sh against a server on this machine: what arrives whole, what is refused, and books taken out of their
wrapping."""
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TOOLS = os.path.dirname(sys.executable)             # where DuckDB's command line is, too
SEPARATOR = "\n\n<|endoftext|>\n\n"
PLAY = b"".join(b"%07d Enter a citizen, speaking.\n" % i for i in range(16000))         # 560,000 bytes


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files.  The first `cuts` answers end after 100,000 bytes."""
    def log_message(self, *_):
        pass

    def do_GET(self):
        ranged = self.headers["Range"]
        self.server.asked.append(ranged)
        body = self.server.files.get(self.path)
        if body is None:
            return self.send_error(404)
        start = int(ranged[6:-1]) if ranged else 0
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Length", len(body) - start)
        self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        self.server.cuts -= 1
        self.wfile.write(body[start:start + 100_000 if self.server.cuts >= 0 else None])


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with a play.  The current folder is a new one, and the home of a user who lets curl print headers."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path(".curlrc").write_text("include\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files = {"/play": PLAY}
        server.asked = []
        server.cuts = 0
        base = f"http://127.0.0.1:{server.server_port}"
        server.environment = {
            **os.environ, "HOME": str(tmp_path), "TINY_URL": f"{base}/play", "GUTENBERG_URL": base, "FETCH_PAUSE": "0",
            "WEB_MB": "1", "FINEWEB_URL": "rows", "DATASETS_URL": "sets", "no_proxy": "*",
            "PATH": f"{TOOLS}:{os.environ['PATH']}"}
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def fetch(server, word, code=0, said=""):
    """The script leaves with this code, after at most one sentence, in which `said` stands -> what it printed."""
    done = subprocess.run([ROOT / "fetch_data.sh", word], capture_output=True, text=True, env=server.environment)
    assert done.returncode == code and said in done.stderr and done.stderr.count("\n") == bool(said), done
    return done.stdout


def read(path):
    return pathlib.Path("data", path).read_bytes()


def test_the_play_is_fetched_once_into_the_current_folder(server):
    fetch(server, "tiny")
    assert read("tiny.txt") == PLAY
    assert "nothing to fetch" in fetch(server, "tiny") and os.listdir("data") == ["tiny.txt"] and len(server.asked) == 1


def test_a_cut_transfer_is_resumed(server):
    server.cuts = 2
    for size in 100_000, 200_000:
        fetch(server, "tiny", 2, "run this again to go on")
        assert read("tiny.txt.part") == PLAY[:size]
    fetch(server, "tiny")
    assert read("tiny.txt") == PLAY and server.asked == [None, "bytes=100000-", "bytes=200000-"]


@pytest.mark.parametrize("body, said", [
    (None, "404"), (PLAY[:1000], "gave 1000 bytes that are not"), (PLAY + b"\xff", "that are not"), (PLAY * 40, "has more than"),
    (b'<div class="login">' + PLAY, "a web page"), (b"\n\xef\xbb\xbf<!DOCTYPE html>" + PLAY, "a web page")])
def test_what_was_not_asked_for_is_refused(server, body, said):
    server.files = {"/play": body}
    fetch(server, "tiny", 2, said)
    assert os.listdir("data") == []


def test_english_needs_no_network(server):
    fetch(server, "english")
    assert len(read("english.txt").decode()) > 1_000_000 and not server.asked


# ---------------------------------------------------------------------------------------------------------------------
# Books
# ---------------------------------------------------------------------------------------------------------------------
PROSE = ["It was a dark and stormy night; the rain fell in torrents, when a gust of wind swept up the streets of ward "
         f"{i}--for it is in London that our scene of mother-in-law-to-be counterrevolutionaries lies. " * 4 + "And so on."
         for i in range(20)]
VERSE = "Tell me not, in mournful numbers,\n  Life is but an empty dream!\n\nOf Man's first disobedience, and the fruit\nOf that tree" \
        "\n\n    A table, whose lines are as wide as those of the prose, has to stay\n    as it was."
BODY = "\n\n".join(["THE HEADING", *[textwrap.fill(text, 72, initial_indent=" ", break_long_words=False) for text in PROSE],
                    VERSE])
STRIPPED = "\n\n".join(["THE HEADING", *PROSE, VERSE])
HEAD = "The Project Gutenberg EBook of A Night\n\nThis eBook is for the use of anyone.  See www.pg.org\n\n"
LICENCE = "\n\n*** START: FULL LICENSE ***\n\nTHE FULL PROJECT GUTENBERG LICENSE\n" + "Section 1.  Terms.\n" * 300
START = "*** START OF THE PROJECT GUTENBERG EBOOK A NIGHT ***\n\n"
END = "\n\n*** END OF THE PROJECT GUTENBERG EBOOK A NIGHT ***\n"
SMALL = "***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nTerms.\n*END*THE SMALL PRINT! FOR ETEXTS*Ver.93*END*\n\n"
# What stands before the book, and behind it.
FORMS = [(HEAD + START, END + LICENCE),
         (HEAD + START.replace(" A ", " A\n").replace("*** START OF THE", "***START OF THIS"),
          END.replace("THE PROJECT ", "THIS PROJECT\n")),
         (HEAD + START.replace("***", "* * *"), END.replace("*", "-") + LICENCE),
         (HEAD + START.replace("*", ""), LICENCE),
         (HEAD + START + "Project Gutenberg has two\nof it.\n\nProduced by A. Reader and\nthe Online Proofreading Team\n\nSee http://www.pgdp.net\n\n",
          "\n\nEnd of the Project Gutenberg EBook of A Night, by Nobody\n" + END),
         (HEAD + SMALL + "This etext was prepared by A. Reader\n\nB. Reader, b@example.org\n\n",
          "\n\nEnd of Project Gutenberg's A Night"),
         (HEAD + START, "\n\n" + SMALL), (LICENCE + HEAD + START, END), (HEAD + START, "\n\n")]
# Line ends, and the encoding.  Lines that would pass for a separator of documents are left out.
LINES = [("\r\n", "utf-8-sig"), ("\r", "utf-8"), ("\r\r\n", "utf-8"), ("\n <|endoftext|>\t\n", "cp1252")]


def test_books_of_every_form(server):
    books = [before + BODY + behind for before, behind in FORMS]
    coded = [book.encode() for book in books]
    coded += [books[0].replace("dark", "d\u201crk").replace("\n", end).encode(encoding) for end, encoding in LINES]
    server.files = {f"/{i}/pg{i}.txt": book for i, book in enumerate(coded)}
    server.environment["BOOK_IDS"] = " ".join(map(str, range(len(coded))))
    fetch(server, "books")
    expected = [STRIPPED] * len(FORMS) + [STRIPPED.replace("dark", "d\u201crk")] * len(LINES)
    assert read("books.txt").decode() == SEPARATOR.join(expected) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# What DuckDB reads
# ---------------------------------------------------------------------------------------------------------------------
def write_parquet(path, rows):
    """Rows, a text of JSON, become a file as the data set has it."""
    if not shutil.which("duckdb", path=TOOLS):
        pytest.skip("DuckDB's command line is missing (pip install duckdb-cli)")
    os.makedirs(os.path.dirname(path))
    pathlib.Path("rows.json").write_text(rows)
    command = f"COPY (FROM read_json('rows.json')) TO '{path}' (FORMAT parquet)"
    subprocess.run(["duckdb", "-c", command], check=True, env={"PATH": TOOLS})


def test_web_text_is_filtered_and_cut_into_documents(server):
    page = "It is said. " * 500
    row = '{"text": "%d\\r\\n <|endoftext|>\\n%s", "language": "en", "language_score": 0.8, "score": 3.0}\n'
    rows = [row % (i, page) for i in range(400)]
    rows[0] = rows[0].replace("en\"", "fr\"")
    rows[1] = rows[1].replace("0.8", "0.79")
    rows[2] = rows[2].replace("3.0", "2.9")
    write_parquet("rows/000_00000.parquet", "".join(rows))
    fetch(server, "web")
    shards = sorted(pathlib.Path("data").glob("web_*.txt"))
    documents = SEPARATOR.join(shard.read_bytes()[:-1].decode() for shard in shards).split(SEPARATOR)
    assert documents == [f"{i}\n{page.strip()}" for i in range(3, 3 + len(documents))] and len(documents) > 160


@pytest.mark.parametrize("word, path, row, record", [
    ("preferences", "HuggingFaceH4/ultrafeedback_binarized/data/train_prefs-0.parquet",
     '{"prompt": "Who?", "chosen": [{"content": "Who?"}, {"content": "You."}], "rejected": [{"content": "No."}], "score": 9}',
     {"prompt": "Who?", "chosen": "You.", "rejected": "No."}),
    ("blimp", "nyu-mll/blimp@~parquet/x/train/0.parquet", '{"sentence_bad": "It are.", "sentence_good": "It is.", "UID": "be"}',
     {"good": "It is.", "bad": "It are.", "name": "be"})])
def test_pairs_say_which_one_is_better(server, word, path, row, record):
    write_parquet(f"sets/{path}", row)
    fetch(server, word)
    assert json.loads(read(f"{word}.jsonl")) == record
