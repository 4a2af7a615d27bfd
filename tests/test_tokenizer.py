"""tokenizer.py against slow, obvious versions of itself, on damaged input, and through its command line; and what
script.py shares, where test_scripts.py does not look."""
import array
import concurrent.futures
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from cases import once_a_module, parametrize, put, read, refusal, rows, value_error, write

import script
import tokenizer as tk
from tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, Tokenizer, known_template

ROOT = Path(__file__).resolve().parent.parent

EOT = "<|endoftext|>"
BYTES = [bytes([byte]) for byte in range(256)]
WHITE_SPACE = {*"\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
               "\u2028\u2029\u202f\u205f\u3000"}

SAMPLES = [
    "", " ", "a", "Hello world", "I'd say they've won, don't we'll 'S 're''s!'s", "  two  spaces\n\n\n new\tline \r\n",
    "naïve café ČŽ Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語 中文字",
    "👍🏽 👨‍👩‍👧 🇩🇪 𝐀𝐁 𝟙𝟚 1½²Ⅷ٣", "x" * 300, " " * 300, "9" * 300,
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\xa0\u200b\u2028\u3000 a\x1cb", "<|endoftext|><|user|> <|end|>", "\ufeffbom",
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


def many_texts(seed, count, length=80):
    rng = Random(seed)
    return SAMPLES + [random_text(rng, rng.randrange(1, length)) for _ in range(count)]


def slow_words(text):
    """GPT-2's pattern, read aloud: one character at a time, straight from unicodedata."""
    def kind(char):
        category = unicodedata.category(char)[0]
        return "space" if char in WHITE_SPACE else category if category in "LN" else "sign"

    words, i = [], 0
    while i < len(text):
        contraction = re.match("'(s|t|re|ve|m|ll|d)", text[i:])
        if contraction:
            end = i + contraction.end()
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


def slow_digits(text):
    """Each number by itself, and GPT-2's pattern on each run between two of them, as if it were the whole text."""
    numbers = re.escape("".join({char for char in text if unicodedata.category(char)[0] == "N"}) or "0")
    runs = re.split(f"([{numbers}])", text)
    return [word for i, run in enumerate(runs) for word in (slow_words(run) if i % 2 == 0 else [run])]


def made(pairs, special, digits=False):
    """The tokenizer of the 256 bytes, what these pairs of ids make, and special tokens of these names."""
    tokens = [*BYTES]
    for left, right in pairs:
        tokens.append(tokens[left] + tokens[right])
    ids = {name: len(tokens) + i for i, name in enumerate(special)}
    return Tokenizer([*tokens, *map(str.encode, special)], {pair: 256 + i for i, pair in enumerate(pairs)}, ids, digits)


def slow_bpe(ids, merges):
    """[id, ...], {(left id, right id): made id} -> [id, ...]: the first merge that fits, at its first place, again and
    again."""
    for pair, made in merges.items():
        for i in range(len(ids) - 1):
            if (ids[i], ids[i + 1]) == pair:
                return slow_bpe([*ids[:i], made, *ids[i + 2:]], merges)
    return ids


def both_ways(tokenizer, word):
    """Bytes -> ids, by the loop for short words and by the heap for long ones."""
    ids = [tokenizer.encoder.byte_ids[byte] for byte in word if byte in tokenizer.encoder.byte_ids]
    short, long = tokenizer.encoder.merge(word), tokenizer.encoder.merge_long([-1, *ids, -1])
    assert short == long == slow_bpe(ids, tokenizer.merges)
    return short


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=600, **options)


@once_a_module
def tokenizer():
    return Tokenizer.train([TEXT], 400)


# Words

def words_of(text, digits):
    return [word for part in tk.split_words(text, digits) for word in part]


@parametrize("digits, slow, example", [(False, slow_words, "I_'d_ say_ _ 42_!_\u2003_ x_²"),
                                                   (True, slow_digits, "I_'d_ say_  _4_2_!_\u2003_ x_²")])
def test_words_equal_a_character_by_character_reading(digits, slow, example):
    for text in map(tk.to_str, many_texts(0, 2000)):
        assert words_of(text, digits) == slow(text), ascii(text)
    assert "_".join(words_of("I'd say  42!\u2003 x²", digits)) == example


@parametrize("limit", [tk.BMP, tk.ALL])
def test_every_code_point_has_its_class(limit):
    chars = [chr(code) for code in range(limit + 1)]
    for char_class, category in zip(tk.char_classes(limit), "LN"):
        expected = [char for char in chars if unicodedata.category(char)[0] == category]
        assert re.findall(f"[{char_class}]", "".join(chars)) == expected
    assert set(re.findall(f"[{tk.SPACE}]", "".join(chars))) == {char for char in WHITE_SPACE if ord(char) <= limit}


def test_a_long_text_is_cut_where_a_word_begins(monkeypatch):
    """Into parts of 4,096 characters or more, each with the pattern that it takes."""
    pattern, parts = tk.word_pattern, []

    class Pattern:
        def __init__(self, limit, digits):
            self.findall = lambda part: parts.append((part, limit)) or pattern(limit, digits).findall(part)
    monkeypatch.setattr(tk, "word_pattern", Pattern)
    rng = Random(1)
    texts = [random_text(rng, 20_000) for _ in range(5)] + ["a b" * 3_000 + "\U0001f44d" + "\u4e2d \n a" * 2_000, "ab " * 2_000]
    limits = set()
    for text in texts:
        for digits, slow in (False, slow_words), (True, slow_digits):
            parts.clear()
            assert words_of(text, digits) == slow(text)
            for part, limit in parts:
                assert limit == (tk.ALL if max(part) > "\uffff" else tk.BMP)
                limits.add(limit)
            sizes = [len(part) for part, _ in parts]
            assert sum(sizes) == len(text) and min(sizes[:-1]) > 4096
    assert sizes == [4097, 1903] and limits == {tk.BMP, tk.ALL}


# Training

@parametrize("words, merges", [
    ({"aaa": 1}, "[(97, 97)]"), ({"ab": 1}, "[]"),                                  # "aa" counts twice, merges once
    ({" zb": 2, " ya": 2, " xc": 2}, "[(32, 120), (32, 121), (32, 122), (256, 99), (257, 97), (258, 98)]"),     # ties
    # the words of Sennrich, Haddow and Birch
    ({"low": 5, "lower": 2, "newest": 6, "widest": 3},
     "[(101, 115), (256, 116), (108, 111), (258, 119), (101, 119), (110, 260)]")])
