"""tokenizer.py against slow, obvious versions of itself, on damaged input, and through its command line."""
import array
import io
import json
import os
import random
import re
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tokenizer as tk  # noqa: E402
from tokenizer import SPECIAL_TOKENS, Tokenizer  # noqa: E402

GPT2 = ROOT.parent / "shared" / "data" / "gpt2"
WHITE_SPACE = {*map(chr, range(9, 14)), " ", "\x85", "\xa0", "\u1680", *map(chr, range(0x2000, 0x200B)),
               "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"}

SAMPLES = [
    "", " ", "a", "Hello world", "I'd say they've won, don't we'll 'S 're''s!'s", "  two  spaces\n\n\n new\tline \r\n",
    "naïve café ČŽ Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語 中文字",
    "👍🏽 👨‍👩‍👧 🇩🇪 𝐀𝐁 𝟙𝟚 1½²Ⅷ٣", "x" * 300, " " * 300, "9" * 300,
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\xa0\u200b\u2028\u3000 a\x1cb", "<|endoftext|><|user|> <|end|>", "\ufeffbom",
    "def f(x):\n    return x  # 3.14\n",
    "a\n\n  b\u3000\u3000c\u2003 d", "\ud800 lone \udc80 \udfff surrogates \ud83d\ude00",
]

TEXT = ("The cat sat on the mat. The cat's hat, the rat's bat: that's that!\n" * 3 + "aaaa aaaaa aaa banana bandana\n"
        + "naïve café 中文 中文字 👍👍 1234 12345 123\n" * 2 + "low lower lowest newer newest wider widest\n" * 4)


def random_text(rng, length):
    """Text that mixes all planes with what breaks pretokenizers: white space, quotes, controls, digits, surrogates."""
    kinds = ["abcdefgh", "aab", "'sdmtrevl", " \t\n\r", "".join(sorted(WHITE_SPACE)), "0123456789", ".,;!?<|>_\"-"]
    out = []
    while len(out) < length:
        kind = rng.randrange(len(kinds) + 2)
        if kind < len(kinds):
            out += rng.choices(kinds[kind], k=rng.randrange(1, 5))
        else:
            out.append(chr(rng.randrange(0x300 if kind == len(kinds) else 0x110000)))
    return "".join(out)


def slow_words(text):
    """GPT-2's pattern, read aloud: one character at a time, straight from unicodedata."""
    def kind(char):
        category = unicodedata.category(char)[0]
        return "space" if char in WHITE_SPACE else category if category in "LN" else "sign"

    words, i = [], 0
    while i < len(text):
        contraction = next((c for c in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(c, i)), None)
        if contraction:
            end = i + len(contraction)
        else:
            first = i + 1 if text[i] == " " and i + 1 < len(text) and kind(text[i + 1]) != "space" else i
            end = first + 1
            while end < len(text) and kind(text[end]) == kind(text[first]):
                end += 1
            if kind(text[first]) == "space" and end < len(text) and end - i > 1:
                end -= 1
        words.append(text[i:end])
        i = end
    return words


def slow_train(texts, vocab_size):
    """BPE as Sennrich et al. print it: recount everything after each merge."""
    words = Counter(tuple(tk.to_bytes(word)) for text in texts for word in slow_words(tk.to_str(text)))
    merges = []
    while len(merges) < vocab_size - 260:
        counts = Counter()
        for word, times in words.items():
            for pair in zip(word, word[1:]):
                counts[pair] += times
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        words = Counter({slow_merge(word, best, 256 + len(merges)): times for word, times in words.items()})
        merges.append(best)
    return merges


def slow_merge(word, pair, new):
    out, i = [], 0
    while i < len(word):
        both = tuple(word[i:i + 2]) == pair
        out.append(new if both else word[i])
        i += 2 if both else 1
    return tuple(out)


def slow_encode(tokenizer, text):
    ids = []
    for word in slow_words(tk.to_str(text)):
        word = tuple(tokenizer.encoder.byte_ids[byte] for byte in tk.to_bytes(word))
        for pair, new in tokenizer.merges.items():
            word = slow_merge(word, pair, new)
        ids += word
    return ids


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 400)


# Words

def test_words_equal_a_character_by_character_reading():
    rng = random.Random(0)
    for text in SAMPLES + [random_text(rng, rng.randrange(1, 80)) for _ in range(3000)]:
        text = tk.to_str(text)
        assert tk.split_words(text) == slow_words(text), ascii(text)


@pytest.mark.parametrize("limit", [tk.ASCII, tk.BMP, tk.ALL])
def test_every_code_point_has_its_class(limit):
    for char_class, category in zip(tk.char_classes(limit), "LN"):
        chars = [chr(code) for code in range(limit + 1)]
        expected = [char for char in chars if unicodedata.category(char)[0] == category]
        assert re.findall(f"[{char_class}]", "".join(chars)) == expected
    assert set(re.findall(f"[{tk.SPACE}]", "".join(chars))) == {char for char in WHITE_SPACE if ord(char) <= limit}


def test_cut_text_never_cuts_a_word():
    rng = random.Random(1)
    for _ in range(300):
        text = random_text(rng, 200)
        parts = list(tk.cut_text(text, size=7))
        assert "".join(parts) == text
        assert [word for part in parts for word in tk.split_words(part)] == tk.split_words(text)


# Training

@pytest.mark.parametrize("text", [TEXT, "aaaa aaaa aa aaaaaaa", "ab ba ab ba abab", "abcabcabc" * 5, "x", "",
                                  " \n \n \n", "\udc80é" * 4])
def test_training_equals_recounting(text):
    merges = slow_train([text], 400)
    trained = Tokenizer.train([text], 400)
    assert list(trained.merges) == merges
    assert trained.vocab_size == 260 + len(merges)
    assert len(set(trained.tokens)) == trained.vocab_size


def test_training_equals_recounting_on_random_text():
    rng = random.Random(2)
    for alphabet in ("ab ", "abc' ", "aé中👍 \n"):
        for _ in range(25):
            text = "".join(rng.choices(alphabet, k=rng.randrange(5, 120)))
            assert list(Tokenizer.train([text], 330).merges) == slow_train([text], 330), ascii(text)


def test_ties_go_to_the_smallest_pair_of_ids():
    assert list(Tokenizer.train([" zb zb ya ya xc xc"], 300).merges)[:3] == [(32, 120), (32, 121), (32, 122)]


def test_the_order_of_texts_and_the_kind_of_string_do_not_matter(tokenizer):
    lines = TEXT.splitlines(keepends=True)
    assert Tokenizer.train(reversed(lines), 400).merges == tokenizer.merges
    assert Tokenizer.train((line.encode() for line in lines), 400).merges == tokenizer.merges
    assert Tokenizer.train(TEXT, 400).merges == tokenizer.merges


def test_vocab_size_is_checked():
    assert Tokenizer.train(["aa aa"], 260).vocab_size == 260
    with pytest.raises(ValueError, match="259 tokens is too small.*260"):
        Tokenizer.train(["aa aa"], 259)


def test_special_tokens_come_last_and_are_never_produced(tokenizer):
    assert tokenizer.special == {name: tokenizer.vocab_size - 4 + i for i, name in enumerate(SPECIAL_TOKENS)}
    text = " ".join(SPECIAL_TOKENS) + "\n<|endoftext|>\n"
    assert max(Tokenizer.train([text * 50], 500).encode(text)) < 500 - 4
    assert tokenizer.decode(tokenizer.special.values()) == "".join(SPECIAL_TOKENS)


def test_pruning_keeps_the_frequent_words(monkeypatch):
    monkeypatch.setattr(tk, "MAX_WORD_BYTES", 1000)
    rng = random.Random(3)
    noise = " ".join("".join(rng.choices("abcdefghij", k=9)) for _ in range(2000))
    words = tk.count_words([f" often {part}" for part in noise.split()])
    assert words[" often"] == 2000 and sum(map(len, words)) <= 3000
    words = Counter({"z" * 5000: 1, "y" * 5000: 1})
    tk.prune_words(words)
    assert words == {"y" * 5000: 1}