def test_merges_by_hand(words, merges):
    for learn in tk.learn_merges, tk.learn_merges_plain:
        assert str(learn(Counter(words), 6)) == merges


def test_the_plain_and_the_fast_way_learn_the_same():
    """Words as `count_words` gives them, and any others: ties, runs of one byte, pairs that run out, byte 0."""
    words = tk.count_words([TEXT, random_text(Random(7), 3000)])
    assert tk.learn_merges(words, 300) == tk.learn_merges_plain(words, 300)
    rng, ran_out = Random(0), 0
    for alphabet in ["a", "ab", "abc", "aab", " ab", "é中a", "\0\1"] * 20:
        texts = ["".join(rng.choices(alphabet, k=rng.randrange(1, 30))) for _ in range(rng.randrange(1, 12))]
        words = Counter(rng.choices(texts, k=15))
        merges = tk.learn_merges(words, 12)
        assert merges == tk.learn_merges_plain(words, 12), words
        assert tk.learn_merges(words, 3) == merges[:3]
        ran_out += len(merges) < 12
    assert 20 < ran_out < 120


def test_words_are_counted_in_texts_of_any_kind(tokenizer):
    texts = many_texts(3, 50) + [TEXT * 9, b"\xff a\xc3 b"]
    assert tk.count_words(texts) == Counter(word for text in texts for word in slow_words(tk.to_str(text)))
    lines = TEXT.splitlines(keepends=True)
    for same in TEXT, reversed(lines), (line.encode() for line in lines):       # a text by itself is one document
        assert list(Tokenizer.train(same, 400).merges) == tk.learn_merges_plain(tk.count_words([TEXT]), 140)
    for size in 259, 65537:
        with value_error(f"^{size} tokens is too small or too large a vocabulary; it takes at least 260, at most 65536.$"):
            Tokenizer.train(["aa aa"], size)
    assert Tokenizer.train(["aa aa"], 65536).vocab_size == 261


def test_special_tokens_come_last_and_are_never_produced():
    text = " ".join(SPECIAL_TOKENS) + "\n<|endoftext|>\n"
    tokenizer = Tokenizer.train([text * 50], 280)
    assert tokenizer.special == dict(zip(SPECIAL_TOKENS, range(276, 280))) and max(tokenizer.encode(text)) < 276
    assert tokenizer.decode(range(276, 280)) == "".join(SPECIAL_TOKENS)


def test_rare_words_are_dropped_when_there_are_too_many(monkeypatch):
    """After each chunk: the more frequent half stays, of equal counts those that came first."""
    counted = []
    put(monkeypatch, tk, MAX_WORDS=4, learn_merges=lambda words, wanted: counted.append((words, wanted)) or [])
    for name, text in ("a", "w x y z"), ("b", " x y"), ("c", " z q"):
        write(name, text)
    for names, expected in ("abc", {" x": 2, " y": 2}), ("ca", {" z": 2, " q": 1}):
        Tokenizer.train_files(names, 300)
        assert counted.pop() == (expected, 40)


def test_training_files(tokenizer):
    write("a.txt", TEXT + f"\n\n{EOT}\n\n" * 30 + TEXT)
    assert not any(b"endoftext" in token for token in Tokenizer.train_files(["a.txt"], 300).tokens[:-4])
    assert Tokenizer.train_files([("a.txt", 0, len(TEXT.encode()))], 400).merges == tokenizer.merges


# Encoding and decoding

def test_encoding_equals_replaying_the_merges(tokenizer):
    for text in many_texts(4, 200, 60):
        ids = [i for word in slow_words(tk.to_str(text)) for i in both_ways(tokenizer, tk.to_bytes(word))]
        data = text.encode("utf-8", "surrogatepass")
        assert ids == tokenizer.encode(text) == tokenizer.encode(data) == tokenizer.encode(bytearray(data)), ascii(text)
        assert tokenizer.decode_bytes(ids) == data


def random_merges(rng, letters):
    """-> (the names of all tokens, their merges in any order)"""
    names, merges = [*letters], {}
    for _ in range(rng.randrange(1, 12)):
        pair = tuple(rng.choices(names, k=2))
        merges[pair] = None
        names = [*dict.fromkeys([*names, "".join(pair)])]
    return names, rng.sample([*merges], len(merges))


def test_ids_and_ranks_of_any_order():
    """A part may be made by a later merge, two merges may make one token, ids need not follow ranks, bytes may be missing."""
    rng = Random(13)
    for _ in range(200):
        names, merges = random_merges(rng, "abcd"[:rng.randrange(1, 5)])
        vocab = dict(zip(names, rng.sample(range(60), len(names))))                 # with ids that no token has
        odd = Tokenizer.from_vocab(vocab, merges, [])
        assert list(odd.merges.items()) == [((vocab[a], vocab[b]), vocab[a + b]) for a, b in merges]
        for _ in range(10):
            word = "".join(rng.choices("abcde", k=rng.randrange(1, 40)))            # there is no token for "e"
            ids = both_ways(odd, word.encode())
            assert odd.encode(word) == ids and odd.decode(ids) == "".join(char for char in word if char in names)
    assert odd.encode("ee") == odd.encode("\ud800") == []


def test_every_byte_string_comes_back(tokenizer):
    rng = Random(6)
    odd = [bytes(range(256)), b"\xff\xfe\x00", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80 \xe3\x80 \xe3\x80\x80"]
    for data in odd + [rng.randbytes(rng.randrange(60)) for _ in range(500)]:
        ids = tokenizer.encode(data)
        assert tokenizer.decode_bytes(ids) == data and tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_a_full_cache_changes_nothing(tokenizer, monkeypatch):
    encoder, expected = tokenizer.encoder, tokenizer.encode(TEXT)
    monkeypatch.setattr(tk.Encoder, "MAX_ENTRIES", 3)
    encoder.clear()
    assert tokenizer.encode(TEXT) == expected
    encoder.clear()
    sizes = [tokenizer.encode(word) and len(encoder) for word in ("a", "b", "b", "c", "a", "d", "a" * 65, "a" * 64)]
    assert str(sizes) == "[1, 2, 2, 3, 3, 1, 1, 2]"
    encoder["a"] = b"\7\0"
    assert tokenizer.encode("a") == [7]                     # it is read, not only written
    encoder.clear()


def test_ids_take_16_bits():
    """65,536 tokens, the last id being 65,535."""
    pairs = [*itertools.product(range(256), repeat=2)][:65279]
    large, last = made(pairs, [EOT]), bytes(pairs[-1])
    write("text", last)
    assert large.encode(last) == [65534] and large.decode([65535]) == EOT and encode_to_ids(large, "text") == [65534, 65535]


def test_ids_out_of_range_are_named(tokenizer):
    for bad in -1, 400, 10**30:
        with value_error(f"Token id {bad} .*V = {tokenizer.vocab_size}"):
            tokenizer.decode([5, bad])
    assert tokenizer.decode([]) == "" and tokenizer.decode(array.array("H", [72, 105])) == "Hi"


def test_long_words_are_not_quadratic(tokenizer, monkeypatch):
    """Counted in steps of the heap, not in seconds."""
    merge, steps, heappop = tokenizer.encoder.merge, [], tk.heappop
    monkeypatch.setattr(tk, "heappop", lambda heap: steps.append("pop") or heappop(heap))
    for times in 10, 100:                                               # up to 200 bytes go the short way
        assert len(merge(b"an" * times)) < 2 * times and not steps
    assert len(merge(b"an" * 100 + b"a")) < 200 and steps               # 201 the long one
    for text in "an" * 20_000, "a" * 40_000, "banana" * 6_000, "ab" * 20_000, "👍" * 8_000:
        steps.clear()
        assert tokenizer.decode(merge(text.encode())) == text
        assert len(steps) <= 2 * len(text.encode())         # a pair for each two neighbours there ever were
    pairs = made([(97, 98), (99, 100), (256, 257), (258, 258), (258, 256)], [])
    assert pairs.encode("abcd" * 101 + "ab") == [259] * 50 + [260]      # a pair of pairs: both must know each other


def test_gpt2_files_that_are_none():
    Path("v.bpe").write_text("#version: 0.2\na b\n")
    write("e.json", '{"a": 0}')
    with value_error("v.bpe, e.json: not GPT-2's tokenizer files "):
        Tokenizer.from_gpt2("v.bpe", "e.json")


VOCAB = {name: i for i, name in enumerate([*tk.byte_chars(), "ab", "abc", EOT])}
ALIKE = "its tokens, or their ids, do not all differ"


def test_a_vocabulary_and_its_merges():
    good = Tokenizer.from_vocab(VOCAB, ["a b", ("ab", "c")], [EOT])
    assert good.tokens == [*BYTES, b"ab", b"abc", EOT.encode()] and good.special == {EOT: 258}
    assert good.encode("abcab") == [257, 256] and not good.digits
    assert Tokenizer.from_vocab({"a": 65535}, [], []).encode("aa") == [65535] * 2


@parametrize("change, merges, special, words", [
    ({"more": 258}, [], EOT, ALIKE), ({"é": 300, "Ã©": 301}, [], "é1 é", ALIKE),
    *[({"a": i}, [], EOT, f"its token a has no id below 65536, but {i}") for i in (-1, 65536, 97.5)],
    ({"a b": 300}, [], EOT, "' '"), ({}, [], "a", "a special token is a single character"),
    ({}, ["a bc"], EOT, "its merge a bc does not make a token of two others"),
    ({}, [["", ""]], EOT, "its merge   does not make a token of two others"),
    ({}, ["ab c"], "ab", "its merge ab c does not make a token of two others"),
    ({}, ["a b", "a b"], EOT, "one of its merges is there twice")])
def test_vocabularies_that_do_not_fit_their_merges(change, merges, special, words):
    with pytest.raises((ValueError, KeyError)) as error:
        Tokenizer.from_vocab({**VOCAB, **change}, merges, special.split())
    assert str(error.value) == words


# Files

def expected_ids(tokenizer, documents):
    return [token for text in documents for token in [*tokenizer.encode(text), tokenizer.special[EOT]]]


def encode_to_ids(tokenizer, *files, **options):
    with contextlib.suppress(FileExistsError):
        os.mkdir("ids")
    count = tokenizer.encode_files(files, "ids/out", **options)
    data = read("ids/out")
    assert len(data) == 2 * count and os.listdir("ids") == ["out"]
    return [low + 256 * high for low, high in zip(data[::2], data[1::2])]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_chunks(monkeypatch):
    put(monkeypatch, tk, CHUNK=300, CUT_WINDOW=120)


@parametrize("text, documents", [       # X: the separator
    ("", []), ("\n\none\n", ["\n\none\n"]), ("X\nX\n\nX\n", []), ("one\nX\ntwo\n", ["one", "two\n"]),
    ("X\n\none\n\n\nX\n\n\nX\n\n\n two\n\nX", ["one", " two"]), ("one\r\n\r\nX\r\n\r\ntwo\r\n", ["one", "two\r\n"]),
    ("one X\nX two\n xX", ["one X\nX two\n xX"]), ("one\n X\ntwo", ["one\n X\ntwo"])])
def test_documents(tokenizer, text, documents):
    write("corpus", text.replace("X", EOT).encode())
    assert encode_to_ids(tokenizer, "corpus") == expected_ids(tokenizer, [text.replace("X", EOT) for text in documents])


@parametrize("digits", [False, True])
def test_chunks_do_not_change_ids(digits, small_chunks):
    """Many small chunks, cut in all kinds of text and separators, give the ids of whole documents."""
    tokenizer = made(Tokenizer.train([TEXT, "12 34 2024\n" * 50], 400).merges, SPECIAL_TOKENS, digits)
    rng, cut = Random(8), 0
    corpora = [["abc123" * 400], ["1 2  3\n\n4" * 200], ["the,cat,中文。" * 150], ["<b>low</b>'s<i>x</i>" * 150]]
    for _ in range(100):
        corpora.append([random_text(rng, rng.randrange(1, 400)).strip("\r\n") or "x" for _ in range(rng.randrange(1, 9))])
    for documents in corpora:
        line_end = rng.choice(["\n", "\r\n"])
        separators = (line_end * rng.randrange(1, 4) + EOT) * rng.choice([1, 1, 1, 90]) + line_end * rng.randrange(1, 4)
        write("corpus", separators.join(documents).encode("utf-8", "surrogatepass"))
        cut += len(tk.find_chunks("corpus", size=300)) - 1
        assert encode_to_ids(tokenizer, "corpus") == expected_ids(tokenizer, documents), ascii(documents)
    assert cut > 500


def test_one_word_and_a_binary_file_come_back(tokenizer, small_chunks):
    for text in "a" * 5000, "中" * 3000, " " * 5000, "👍" * 2000:       # one word, cut between two characters
        write("corpus", text)
        chunks = tk.find_chunks("corpus", size=300)
        assert len(chunks) > 5 and all(0 < len(script.read_chunk(*chunk).decode("utf-8")) < 800 for chunk in chunks)
        assert tokenizer.decode(encode_to_ids(tokenizer, "corpus")) == text + EOT
    data = Random(9).randbytes(20_000)
    write("corpus", data)
    assert encode_to_ids(tokenizer, "corpus") == expected_ids(tokenizer, [data])


@parametrize("window, cut", [
    (b"  ab\tcd", 4), (b"!> +> *", 3), (b"a> b> cd e", 1),                  # before white space that follows something
    (b"\x80" * 3 + b"ab cd", 5), (b"\x80" * 4 + b"b cd", 5), (b"abc123", 3),                           # after letters or digits
    (b"abc<x1.", 5), (b"12<3|4.a.", 6), (b"abc\xe4", 2), (b"123\xe4", 2),
    (b">>\n<|endoftext|>\r\n\n>>", 19), (b">>\n<|endoftext|>\n>\n<|endoftext|>\n\n>>", 17),      # after a separator
    (b">>\n<|endoftext|>\n", 8), ("👍👍👍".encode(), 4), (b"a", 0), (b"\x81" * 5 + b">>>", 5)])            # in the middle
def test_cuts_by_hand(window, cut):
    assert tk.find_cut(window) == cut


def test_chunks_by_hand(monkeypatch):
    for before, cut in (65535, 65535), (65536, 32768):      # the space is the last of the 64 KiB; it lies behind them
        write("word", b"a" * (100 + before) + b" " + b"a" * 70000)
        end = 100 + 65536 + 1
        assert tk.find_chunks(("word", 0, end), size=100) == [("word", 0, 100 + cut), ("word", 100 + cut, end)]
    put(monkeypatch, tk, CUT_WINDOW=10, CHUNK=10)
    write("text", "ab " * 40)
    for row in "4 35 65 95", "4 35 74", "4 35 65 75", "0 32 62 92 120", "7 7":
        cuts = [*map(int, row.split())]
        assert tk.find_chunks(("text", cuts[0], cuts[-1]), size=30) == [("text", a, b) for a, b in itertools.pairwise(cuts)]
    seen = []
    tokenizer = Tokenizer.train_files(["text"], 262, progress=lambda done, total: seen.append(done))
    assert seen == [41, 83, 120]                            # of four times as many bytes where words are counted
    tokenizer.encode_file("text", "ids.bin", progress=lambda done, total: seen.append(done))
    assert seen[3:] == [place + (2, 1, 3)[place % 3] for place in range(10, 110, 10)] + [120]          # after the next b


@parametrize("text", ["c", "\x01", "ab", "\x02\x01", "c\n"])
def test_a_document_ends_with_one_separator_whatever_its_last_id(text):
    """The separator's id, 257, has the bytes 1, 1: as bytes, those of "c" are greater, those of 0 less."""
    tokenizer = made([(97, 98)], SPECIAL_TOKENS)
    write("a", text)
    write("zero", "\0")
    ids = tokenizer.encode(text)
    assert encode_to_ids(tokenizer, "a", "a", "zero") == [*ids, 257, *ids, 257, 0, 257]


def test_several_files_and_parts_of_one(tokenizer, small_chunks):
    """Each file's last document ends with the end-of-text id, whether or not the file ends with a separator."""
    texts = [f"{i} " * 150 + f"\n\n{EOT}\n\n" + "end" for i in range(4)]
    for i, end in enumerate([f"\n\n{EOT}\n", "", f"\n{EOT}", f"\n{EOT}\n\n{EOT}"]):
        write(f"{i}", texts[i] + end)
    Path("none").touch()
    files = [*"none 0 1 none 2 3".split(), ("1", 2, 5), ("1", 3, 3)]
    documents = [part for text in texts for part in text.split(f"\n\n{EOT}\n\n")]
    assert encode_to_ids(tokenizer, *files) == expected_ids(tokenizer, [*documents, "1 1"])


@parametrize("special, end", [
    (["</s>", EOT], EOT), (["<s>", "</s>"], "</s>"), (["<|im_start|>", "<|im_end|>"], "<|im_end|>"), (["<s>"], None)])
def test_what_ends_a_text_for_others(special, end):
    """The first of those names; a line of <|endoftext|> in a corpus becomes it."""
    other = made([], special)
    write("text", f"a\n{EOT}\nc")
    if end:
        assert encode_to_ids(other, "text") == [97, other.special[end], 99, other.special[end]]
    else:
        with value_error(r"^The tokenizer has no special token <\|endoftext\|>\.$"):
            other.encode_file("text", "ids.bin")
        assert os.listdir() == ["text"]


# Several processes

@once_a_module
def large(tmp_path_factory):
    """A text in which documents, emoji and bytes that are not UTF-8 fall across the borders of chunks."""
    path = tmp_path_factory.mktemp("large") / "large.txt"
    rng, words = Random(10), TEXT.split()
    texts = [" ".join(rng.choices(words, k=2000)) + rng.choice([" 👍", " \udcff", ""]) for _ in range(104)]
    path.write_bytes(f"\n\n{EOT}\n\n".join(texts).encode("utf-8", "surrogateescape"))
    return str(path)


@pytest.fixture(params=["fork", "spawn"])
def method(request, monkeypatch):
    """Both ways in which a worker may start; and the large text, of 1.2 MB, is worth several."""
    put(monkeypatch, script, START_METHOD=request.param, WORTH_A_PROCESS=1)
    monkeypatch.setattr(tk, "CHUNK", 130_000)
    return request.param


@once_a_module
def of_one(tokenizer, large):
    """(ids, merges) of the large text, of one process that has each document by itself."""
    documents = read(large).split(f"\n\n{EOT}\n\n".encode())
    return expected_ids(tokenizer, documents), Tokenizer.train(documents, 300).merges


def test_processes_do_not_change_results(tokenizer, large, of_one, method, monkeypatch):
    calls = []
    ids, merges = of_one
    assert encode_to_ids(tokenizer, large, processes=3, progress=lambda *call: calls.append(call)) == ids
    assert len(calls) == 9 and calls[-1] == (os.path.getsize(large),) * 2 and calls == sorted(calls)
    assert Tokenizer.train_files([large], 300, processes=2).merges == merges


class Pool:
    """Notes what a ProcessPoolExecutor is asked for, and does it here."""
    seen = []

    def __init__(self, processes, context, initializer, arguments):
        assert (context.get_start_method(), initializer) == (script.START_METHOD, script.start_worker)
        self.seen.append(processes)
        script.work.function, = arguments

    def map(self, function, chunks):
        assert function is script.work and signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.seen.append(len(chunks))
        return map(function, chunks)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.seen.append("end")


@parametrize("count, asked, seen", [
    (9, None, "3 9 end"), (9, 2, "2 9 end"), (4, 9, "2 4 end"), (9, 1, ""), (1, 9, ""), (300, 2, "2 128 128 44 end")])
def test_as_many_processes_as_pay_and_bounded_work(monkeypatch, count, asked, seen):
    """As many as asked for or as there are cores, but each has enough to do.  Where a fork is safe, they are forked."""
    assert script.START_METHOD == {"linux": "fork"}.get(sys.platform)
    put(monkeypatch, script, ProcessPoolExecutor=Pool, available_cores=lambda: 3, WORTH_A_PROCESS=100, START_METHOD="spawn")
    Pool.seen.clear()
    chunks = [("x", i * 50, i * 50 + 50) for i in range(count)]
    assert [*script.run_chunks(lambda *chunk: chunk, chunks, asked, None)] == chunks
    assert " ".join(map(str, Pool.seen)) == seen and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_file_that_goes_away_is_one_sentence(monkeypatch):
    monkeypatch.setattr(script, "WORTH_A_PROCESS", 1)
    write("text", "ab")
    for processes in 1, 2:
        results = script.run_chunks(tk.read_documents, [("text", 0, 2), ("gone", 0, 2)], processes, None)
        assert next(results) == [b"ab"]
        with pytest.raises(OSError, match="gone"):
            next(results)


def test_an_interrupt_leaves_no_process_and_no_file(tokenizer, large, method):
    began = []

    def interrupt(done, total):
        began.extend(multiprocessing.active_children())
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as interrupted:       # whose traceback would keep a generator alive
        tokenizer.encode_file(large, "ids.bin", processes=2, progress=interrupt)
    assert interrupted and len(began) == 2 and not any(worker.is_alive() for worker in began) and not os.listdir()


def test_a_worker_that_dies_is_one_sentence(monkeypatch, method):
    """Its function is found by its name, as a worker that is spawned must find it."""
    write("deadly.py", "import os\ndef die(*chunk):\n    os._exit(3)\n")
    monkeypatch.syspath_prepend(os.getcwd())
    with pytest.raises(concurrent.futures.BrokenExecutor) as died:
        next(script.run_chunks(importlib.import_module("deadly").die, [("x", 0, 9)] * 5, 2, None))
    assert script.explain(died.value) == ("A process of the tokenizer ended early.  If memory is short, allow fewer "
                                          "cores: taskset -c 0 python ...")


PARENT = f"""
import multiprocessing.process, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import script, tokenizer
script.WORTH_A_PROCESS = tokenizer.CHUNK = 1 << 17
_, path, script.START_METHOD, case = sys.argv
def stay(done, total):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)
def start(self, begin=multiprocessing.process.BaseProcess.start):
    begin(self)
    os.kill(os.getpid(), signal.SIGINT)
if __name__ == "__main__":
    if case == "interrupted":
        multiprocessing.process.BaseProcess.start = start
    try:
        tokenizer.Tokenizer.train_files([path], 300, processes=2, progress=stay)
    except KeyboardInterrupt:
        sys.exit(3 + (signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def test_an_interrupt_while_processes_start_ends_them(large, method):
    """At the worst moment: one has started, and nobody yet would stop it."""
    write("parent.py", PARENT)
    done = python("parent.py", large, method, "interrupted")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")


def test_workers_end_with_their_parent_and_ctrl_c_does_not_reach_them(large, method):
    write("parent.py", PARENT)
    parent = subprocess.Popen([sys.executable, "parent.py", large, method, "stay"], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
    workers = list(map(int, parent.stdout.readline().split()))
    assert len(workers) == 2

    def status(pid, key):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return re.search(rf"{key}:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
        return "Z"
    for pid in workers:
        os.kill(pid, signal.SIGINT)
        assert int(status(pid, "SigBlk"), 16) >> (signal.SIGINT - 1) & 1 and status(pid, "State") != "Z"
    parent.kill()
    parent.communicate()
    for _ in range(600):                                    # a minute, if need be; as a rule at once
        if {status(pid, "State") for pid in workers} == {"Z"}:
            return
        time.sleep(0.1)
    pytest.fail("workers outlive their parent")


def test_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: {1, 5, 7}}[pid], raising=False)
    assert script.available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert script.available_cores() == 1


# On disk

def altered(tokenizer, key, value):
    """Write a tokenizer.json in which the last entry of this name has another value, in JSON."""
    tokenizer.save("tokenizer.json")
    before, _, after = Path("tokenizer.json").read_text().rpartition(f'"{key}":')
    write("tokenizer.json", f'{before}"{key}": {value}, "another name":{after}')


def test_the_saved_file_is_all_that_the_format_asks_for():
    """What `tokenizers` reads, key by key."""
    Tokenizer.train([" é é"], 262).save("tokenizer.json")
    text = Path("tokenizer.json").read_text()
    names = [*tk.byte_chars(), "ĠÃ", "ĠÃ©", *SPECIAL_TOKENS]
    shown = "".join(names[:256])
    assert "ĀāĂă" in shown and 'Ġ!"' in shown and "~ġĢģ" in shown and "ł¡¢" in shown and "¬Ń®" in shown
    content = json.loads(text)
    assert content["model"].pop("vocab") == {name: i for i, name in enumerate(names)}
    added = """{"id": %d, "content": "%s", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true}"""
    assert content.pop("added_tokens") == [json.loads(added % (258 + i, name)) for i, name in enumerate(SPECIAL_TOKENS)]
    assert content == json.loads("""{
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "merges": ["Ġ Ã", "ĠÃ ©"]}}""")
    assert "ĠÃ" in text and text.startswith('{\n "version"')         # readable, a line an entry
    assert os.listdir() == ["tokenizer.json"]


def test_damaged_files_are_refused_in_one_sentence(tokenizer):
    tokenizer.save("tokenizer.json")
    whole = read("tokenizer.json")
    rng = Random(11)
    for place in [0, len(whole) - 1, *rng.sample(range(len(whole)), 150)]:
        flipped = bytes([whole[place] ^ 1 << rng.randrange(8)])
        for after in b"", flipped + whole[place + 1:]:              # this may be another tokenizer
            write("tokenizer.json", whole[:place] + after)
            try:
                assert Tokenizer.load("tokenizer.json").encode(TEXT) and after
            except ValueError as error:
                assert re.match("tokenizer.json is (damaged: it is no JSON|not a tokenizer)[^\n]+$", str(error))


@parametrize("key, value", rows("""
    normalizer                | {"type": "NFC"}
    decoder                   | null
    decoder                   | {"type": "Fuse"}
    post_processor            | {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}]}
    post_processor            | {"type": "BertProcessing"}
    type                      | "Unigram"
    dropout                   | 0.1
    continuing_subword_prefix | "##"
    end_of_word_suffix        | "</w>"
    unk_token                 | "<unk>"
    byte_fallback             | true
    ignore_merges             | true"""))
def test_a_refusal_names_the_key_and_its_value(key, value):
    """A tokenizer without byte "b", where an unknown token would matter."""
    altered(Tokenizer.from_vocab({"a": 0, "aa": 1, "<unk>": 2}, ["a a"], ["<unk>"]), key, value)
    assert refusal(Tokenizer.load, "tokenizer.json") == ("tokenizer.json is not a tokenizer that tokenizer.py reads "
                                f'("{key}": {value} is not known here).')


BYTE_LEVEL = '{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}'
STEPS = '{"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, ' + BYTE_LEVEL + "]}"


@parametrize("value", [
    "null", '{"type": "Whitespace"}', '{"type": "Digits", "individual_digits": true}', BYTE_LEVEL.replace("false", "true"),
    BYTE_LEVEL.replace("true}", "false}"), STEPS.replace("true", "false", 1), STEPS.replace("[", f"[{BYTE_LEVEL}, "),
    STEPS.replace("false", "true"), STEPS.replace("Digits", "Split"), '{"type": "Split", "pattern": {"Regex": "x"}}'])
def test_other_words_are_refused_without_their_pattern(tokenizer, value):
    altered(tokenizer, "pre_tokenizer", value)
    assert refusal(Tokenizer.load, "tokenizer.json") == ("tokenizer.json is not a tokenizer that tokenizer.py reads (its pre_tokenizer divides "
                                "text into other words than GPT-2's and SmolLM's do).")


@parametrize("key, value, words", rows("""
    model        | []                             | .
    vocab        | []                             | .
    merges       | [7]                            | .
    added_tokens | null                           | .
    added_tokens | [{"id": "x", "content": "<x>"}] | no id below
    special      | false                          | its added token .*<.end.>.* is not known here
    lstrip       | true                           | its added token .*<.end.>.* is not known here
    rstrip       | true                           | its added token .*<.end.>.* is not known here
    single_word  | true                           | its added token .*<.end.>.* is not known here"""))
def test_foreign_files_are_refused(tokenizer, key, value, words):
    altered(tokenizer, key, value)
    with value_error(f"^tokenizer.json is not a tokenizer that tokenizer.py reads .*{words}.*$"):
        Tokenizer.load("tokenizer.json")


@parametrize("key, value", [
    ("pre_tokenizer", '{"type": "Sequence", "pretokenizers": [' + BYTE_LEVEL + "]}"),
    ("post_processor", BYTE_LEVEL.replace("false", "true")), *rows("""
    normalized         | true
    pre_tokenizer      | {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false}
    unk_token          | "<|endoftext|>"
    fuse_unk           | true
    dropout            | 0.0
    end_of_word_suffix | ""
    post_processor     | {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": []}""")])