# Encoding and decoding

def test_encoding_equals_replaying_the_merges(tokenizer):
    rng = random.Random(4)
    for text in SAMPLES + [random_text(rng, rng.randrange(1, 60)) for _ in range(300)] + [TEXT]:
        assert tokenizer.encode(text) == slow_encode(tokenizer, text), ascii(text)


def test_the_way_for_long_words_gives_the_same(tokenizer):
    rng = random.Random(5)
    for _ in range(300):
        word = "".join(rng.choices(["a", "an", "the", "ban", "low", "中"], k=rng.randrange(1, 40))).encode()[:190]
        assert tokenizer.encoder.merge_long(list(word)) == tokenizer.encoder.merge(word)


def test_every_byte_string_comes_back(tokenizer):
    rng = random.Random(6)
    odd = [bytes(range(256)), b"\xff\xfe\x00", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80 \xe3\x80 \xe3\x80\x80"]
    for data in odd + [rng.randbytes(rng.randrange(60)) for _ in range(1000)]:
        ids = tokenizer.encode(data)
        assert tokenizer.decode_bytes(ids) == data
        assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_every_str_comes_back_and_equals_its_bytes(tokenizer):
    rng = random.Random(7)
    for text in SAMPLES + [random_text(rng, rng.randrange(1, 60)) for _ in range(300)]:
        data = text.encode("utf-8", "surrogatepass")
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == data
        assert tokenizer.encode(text) == tokenizer.encode(data) == tokenizer.encode(bytearray(data))


def test_a_full_cache_changes_nothing(tokenizer, monkeypatch):
    expected = tokenizer.encode(TEXT)
    monkeypatch.setattr(tk.Encoder, "MAX_ENTRIES", 3)
    tokenizer.encoder.clear()
    assert tokenizer.encode(TEXT) == expected and len(tokenizer.encoder) <= 3


def test_ids_out_of_range_are_named(tokenizer):
    for bad in -1, 400, 10**30:
        with pytest.raises(ValueError, match=f"Token id {bad} .*V = {tokenizer.vocab_size}"):
            tokenizer.decode([5, bad])
    assert tokenizer.decode([]) == "" and tokenizer.decode(array.array("H", [72, 105])) == "Hi"


def test_other_types_are_refused(tokenizer):
    for bad in None, 5, ["a"]:
        with pytest.raises(TypeError):
            tokenizer.encode(bad)


def test_long_words_are_not_quadratic(tokenizer):
    started = time.perf_counter()
    for text in "ab" * 100_000, "a" * 200_000, " " * 200_000, "中" * 70_000, "👍" * 50_000:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.perf_counter() - started < 30     # about 2 s; quadratic merging would take hours


@pytest.mark.skipif(not GPT2.is_dir(), reason="shared/data/gpt2 is not there")
def test_gpt2_known_ids(tmp_path):
    gpt2 = Tokenizer.from_gpt2(GPT2 / "vocab.bpe", GPT2 / "encoder.json")
    assert gpt2.vocab_size == 50257 and gpt2.special == {"<|endoftext|>": 50256}
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("The quick brown fox jumps over the lazy dog.") == [464, 2068, 7586, 21831, 18045, 625, 262,
                                                                           16931, 3290, 13]
    assert gpt2.decode([15496, 995]) == "Hello world"
    gpt2.save(tmp_path / "gpt2.json")
    again = Tokenizer.load(tmp_path / "gpt2.json")
    assert again.tokens == gpt2.tokens and again.merges == gpt2.merges and again.special == gpt2.special


def test_gpt2_files_that_are_none(tmp_path):
    (tmp_path / "e.json").write_text('{"a": 0}')
    (tmp_path / "v.bpe").write_text("#version: 0.2\na b\n")
    with pytest.raises(ValueError, match="not GPT-2's tokenizer files"):
        Tokenizer.from_gpt2(tmp_path / "v.bpe", tmp_path / "e.json")


# Files

EOT = "<|endoftext|>"
DOCUMENTS = [
    ("", []), ("one", ["one"]), ("one\n", ["one\n"]), ("\n\none", ["\n\none"]), (f"{EOT}", []),
    (f"{EOT}\n{EOT}\n\n{EOT}\n", []),
    (f"one\n\n{EOT}\n\ntwo", ["one", "two"]), (f"one\n{EOT}\ntwo\n", ["one", "two\n"]), (f"one\n\n{EOT}\n", ["one"]),
    (f"{EOT}\n\none\n\n\n{EOT}\n\n\n{EOT}\n\n\n two\n\n{EOT}", ["one", " two"]),
    (f"one\r\n\r\n{EOT}\r\n\r\ntwo\r\n", ["one", "two\r\n"]), (f"one\r\n{EOT}\r\n", ["one"]),
    (f"one {EOT}\n{EOT} two\n x{EOT}", [f"one {EOT}\n{EOT} two\n x{EOT}"]),
    (f"one\n {EOT}\ntwo", [f"one\n {EOT}\ntwo"]),
]


def expected_ids(tokenizer, documents):
    return [token for text in documents for token in [*tokenizer.encode(text), tokenizer.special[EOT]]]


def encode_to_ids(tokenizer, path, **options):
    out = io.BytesIO()
    count = tokenizer.encode_file(path, out, **options)
    data = out.getvalue()
    assert len(data) == 2 * count
    return [low + 256 * high for low, high in zip(data[::2], data[1::2])]


@pytest.mark.parametrize("text, documents", DOCUMENTS)
def test_documents(tokenizer, tmp_path, text, documents):
    path = tmp_path / "corpus.txt"
    path.write_bytes(text.encode())
    assert encode_to_ids(tokenizer, path) == expected_ids(tokenizer, documents)
    assert encode_to_ids(tokenizer, path, separator=False) == tokenizer.encode(text)


def test_chunks_do_not_change_ids(tokenizer, tmp_path, monkeypatch):
    """Many small chunks, cut in all kinds of text and separators, give the ids of whole documents."""
    monkeypatch.setattr(tk, "CHUNK", 300)
    monkeypatch.setattr(tk, "CUT_WINDOW", 120)
    rng = random.Random(8)
    path = tmp_path / "corpus.txt"
    cut = 0
    for trial in range(150):
        line_end = rng.choice(["\n", "\r\n"])
        documents = [random_text(rng, rng.randrange(1, 400)).strip("\r\n") for _ in range(rng.randrange(1, 9))]
        documents = [text for text in documents if text]
        data = (line_end * rng.randrange(1, 4) + EOT + line_end * rng.randrange(1, 4)).join(documents)
        path.write_bytes(data.encode("utf-8", "surrogatepass"))
        cut += len(tk.find_chunks(*tk.file_range(path), size=300)) - 1
        assert encode_to_ids(tokenizer, path) == expected_ids(tokenizer, documents), (trial, ascii(data))
    assert cut > 300


def test_chunks_of_nothing_but_separators(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tk, "CHUNK", 300)
    monkeypatch.setattr(tk, "CUT_WINDOW", 120)
    path = tmp_path / "corpus.txt"
    for end in "\n", "\r\n", "\n\n":
        path.write_bytes(("one" + end + (EOT + end) * 200 + "two").encode())
        assert encode_to_ids(tokenizer, path) == expected_ids(tokenizer, ["one", "two"])


def test_text_without_white_space_is_cut_between_kinds(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tk, "CHUNK", 300)
    monkeypatch.setattr(tk, "CUT_WINDOW", 120)
    path = tmp_path / "corpus.txt"
    for text in "abc123" * 400, "the,cat,中文。" * 300, "<b>low</b>'s<i>x</i>" * 200, "don't!it's" * 300:
        path.write_text(text, encoding="utf-8")
        assert len(tk.find_chunks(*tk.file_range(path), size=300)) > 5
        assert encode_to_ids(tokenizer, path, separator=False) == tokenizer.encode(text)
    for text in "a" * 5000, "中" * 3000, " " * 5000, "👍" * 2000:       # one word, cut between two characters
        path.write_text(text, encoding="utf-8")
        chunks = tk.find_chunks(*tk.file_range(path), size=300)
        assert len(chunks) > 5 and max(end - start for _, start, end in chunks) < 800
        assert all(tk.read_chunk(*chunk).decode("utf-8") for chunk in chunks)
        assert tokenizer.decode(encode_to_ids(tokenizer, path, separator=False)) == text


def test_binary_file_comes_back(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tk, "CHUNK", 300)
    monkeypatch.setattr(tk, "CUT_WINDOW", 120)
    path = tmp_path / "noise.bin"
    path.write_bytes(random.Random(9).randbytes(20_000))
    ids = encode_to_ids(tokenizer, path, separator=False)
    assert tokenizer.decode_bytes(ids) == path.read_bytes() and ids == tokenizer.encode(path.read_bytes())


def test_several_files(tokenizer, tmp_path, monkeypatch):
    """Each file's last document ends with the end-of-text id, whether or not the file ends with a separator."""
    monkeypatch.setattr(tk, "CHUNK", 300)
    monkeypatch.setattr(tk, "CUT_WINDOW", 120)
    rng, files, documents, seen = random.Random(9), [], [], []
    for i, end in enumerate(["", f"\n\n{EOT}\n", "\n", f"\n{EOT}", ""]):
        texts = [random_text(rng, rng.randrange(100, 900)).strip("\r\n") or "x" for _ in range(i)]
        path = tmp_path / f"{i}.txt"
        path.write_bytes((f"\n\n{EOT}\n\n".join(texts) + (end if texts else "")).encode("utf-8", "surrogatepass"))
        if texts and end == "\n":
            texts[-1] += end
        files.append((path, 0, None))
        documents += texts
    out = io.BytesIO()
    count = tokenizer.encode_files(files, out, progress=lambda done, total: seen.append((done, total)))
    assert out.getvalue() == b"".join(token.to_bytes(2, "little") for token in expected_ids(tokenizer, documents))
    assert count == len(out.getvalue()) // 2 and seen[-1][0] == seen[-1][1] == sum(os.path.getsize(path) for path, *_ in files)


def test_a_part_of_a_file(tokenizer, tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(f"one two\n\n{EOT}\n\nthree four\n")
    assert encode_to_ids(tokenizer, path, start=4, end=7) == expected_ids(tokenizer, ["two"])
    assert encode_to_ids(tokenizer, path, start=9) == expected_ids(tokenizer, ["three four\n"])
    assert encode_to_ids(tokenizer, path, start=3, end=3) == []
    for start, end in (5, 4), (-1, 3), (0, 10**6):
        with pytest.raises(ValueError, match="are not a part of"):
            tokenizer.encode_file(path, io.BytesIO(), start=start, end=end)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """4.5 MB in which documents, emoji and bytes that are not UTF-8 fall across the borders of chunks."""
    path = tmp_path_factory.mktemp("large") / "large.txt"
    rng = random.Random(10)
    words = TEXT.split()
    texts = [" ".join(rng.choices(words, k=2000)) + rng.choice([" 👍", "\n", " \udcff", ""]) for _ in range(400)]
    path.write_bytes(f"\n\n{EOT}\n\n".join(texts).encode("utf-8", "surrogateescape"))
    return path


def test_processes_do_not_change_results(tokenizer, large, tmp_path, monkeypatch):
    calls = []
    one = encode_to_ids(tokenizer, large, processes=1)
    assert encode_to_ids(tokenizer, large, processes=3, progress=lambda *call: calls.append(call)) == one
    assert len(calls) == 5 and calls[-1] == (large.stat().st_size,) * 2 and calls == sorted(calls)
    documents = large.read_bytes().split(f"\n\n{EOT}\n\n".encode())
    assert one == expected_ids(tokenizer, [text.rstrip(b"\n") for text in documents[:-1]] + documents[-1:])
    monkeypatch.setattr(tk, "CHUNK", 1 << 18)
    merges = Tokenizer.train_files([large], 500, processes=1).merges
    assert Tokenizer.train_files([large], 500, processes=3).merges == merges
    assert Tokenizer.train([text.rstrip(b"\n") for text in documents[:-1]] + documents[-1:], 500).merges == merges


def test_small_files_start_no_process(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    (tmp_path / "small.txt").write_text(TEXT)
    assert encode_to_ids(tokenizer, tmp_path / "small.txt", processes=8) == expected_ids(tokenizer, [TEXT])
    assert Tokenizer.train_files([tmp_path / "small.txt"], 400).merges == tokenizer.merges


def test_an_interrupt_leaves_no_process_and_no_file(tokenizer, large, tmp_path, monkeypatch):
    def interrupt(done, total):
        raise KeyboardInterrupt

    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(popen(*args, **kwargs)) or started[-1])
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_file(large, tmp_path / "out.bin", processes=2, progress=interrupt)
    assert len(started) == 2 and all(worker.returncode is not None for worker in started)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_is_one_sentence(tokenizer, large, tmp_path, monkeypatch):
    monkeypatch.setattr(tk, "WORKER", "--unknown")
    with pytest.raises(OSError, match="ended early, with exit code 2"):
        tokenizer.encode_file(large, tmp_path / "out.bin", processes=2)
    assert list(tmp_path.iterdir()) == []


def test_a_script_from_standard_input_may_use_processes(tokenizer, large, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    script = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tokenizer import Tokenizer\n"
              f"tokenizer = Tokenizer.load({str(tmp_path / 't.json')!r})\n"
              f"print(tokenizer.encode_file({str(large)!r}, {str(tmp_path / 'o')!r}, processes=2))")
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 2 == (tmp_path / "o").stat().st_size


def test_training_files(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(TEXT + f"\n\n{EOT}\n\n" * 30 + TEXT)
    trained = Tokenizer.train_files([tmp_path / "a.txt"], 300)
    assert not any(b"endoftext" in token for token in trained.tokens[:-4])
    part = len(TEXT.encode())
    assert Tokenizer.train_files([(tmp_path / "a.txt", 0, part)], 400).merges == tokenizer.merges
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="no text in .*empty.txt"):
        Tokenizer.train_files([tmp_path / "empty.txt"], 300)
    (tmp_path / "binary").write_bytes(b"ab\0cd" * 100)
    with pytest.raises(ValueError, match="binary holds NUL bytes"):
        Tokenizer.train_files([tmp_path / "a.txt", tmp_path / "binary"], 300)


def test_a_large_vocabulary_encodes_but_not_into_16_bits(tmp_path):
    pairs = [(left, right) for left in range(256) for right in range(256)] + [(256, 0)]
    big = Tokenizer(range(256), pairs, SPECIAL_TOKENS)
    assert big.vocab_size == 65797
    assert big.encode(b"\xff\xff") == [65791] and big.decode_bytes([65791]) == b"\xff\xff"
    with pytest.raises(ValueError, match="65797"):
        big.encode_file(__file__, tmp_path / "out.bin")
    assert list(tmp_path.iterdir()) == []


# On disk

def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = Tokenizer.load(path)
    assert again.tokens == tokenizer.tokens and again.merges == tokenizer.merges and again.special == tokenizer.special
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_damaged_files_are_refused_in_one_sentence(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    whole = path.read_bytes()
    rng = random.Random(11)
    for size in [0, 1, len(whole) - 1, *rng.sample(range(len(whole)), 60)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer") as error:
            Tokenizer.load(path)
        assert "\n" not in str(error.value)
    for _ in range(200):        # a flipped bit either is found or does no harm
        place = rng.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1:])
        try:
            assert Tokenizer.load(path).encode(TEXT) == tokenizer.encode(TEXT)
        except ValueError as error:
            assert "tokenizer.json is not a tokenizer" in str(error)


@pytest.mark.parametrize("change", [
    lambda t: t["model"].update(type="WordPiece"), lambda t: t.update(pre_tokenizer=None), lambda t: t.pop("model"),
    lambda t: t.update(normalizer={"type": "NFC"}), lambda t: t["pre_tokenizer"].update(add_prefix_space=True),
    lambda t: t["model"]["merges"].reverse(), lambda t: t["model"]["merges"].pop(), lambda t: t["added_tokens"].pop(),
    lambda t: t["model"]["vocab"].update(more=5000), lambda t: t["model"]["merges"].append("a"),
    lambda t: t["model"]["merges"].append(7), lambda t: t["model"].update(ignore_merges=True),
])
def test_foreign_files_are_refused(tokenizer, tmp_path, change):
    path = tmp_path / "other.json"
    tokenizer.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="other.json is not a tokenizer"):
        Tokenizer.load(path)


def test_a_failed_save_keeps_the_old_file(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        tokenizer.save(path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


# The command line

def run(*arguments, folder, stdin=b""):
    return subprocess.run([sys.executable, str(ROOT / "tokenizer.py"), *map(str, arguments)], cwd=folder, input=stdin,
                          capture_output=True, timeout=60)


def test_command_line(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    trained = run("train", "text.txt", "--vocab", 300, folder=tmp_path)
    assert trained.returncode == 0 and b"tokenizer.json: 300 tokens" in trained.stdout, trained.stderr
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    ids = run("encode", "the cat, naïve", folder=tmp_path).stdout.decode().split()
    assert list(map(int, ids)) == tokenizer.encode("the cat, naïve")
    assert run("decode", *ids, folder=tmp_path).stdout.decode() == "the cat, naïve"
    noise = bytes(range(256)) * 2
    ids = run("encode", "-", folder=tmp_path, stdin=noise).stdout
    assert run("decode", folder=tmp_path, stdin=ids).stdout == noise
    shown = run("show", "the cat", folder=tmp_path).stdout.decode()
    assert shown.splitlines()[0] == "|".join(tokenizer.decode([token]) for token in tokenizer.encode("the cat"))
    tree = run("tree", "256", folder=tmp_path).stdout.decode()
    left, right = list(tokenizer.merges)[0]
    assert tree.splitlines()[0].endswith("id 256, merge 1")
    assert f"id {left}, byte" in tree and f"id {right}, byte" in tree
    assert b"special" in run("tree", "<|end|>", folder=tmp_path).stdout


def test_the_demonstration(tmp_path):
    done = run(folder=tmp_path)
    assert done.returncode == 0 and b"first merges" in done.stdout and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments, words", [
    (["train", "missing.txt"], "missing.txt"), (["train", "empty.txt"], "no text in"),
    (["train", "binary"], "NUL bytes"),
    (["train", "."], "not a file"), (["train", "text.txt", "--vocab", "259"], "at least 260"),
    (["train", "text.txt", "--out", "no/such/folder.json"], "no/such/folder.json"),
    (["encode", "x"], "tokenizer.py train"),
    (["show", "x", "--tokenizer", "text.txt"], "text.txt is not a tokenizer"), (["decode", "1", "x"], "invalid int"),
    (["decode", "72", "260", "--tokenizer", "tiny.json"], "260"), (["decode", "--unknown"], "unrecognized"),
])
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, arguments, words):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0\0")
    Tokenizer.train(["a"], 260).save(tmp_path / "tiny.json")
    done = run(*arguments, folder=tmp_path)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 2 and words in lines[-1] and "error: " in lines[-1], done.stderr
    assert "Traceback" not in done.stderr.decode() and done.stdout == b""
    assert not (tmp_path / "tokenizer.json").exists()


def test_import_does_nothing():
    script = "import tokenizer; print(tokenizer.char_classes.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n" and done.stderr == ""