def test_what_makes_no_difference_is_accepted(tokenizer, key, value):
    altered(tokenizer, key, value)
    again = Tokenizer.load("tokenizer.json")
    for name in "merges special tokens digits".split():
        assert getattr(again, name) == getattr(tokenizer, name)


def test_other_peoples_files():
    """By hand: a special token first (the vocabulary says so), the bytes in another order, none for "c", ids with a gap,
    two ways to "aba"."""
    vocab = '"vocab": {"<|im_start|>": 0, "b": 1, "a": 2, "1": 3, "Ġ": 4, "aba": 5, "ba": 6, "ab": 7'
    Path("other.json").write_text("""{
        "added_tokens": [{"id": 12, "content": "<|im_end|>"}, {"id": 9, "content": "<|im_start|>"}],
        "decoder": {"type": "ByteLevel"}, "pre_tokenizer": %s, "model": {%s}, "merges": ["ab a", ["a", "ba"], "b a", "a b"]}}"""
                                  % (STEPS, vocab))
    for _ in range(2):                                      # and once more, as we save it
        other = Tokenizer.load("other.json")
        assert b",".join(other.tokens) == b"<|im_start|>,b,a,1, ,aba,ba,ab,,,,,<|im_end|>"
        assert other.digits and str(other.special) == "{'<|im_start|>': 0, '<|im_end|>': 12}"
        assert str(other.merges) == "{(7, 2): 5, (2, 6): 5, (1, 2): 6, (2, 1): 7}"
        assert other.encode("aba ab 11acba<|im_end|>") == [5, 4, 7, 4, 3, 3, 5]     # "acba" is "aba", and "<|im_end|>" nothing
        assert other.decode([0, 5, 8, 12]) == "<|im_start|>aba<|im_end|>"
        other.save("other.json")
    saved = json.loads(read("other.json"))
    assert saved["pre_tokenizer"] == json.loads(STEPS)
    assert vocab + ', "<|im_end|>": 12}' in json.dumps(saved["model"], ensure_ascii=False)


# Conversations

def test_the_chat_template_gives_the_prompt():
    def raise_exception(words):
        raise ValueError(words)
    template = pytest.importorskip("jinja2").Environment().from_string(CHAT_TEMPLATE, {"raise_exception": raise_exception})
    system, ask, answer = [dict(role=role, content=role[:2]) for role in ("system", "user", "assistant")]
    for messages, text in [([ask], "<|user|>us<|end|>"),
                           ([ask, answer, ask], "<|user|>us<|end|><|assistant|>as<|end|><|user|>us<|end|>"),
                           ([system, ask, answer], "<|user|>sy\n\nus<|end|><|assistant|>as<|end|>")]:
        assert template.render(messages=messages, add_generation_prompt=True) == text + "<|assistant|>"
    for wrong in [ask, ask], [ask, system], [system, answer]:
        with value_error("the roles must be user and assistant in turn"):
            template.render(messages=wrong)


PLAIN = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
         "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OPENING = ("{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n" + SYSTEM
           + "<|im_end|>\\n' }}{% endif %}")
DEFAULT = PLAIN.replace("{{'<|im_start|>'", OPENING + "{{'<|im_start|>'", 1)


def test_templates_are_known_however_they_are_written():
    tidy = known_template(PLAIN)
    blank = " \n" * 100_000
    for old, new in [("\\n", "\n"), ("'", '"'), (" }}", "}}"), ("%}{%", "%}\n  {%"), ("<", "\\x3c"), ("|", "\\u007c"),
                     ("{% endfor", blank + "{%- endfor" + blank), ("%}{{'", "%}\n    {{- '")]:
        assert known_template(PLAIN.replace(old, new)) == tidy, new
    spaced = re.sub("{([{%])", r"\n  {\1-", re.sub("([%}])}", r"-\1}\n", PLAIN))
    assert known_template(tidy) == known_template(PLAIN + "\n") == known_template(spaced) == tidy
    assert known_template(DEFAULT) != tidy and SYSTEM in known_template(DEFAULT) and known_template("") == ""
    dense = re.sub(r"\s*\n\s*", "", CHAT_TEMPLATE).replace("-", "")
    assert known_template(dense) == known_template(f"\n{CHAT_TEMPLATE}\n") == CHAT_TEMPLATE
    for old, new in [("}}{%", "}}\n{%"), ("%}{{", "%} {{"), (" + '\\n'}}", "}}"), ("assistant", "bot"),
                     ("{% endfor %}", OPENING + "{% endfor %}"), ("\\n", "\\x"), (PLAIN, "\n" + PLAIN), (PLAIN, PLAIN + "x"), (PLAIN, OPENING + PLAIN), (PLAIN, "x")]:
        assert known_template(PLAIN.replace(old, new)) is None, new
    for old, new in (OPENING, OPENING * 2), (SYSTEM, ""), ("loop.first and ", ""), (SYSTEM, "a' + messages[0]['role'] + 'b"):
        assert known_template(DEFAULT.replace(old, new)) is None, new
    assert known_template(None) is known_template([PLAIN]) is known_template(CHAT_TEMPLATE.replace("user", "human")) is None


@parametrize("part", [" ", "\n\t", "{%", "%}\n ", "- ", " -}}", "'", '"', "\\", '"\\"',
                                  "{%- for message in messages -%}   "])
@parametrize("begin", ["", "'{{", PLAIN])
def test_a_long_template_takes_time_in_proportion_to_its_length(part, begin):
    """100 kB; were the time quadratic, it would be a quarter of a minute."""
    template = begin + part * (100_000 // len(part))
    started = time.process_time()
    assert known_template(template) is None
    assert time.process_time() - started < 3                # 0.15 s where nothing else runs


@pytest.fixture
def chatml():
    special = ["<|im_start|>", "<|im_end|>", *SPECIAL_TOKENS]
    return made([(115, 121), (10, 10), (10, 32)], special)          # "sy", two line ends, line end and space


def pieces(tokenizer, *parts):
    return [i for part in parts for i in ([tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part))]


def test_prompts_have_the_form_of_the_template(chatml):
    start, end = "<|im_start|>", "<|im_end|>"
    for chatml.template in "", CHAT_TEMPLATE:
        assert chatml.end_of_turn == chatml.special["<|end|>"]
        for text in "Hi", "", "<|end|> is what she typed":
            expected = pieces(chatml, "<|user|>") + chatml.encode(text) + pieces(chatml, "<|end|>", "<|assistant|>")
            assert chatml.prompt(text) == chatml.prompt(text.encode(), system=b"be brief", first=False) == expected
        asked = pieces(chatml, "<|user|>", "be brief\n\nHi", "<|end|>", "<|assistant|>")
        assert chatml.prompt("Hi", system="be brief") == asked
    turn = start, "user\nHi", end, "\n", start, "assistant\n"
    quoted = DEFAULT.replace(SYSTEM, r"it\'s\t\u00e9 \"\\")
    for template, default in (PLAIN, None), (DEFAULT, SYSTEM), (quoted, "it's\té \"\\"):
        chatml.template = known_template(template)
        assert chatml.end_of_turn == chatml.special[end]
        opening = () if default is None else (start, f"system\n{default}", end, "\n")
        assert chatml.prompt("Hi") == pieces(chatml, *opening, *turn)
        assert chatml.prompt("Hi", system=b"sys") == pieces(chatml, start, "system\nsys", end, "\n", *turn)
        # one piece with what stands before it; and a name in a text is text
        for text in b"\n Hi", f"{end} x".encode(), b"\xff\xc3":
            assert chatml.prompt(text, system="sys", first=False) == [
                *pieces(chatml, "\n", start), *chatml.encode(b"user\n" + text), *pieces(chatml, *turn[2:])]
    with value_error("^The tokenizer has no special token <.user.>.$"):
        made([], [EOT]).prompt("Hi")


@parametrize("template", ["", PLAIN, DEFAULT])
@parametrize("system, first", [("", True), ("be brief", True), ("be brief", False)])
def test_of_a_long_text_the_end_is_kept_in_a_whole_frame(chatml, template, system, first):
    chatml.template = known_template(template)
    text = "  x\n\n y"
    ids, whole, empty = chatml.encode(text), *(chatml.prompt(said, None, system, first) for said in (text, ""))
    size = len(empty) - (3 + len(chatml.encode("assistant\n")) if template else 2)
    long = [*empty[:size], *ids, *empty[size:]]
    for room in range(1, len(whole) + 3):
        kept = size if room >= len(empty) else 1                # too little for the frame: the end of all
        expected = long[:kept] + long[max(len(long) - room, 0) + kept:]
        assert chatml.prompt(text, room, system, first) == (whole if room >= len(whole) else expected)


# What every script shares, where tests/test_scripts.py does not look

def test_progress_on_a_terminal(monkeypatch, out_text):
    clock = iter([50.0, 50.0, 54.0, 60.0])
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    progress = script.show_progress("seen:")
    for done in (0, 2_000_000, int(8e6)):
        progress(done, 8_000_000)
    assert out_text() == (
        "\rseen: 0 MB, 0.0 MB/s, 0%, 0 s left \033[K"
        "\rseen: 2 MB, 0.5 MB/s, 25%, 12 s left \033[K"
        "\rseen: 8 MB, 0.8 MB/s, 100%, 0 s left \033[K\n")


def test_a_file_is_replaced_when_all_is_on_the_disk(monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    put(monkeypatch, os, fsync=lambda fd: calls.append(os.fstat(fd).st_size) or fsync(fd),
        replace=lambda *paths: calls.append(paths) or replace(*paths))
    write("file", "old")
    for error in KeyboardInterrupt(), OSError(28, "No space left on device"):
        with pytest.raises(type(error)) as caught, script.replace_file("file") as file:
            file.write(b"half")
            raise error
        assert read("file") == b"old" and os.listdir() == ["file"]
    assert caught.value.filename == "file.new" and calls == []
    script.write_file("file", b"new")
    assert read("file") == b"new" and calls == [3, ("file.new", "file")]


# The command line

def run(*arguments, stdin=b"", **options):
    return python(f"{ROOT}/tokenizer.py", *arguments, input=stdin, **options)


@parametrize("data, shown", [
    (b"a \xc3\xa9", "a é"), (b"\n\t\0\x7f", r"\n\t\x00\x7f"), (b"\\n", r"\\n"), (b"\x80\xff\xe4", r"\x80\xff\xe4"),
    (b"\xe3\x80\x80\xc2\xad'\"", r"\xe3\x80\x80\xc2\xad'" + '"')])
def test_bytes_are_shown_as_printable_text(data, shown):
    assert tk.visible(data) == shown


def test_tokens_are_shown_with_bars():
    tokenizer = Tokenizer.train(["ab ab\n\n"], 262)
    assert tk.show(tokenizer, "ab a\nb\n") == "ab| |a|\\n|\nb|\\n\n6 tokens for 7 bytes, 1.17 bytes a token"
    assert tk.show(tokenizer, "") == "\n0 tokens for 0 bytes, 0.00 bytes a token"


def test_the_commands(capfdbinary):
    """What each command prints, to the letter."""
    def called(line, *text):
        tk.main([*line.split(), *text])
        sys.stdout.flush()
        return b"".join(capfdbinary.readouterr()).decode()

    write("text.txt", "ab ab ab\n")
    assert called("train text.txt") == "tokenizer.json: 262 of 4096 tokens learned\n"
    assert called("train", "text.txt", "text.txt", "--vocab", "261", "--out", "x.json") == "x.json: 261 of 261 tokens learned\n"
    assert called("show --tokenizer tokenizer.json", "ab ab") == "ab| ab\n2 tokens for 5 bytes, 2.50 bytes a token\n"
    for name, when in ("old", 1), ("new", 2), ("other", 1):
        weights = Path(f"out/{name}/model.safetensors")
        weights.parent.mkdir(parents=True)
        weights.touch()
        os.utime(weights, (when, when))
    os.replace("x.json", "out/new/tokenizer.json")
    assert called("show --ids", "ab ab") == "256 32 256\n"       # the newest model's, though a tokenizer.json lies here
    ids = run("show", "-", "--ids", stdin=bytes(reversed(range(256)))).stdout.split()
    assert [*map(int, ids)] == [*reversed(range(256))]


def test_a_terminal_gets_only_what_it_can_show():
    made([(0xe4, 0xb8), (256, 0xad)], SPECIAL_TOKENS).save("t.json")
    done = run("show", "中", "--tokenizer", "t.json", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, b"\\u4e2d\n1 tokens for 3 bytes, 3.00 bytes a token\n")


@parametrize("arguments, words", [("", "command"), *rows("""
    train missing.txt           | missing.txt
    train empty.txt             | no text in
    train .                     | not a plain file
    train text.txt --vocab 259  | at least 260
    train text.txt --vocab 65537 | at most 65,536
    show x                      | there is no trained model in out/: run `make` or `python train.py`, or give --tokenizer the file that `python tokenizer.py train FILE` wrote
    show x --tokenizer text.txt | text.txt is damaged: it is no JSON
    show x --unknown            | unrecognized""")])
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, words):
    write("text.txt", TEXT)
    write("empty.txt", "")
    done = run(*arguments.split())
    assert re.fullmatch(f"error: .*{re.escape(words)}.*\n", done.stderr.decode())
    assert (done.returncode, done.stdout) == (2, b"")
    assert not os.path.exists("tokenizer.json")


def test_import_does_nothing():
    code = "import tokenizer; print(tokenizer.char_classes.cache_info().currsize)"
    done = python("-c", code, cwd=ROOT)
    assert (done.stdout, done.stderr) == (b"0\n", b"")
