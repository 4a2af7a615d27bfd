"""tokenizer.py against slow, obvious versions of itself, on damaged input, and through its command line."""
import array
import concurrent.futures
import contextlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import script  # noqa: E402
import tokenizer as tk  # noqa: E402
from tokenizer import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, Tokenizer, known_template  # noqa: E402

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


def slow_digits(text):
    """Each number by itself, and GPT-2's pattern on each run between two of them, as if it were the whole text."""
    runs = re.split("([" + re.escape("".join({char for char in text if unicodedata.category(char)[0] == "N"}) or "0") + "])", text)
    return [word for i, run in enumerate(runs) for word in (slow_words(run) if i % 2 == 0 else [run])]


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


def slow_bpe(word, merges):
    """List of ids, {(left id, right id): made id} -> list of ids: the first merge that fits, at its first place, again and
    again."""
    while True:
        for pair, made in merges.items():
            places = [i for i in range(len(word) - 1) if (word[i], word[i + 1]) == pair]
            if places:
                word = [*word[:places[0]], made, *word[places[0] + 2:]]
                break
        else:
            return word


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 400)


# Words

def test_words_equal_a_character_by_character_reading():
    rng = random.Random(0)
    for text in SAMPLES + [random_text(rng, rng.randrange(1, 80)) for _ in range(3000)]:
        text = tk.to_str(text)
        assert tk.split_words(text) == slow_words(text), ascii(text)


def test_digits_are_words_and_end_what_is_between_them():
    rng = random.Random(12)
    for text in SAMPLES + [random_text(rng, rng.randrange(1, 80)) for _ in range(3000)]:
        text = tk.to_str(text)
        assert tk.split_words(text, digits=True) == slow_digits(text), ascii(text)
    for text, words in [("a  12 b", ["a", "  ", "1", "2", " b"]), ("  b", [" ", " b"]), ("  ", ["  "]), (" 1", [" ", "1"]),
                        ("it's 3's\n4", ["it", "'s", " ", "3", "'s", "\n", "4"]), ("x²Ⅷ٣!", ["x", "²", "Ⅷ", "٣", "!"])]:
        assert tk.split_words(text, True) == words


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
        assert "".join(parts) == text and all(len(part) > 7 for part in parts[:-1])
        for digits in False, True:
            assert [word for part in parts for word in tk.split_words(part, digits)] == tk.split_words(text, digits)


def test_parts_are_as_long_as_asked_for_or_a_word_longer():
    assert list(tk.cut_text("ab  cd efgh i", size=2)) == ["ab  cd", " efgh", " i"]
    assert list(tk.cut_text("ab  cd efgh i", size=1)) == ["ab", "  cd", " efgh", " i"]
    assert list(map(len, tk.cut_text("ab " * 2_000))) == [4_097, 1_903]


# Training

@pytest.mark.parametrize("text", [TEXT, "aaaa aaaa aa aaaaaaa", "ab ba ab ba abab", "abcabcabc" * 5, "x", "",
                                  " \n \n \n", "\udc80é" * 4])
def test_training_equals_recounting(text):
    merges = slow_train([text], 400)
    trained = Tokenizer.train([text], 400)
    assert list(trained.merges) == merges
    assert trained.vocab_size == 260 + len(merges)
    assert len(set(trained.tokens)) == trained.vocab_size


def test_training_equals_recounting_for_more_merges_than_there_are_bytes():
    text = random_text(random.Random(7), 6000)
    merges = list(Tokenizer.train([text], 600).merges)
    assert len(merges) == 340 and merges == slow_train([text], 600)


def test_training_equals_recounting_on_random_text():
    rng = random.Random(2)
    for alphabet in ("ab ", "abc' ", "aé中👍 \n", "\0\1", "\0\1\2"):        # byte 0 is an id like any other
        for _ in range(25):
            text = "".join(rng.choices(alphabet, k=rng.randrange(5, 120)))
            assert list(Tokenizer.train([text], 330).merges) == slow_train([text], 330), ascii(text)


def test_the_plain_and_the_fast_way_learn_the_same():
    """Words as `count_words` gives them, and any others: ties, runs of one byte, pairs that run out."""
    assert tk.learn_merges_plain(Counter({"aaa": 1}), 9) == [(97, 97)]      # counted twice, merged once
    assert tk.learn_merges_plain(Counter({"ab": 1}), 9) == tk.learn_merges_plain(Counter(), 9) == []
    words = tk.count_words([TEXT])
    assert tk.learn_merges(words, 200) == tk.learn_merges_plain(words, 200)
    ran_out = 0
    for seed in range(100):
        rng = random.Random(seed)
        alphabet = rng.choice(["a", "ab", "abc", "aab", " ab", "é中a", "\0\1"])
        words = Counter()
        for _ in range(rng.randrange(1, 12)):
            words["".join(rng.choices(alphabet, k=rng.randrange(1, 30)))] += rng.choice([1, 1, 2, 5])
        merges = tk.learn_merges(words, 12)
        assert merges == tk.learn_merges_plain(words, 12), (seed, words)
        assert tk.learn_merges(words, 3) == merges[:3] == tk.learn_merges_plain(words, 3)
        ran_out += len(merges) < 12
    assert 20 < ran_out < 80


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


def test_rare_words_are_dropped_when_there_are_too_many(tmp_path, monkeypatch):
    """After each chunk: the more frequent half stays, of equal counts those that came first."""
    counted = []
    monkeypatch.setattr(tk, "MAX_WORDS", 4)
    monkeypatch.setattr(tk, "learn_merges", lambda words, wanted: counted.append((dict(words), wanted)) or [])
    for name, text in [("a", "w x y z"), ("b", " x y"), ("c", " z q")]:
        (tmp_path / name).write_text(text)
    for names, vocab_size, expected in [("a", 300, {"w": 1, " x": 1, " y": 1, " z": 1}),
                                        ("ab", 523, {"w": 1, " x": 2, " y": 2, " z": 1}),
                                        ("abc", 4096, {" x": 2, " y": 2}), ("ca", 300, {" z": 2, " q": 1})]:
        assert Tokenizer.train_files([tmp_path / name for name in names], vocab_size).vocab_size == 260
        assert counted.pop() == (expected, vocab_size - 260)


# Encoding and decoding

def test_encoding_equals_replaying_the_merges(tokenizer):
    rng = random.Random(4)
    for text in SAMPLES + [random_text(rng, rng.randrange(1, 60)) for _ in range(300)] + [TEXT]:
        assert tokenizer.encode(text) == slow_encode(tokenizer, text), ascii(text)


def both_ways(tokenizer, word):
    """Bytes -> ids, by the loop for short words and by the heap for long ones."""
    ids = [-1, *(tokenizer.encoder.byte_ids[byte] for byte in word if byte in tokenizer.encoder.byte_ids), -1]
    short, long = tokenizer.encoder.merge(word), tokenizer.encoder.merge_long(ids)
    assert short == long
    return short


def test_the_way_for_long_words_gives_the_same(tokenizer):
    rng = random.Random(5)
    for _ in range(300):
        word = "".join(rng.choices(["a", "an", "the", "ban", "low", "中"], k=rng.randrange(1, 40))).encode()[:190]
        both_ways(tokenizer, word)
    pairs = Tokenizer(range(256), [(97, 98), (99, 100), (256, 257), (258, 258), (258, 256)], SPECIAL_TOKENS)
    assert pairs.encode("abcd" * 101 + "ab") == [259] * 50 + [260]      # a pair of pairs: both must know each other
    for alphabet in "ab", "abc", "aab":
        deep = Tokenizer.train(["".join(rng.choices(alphabet, k=2000))], 330)
        for _ in range(30):
            word = "".join(rng.choices(alphabet, k=rng.randrange(1, 60))).encode()
            assert both_ways(deep, word) == slow_encode(deep, word)


def test_ids_and_ranks_of_any_order():
    """A part may be made by a later merge, two merges may make one token, ids need not follow ranks, bytes may be missing."""
    rng, twice, early = random.Random(13), 0, 0
    for _ in range(500):
        names, merges = list(rng.choice(["a", "ab", "abcd"])), []
        for _ in range(rng.randrange(1, 12)):
            left, right = rng.choices(names, k=2)
            if (left, right) not in merges:
                merges.append((left, right))
                names += [left + right] if left + right not in names else []
        rng.shuffle(merges)
        vocab = dict(zip(names, rng.sample(range(60), len(names))))                 # with ids that no token has
        odd = Tokenizer.from_vocab({**vocab, "<|x|>": 70}, merges, ["<|x|>"])
        assert list(odd.merges.items()) == [((vocab[a], vocab[b]), vocab[a + b]) for a, b in merges]
        assert odd.vocab_size == 71 and odd.special == {"<|x|>": 70} and odd.tokens[70] == b"<|x|>"
        assert all(odd.tokens[i] == name.encode() for name, i in vocab.items())
        assert sum(token == b"" for token in odd.tokens) == 71 - len(names) - 1
        twice += len(set(odd.merges.values())) < len(merges)
        early += any(made in pair for i, made in enumerate(odd.merges.values()) for pair in list(odd.merges)[:i])
        for _ in range(10):
            word = "".join(rng.choices("abcde", k=rng.randrange(1, 40)))            # there is no token for "e"
            kept = "".join(char for char in word if char in names)
            ids = slow_bpe([vocab[char] for char in kept], odd.merges)
            assert both_ways(odd, word.encode()) == odd.encode(word) == ids and odd.decode(ids) == kept
    assert twice > 20 and early > 100
    assert odd.encode("ee") == odd.encode("") == odd.encode("\ud800") == []


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
    tokenizer.encoder.clear()
    for word, kept in (("a", 1), ("b", 2), ("b", 2), ("c", 3), ("a", 3), ("d", 1), ("a", 2)):
        tokenizer.encode(word)
        assert len(tokenizer.encoder) == kept
    monkeypatch.undo()
    tokenizer.encoder.clear()
    for length, kept in (65, 0), (64, 1):                   # what is longer hardly comes again
        tokenizer.encode("a" * length)
        assert len(tokenizer.encoder) == kept
    tokenizer.encoder["a"] = array.array("H", [7]).tobytes()
    assert tokenizer.encode("a") == [7]                     # it is read, not only written
    tokenizer.encoder.clear()


@pytest.mark.parametrize("missing, code", [(0, "H"), (1, "I")])
def test_ids_take_16_bits_where_they_fit(missing, code, tmp_path):
    """Up to 65,536 tokens, the last id being 65,535."""
    pairs = [(left, right) for left in range(256) for right in range(256)][:65536 - 257 + missing]
    large = Tokenizer(range(256), pairs, [END_OF_TEXT])
    assert large.vocab_size == 65536 + missing and large.encoder.typecode == code
    last = bytes([pairs[-1][0], pairs[-1][1]])
    assert large.encode(last) == [large.vocab_size - 2] and large.decode([large.vocab_size - 1]) == END_OF_TEXT
    (tmp_path / "text").write_bytes(last)
    if code == "H":
        assert encode_to_ids(large, tmp_path / "text") == [65534, 65535]
    else:
        with pytest.raises(ValueError, match="^65537 tokens are too many: at most 65536.$"):
            encode_to_ids(large, tmp_path / "text")


def test_ids_out_of_range_are_named(tokenizer):
    for bad in -1, 400, 10**30:
        with pytest.raises(ValueError, match=f"Token id {bad} .*V = {tokenizer.vocab_size}"):
            tokenizer.decode([5, bad])
    assert tokenizer.decode([]) == "" and tokenizer.decode(array.array("H", [72, 105])) == "Hi"


def test_other_types_are_refused(tokenizer):
    for bad, kind in (None, "NoneType"), (5, "int"), (["a"], "list"):
        with pytest.raises(TypeError, match=f"need a bytes-like object, {kind} found"):
            tokenizer.encode(bad)
    assert tokenizer.encode(memoryview(b"the")) == tokenizer.encode("the")


def test_long_words_are_not_quadratic(tokenizer, monkeypatch):
    """Counted in steps of the heap, not in seconds."""
    encoder, steps, long = tokenizer.encoder, [], []
    heappop, merge_long = tk.heappop, tk.Encoder.merge_long
    monkeypatch.setattr(tk, "heappop", lambda heap: steps.append("pop") or heappop(heap))
    monkeypatch.setattr(tk.Encoder, "merge_long", lambda self, ids: long.append(len(ids)) or merge_long(self, ids))
    assert len(encoder.merge(b"an" * 100)) < 200 and long == steps == []        # 200 bytes go the short way
    assert len(encoder.merge(b"an" * 100 + b"a")) < 200 and long.pop() == 203   # 201 the long one, with two ends
    for text in "an" * 50_000, "a" * 100_000, "banana" * 20_000, "ab" * 50_000, " " * 100_000, "中" * 40_000, "👍" * 30_000:
        n = len(text.encode())
        steps.clear()
        ids = encoder.merge(text.encode())
        assert long.pop() == n + 2 and len(steps) <= 2 * n          # a pair for each two neighbours there ever were
        assert tokenizer.decode(ids) == text and tokenizer.encode(text) == ids
        long.clear()


@pytest.mark.skipif(not GPT2.is_dir(), reason="the real texts that this test reads are no part of the repository")
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
    for vocab in '{"a": 0}', "[]", "7", "null", '{"a": "x"}', '{"a": 0, "b": "x"}', "{", '{"a": [0]}':
        (tmp_path / "e.json").write_text(vocab)
        with pytest.raises(ValueError, match="v.bpe, .*e.json: not GPT-2's tokenizer files "):
            Tokenizer.from_gpt2(tmp_path / "v.bpe", tmp_path / "e.json")


def test_digits_merge_unless_each_is_a_word():
    vocab = {**{char: i for i, char in enumerate(tk.byte_chars())}, "42": 256}
    four, two = (vocab[char] for char in "42")
    assert Tokenizer.from_vocab(vocab, ["4 2"], []).encode("42") == [256]
    assert Tokenizer.from_vocab(vocab, ["4 2"], [], digits=True).encode("42") == [four, two]


def test_vocabularies_that_do_not_fit_their_merges():
    chars, special = tk.byte_chars(), [END_OF_TEXT]
    vocab = {name: i for i, name in enumerate([*chars, "ab", "abc", *special])}
    good = Tokenizer.from_vocab(vocab, ["a b", ("ab", "c")], special)
    assert good.merges == {(97, 98): 256, (256, 99): 257} and good.special == {END_OF_TEXT: 258}
    assert good.tokens[:256] == [bytes([i]) for i in range(256)] and good.encode("abcab") == [257, 256]
    alike = "its tokens, or their ids, do not all differ"
    number = "its token a has no id below 1048576, but {}"
    merge = "its merge {} does not make a token of two others"
    for change, merges, special, words in [
            ({"more": 258}, [], special, alike), ({"a": 98}, [], special, alike),
            ({"é1": 300, "Ã©1": 301}, [], ["é1"], alike),                           # two names of the same bytes
            *[({"a": i}, [], special, number.format(i)) for i in (-1, 1 << 20, "97", 97.5, None)],
            ({"a b": 300}, [], special, "' '"), ({"中": 300}, [], special, "'中'"),   # they stand for no byte
            ({}, [], ["a"], "a special token is a single character"),
            ({"é": 300, "Ã©": 301}, [], ["é1", "é"], alike),
            ({"é": 300}, [], ["é1", "é"], "a special token is a single character"),
            ({}, ["a b", "a bc"], special, merge.format("a bc")), ({}, ["abc "], special, merge.format("abc ")),
            ({}, [["", ""]], special, merge.format(" ")), ({}, [["b", "a"]], special, merge.format("b a")),
            ({}, ["ab c", "a b"], ["ab"], merge.format("ab c")), ({}, ["a b"], ["ab"], merge.format("a b")),
            ({}, ["a b c"], special, "too many values to unpack (expected 2)"),
            ({}, [["abc"]], special, "not enough values to unpack (expected 2, got 1)"),
            ({}, ["a b", "ab c", "a b"], special, "one of its merges is there twice")]:
        with pytest.raises((ValueError, KeyError)) as error:
            Tokenizer.from_vocab({**vocab, **change}, merges, special)
        assert str(error.value) == words
    assert Tokenizer.from_vocab({"a": (1 << 20) - 1}, [], []).vocab_size == 1 << 20
    with pytest.raises(ValueError):
        Tokenizer.from_vocab({}, [], [])


def test_the_order_of_the_bytes_is_the_vocabularys():
    """GPT-2's files begin with "!", not with byte 0."""
    order = [*range(33, 256), *range(33)]
    tokenizer = Tokenizer(order, [(64, 65)], [END_OF_TEXT])             # bytes 97 and 98
    assert tokenizer.encode("!ab a") == [0, 256, 255, 64] and tokenizer.decode([255, 256, 257]) == f" ab{END_OF_TEXT}"


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


def encode_to_ids(tokenizer, path, part=None, **options):
    """part: (start, end) in bytes, else the whole file."""
    out = f"{path}.ids"
    if part is None:
        count = tokenizer.encode_file(path, out, **options)
    else:
        count = tokenizer.encode_files([(path, *part)], out, **options)
    data = Path(out).read_bytes()
    os.remove(out)
    assert len(data) == 2 * count
    return [low + 256 * high for low, high in zip(data[::2], data[1::2])]


@pytest.mark.parametrize("text, documents", DOCUMENTS)
def test_documents(tokenizer, tmp_path, text, documents):
    path = tmp_path / "corpus.txt"
    path.write_bytes(text.encode())
    assert encode_to_ids(tokenizer, path) == expected_ids(tokenizer, documents)


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
        cut += len(tk.find_chunks(path, size=300)) - 1
        assert encode_to_ids(tokenizer, path) == expected_ids(tokenizer, documents), (trial, ascii(data))
    assert cut > 300


@pytest.mark.parametrize("window, cut", [
    (b"ab cd", 2), (b"  ab\tcd", 4), ("é中　a".encode(), 5), (b"!! a", 2),   # before white space that follows something
    (b"!> +> *", 3), (b"!> +> -+ *", 8), (b"a> b> cd e", 1),
    (b"\x80\xbfab cd", 4), (b"\x80" * 3 + b"ab cd", 5), (b"\x80" * 4 + b"b cd", 5),
    (b"abc123", 3), (b"123abc", 3), ("é中!".encode(), 5), (b"!!ab!cd!", 4),           # after letters or digits
    (b"abc<x1.", 5), (b"a|b.", 3), (b"12<3|4.a.", 6), (b"abc\xe4", 2), (b"123\xe4", 2), (b"!ab\xe4\xb8c1", 6),
    (b">>\n<|endoftext|>\r\n\n>>", 19), (b">>\n<|endoftext|>\n>\n<|endoftext|>\n\n>>", 17),      # after a separator
    (b">>\n<|endoftext|>\n", 8), (b">>", 1), ("👍👍👍".encode(), 4), (b"a", 0),            # in the middle
    (b"\x81\x81\xf0\x9f\x91\x8d", 2), (b"\x81" * 5 + b">>>", 5)])
def test_cuts_by_hand(window, cut):
    assert tk.find_cut(window) == cut


def test_chunks_by_hand(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_text("ab " * 40)
    monkeypatch.setattr(tk, "CUT_WINDOW", 10)
    for start, end, cuts in [(4, 95, [35, 65]), (4, 74, [35]), (4, 75, [35, 65]), (4, 44, []), (0, 120, [32, 62, 92]),
                             (7, 7, [])]:
        cuts = [start, *cuts, end]
        assert tk.find_chunks((path, start, end), size=30) == [(path, a, b) for a, b in zip(cuts, cuts[1:])]
    assert script.read_chunk(path, 4, 9) == b"b ab "
    path.write_text("a" * 34 + "aaaaaaaaaa bcd" + "a" * 60)         # no place to cut within the window: in its middle
    assert tk.find_chunks((path, 4, 80), size=30) == [(path, 4, 39), (path, 39, 69), (path, 69, 80)]


def test_a_cut_reads_64_kib(tmp_path):
    path = tmp_path / "text"
    for before, cut in (65535, 65535), (65536, 32768):      # the space is the last of the 64 KiB; it lies behind them
        path.write_bytes(b"a" * (100 + before) + b" " + b"a" * 70000)
        end = 100 + 65536 + 1
        assert tk.find_chunks((path, 0, end), size=100) == [(path, 0, 100 + cut), (path, 100 + cut, end)]


def test_training_and_encoding_go_by_chunks(tmp_path, monkeypatch):
    """Of four times as many bytes where words are counted; all of them of the file's bytes, in order."""
    monkeypatch.setattr(tk, "CHUNK", 100)
    monkeypatch.setattr(tk, "CUT_WINDOW", 10)
    path, seen = tmp_path / "text", []
    path.write_text("ab " * 400)
    tokenizer = Tokenizer.train_files([path], 262, progress=lambda *done: seen.append(done))
    assert seen == [(401, 1200), (803, 1200), (1200, 1200)]
    seen.clear()
    tokenizer.encode_file(path, tmp_path / "ids", progress=lambda *done: seen.append(done))
    cuts = [100 * i + (2, 1, 3)[100 * i % 3] for i in range(1, 12)]           # after the next b
    assert seen == [(cut, 1200) for cut in [*cuts, 1200]]


def test_a_range_of_a_file(tmp_path):
    path = tmp_path / "text"
    path.write_text("abc")
    assert tk.find_chunks(path, size=9) == tk.find_chunks((path, 0, 3), size=9) == [(path, 0, 3)]
    assert tk.find_chunks((path, 3, 3), size=9) == [(path, 3, 3)]
    assert tk.find_chunks((path, 1, 2), size=9) == [(path, 1, 2)]


@pytest.mark.parametrize("text, documents", [("a", ["a"]), ("a\nX\nb\nX\n", ["a", "b", ""]), ("X\na\n\nX\nX\nb", ["", "a", "b"]),
                                             ("X\n", ["", ""]), ("a\nX", ["a", ""]), ("", [""])])
def test_documents_of_a_part(tmp_path, text, documents):
    """A first or last one that is empty stays, as the separator beside it does; X: the separator."""
    (tmp_path / "text").write_text(text.replace("X", EOT))
    assert tk.read_documents(tmp_path / "text", 0, 1 << 20) == [document.encode() for document in documents]


def test_ids_on_disk_are_little_endian(tmp_path):
    """515 is 2 * 256 + 3, and the separator 768."""
    tokenizer = Tokenizer(range(256), [(left, right) for left in (0, 1) for right in range(256)], [END_OF_TEXT])
    (tmp_path / "text").write_bytes(b"\1\3")
    assert tokenizer.encode_file(tmp_path / "text", tmp_path / "ids") == 2
    assert (tmp_path / "ids").read_bytes() == b"\3\2\0\3"


@pytest.mark.parametrize("text", ["c", "\x01", "ab", "\x02\x01", "c\n"])
def test_a_document_ends_with_one_separator_whatever_its_last_id(tmp_path, text):
    """The separator's id, 257, has the bytes 1, 1: as bytes, those of "c" are greater, those of 0 less."""
    tokenizer = Tokenizer(range(256), [(97, 98)], SPECIAL_TOKENS)
    paths = [tmp_path / name for name in ("a", "b", "zero")]
    for path in paths:
        path.write_text("\0" if path.name == "zero" else text)
    ids = tokenizer.encode(text)
    for files, expected in [(paths[:1], [*ids, 257]), (paths[:2], [*ids, 257, *ids, 257]),
                            (paths, [*ids, 257, *ids, 257, 0, 257])]:
        out = tmp_path / "ids"
        assert tokenizer.encode_files(files, out) == len(expected)
        assert array.array("H", out.read_bytes()).tolist() == expected


def test_chunks_do_not_change_the_ids_of_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(tk, "CHUNK", 300)
    monkeypatch.setattr(tk, "CUT_WINDOW", 120)
    trained = Tokenizer.train([TEXT, "12 34 2024\n" * 50], 400)
    trained.digits = True
    trained.save(tmp_path / "tokenizer.json")
    digits = Tokenizer.load(tmp_path / "tokenizer.json")
    assert digits.digits and digits.encode("12 34") != trained.encode("12 34")
    rng, path = random.Random(14), tmp_path / "corpus.txt"
    for text in ["abc123" * 400, "1 2  3\n\n4" * 200, "12.5, x=7 " * 300, *(random_text(rng, 2000).strip("\r\n") for _ in range(20))]:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert len(tk.find_chunks(path, size=300)) > 3
        assert encode_to_ids(digits, path) == [*digits.encode(text), digits.special[EOT]], ascii(text)


def test_a_corpus_needs_a_separator(tmp_path):
    (tmp_path / "text").write_text("ab")
    with pytest.raises(ValueError, match=r"^The tokenizer has no special token <\|endoftext\|>.$"):
        Tokenizer(range(256), [], []).encode_file(tmp_path / "text", tmp_path / "ids")
    assert not (tmp_path / "ids").exists()


def test_a_prompt_is_put_together_from_ids(tokenizer):
    user, assistant, end = (tokenizer.special[f"<|{name}|>"] for name in ("user", "assistant", "end"))
    for text in ("The cat sat on the mat.", "", "<|end|> is what she typed", "中文"):
        ids = tokenizer.encode(text)
        whole = [user, *ids, end, assistant]
        assert tokenizer.prompt(text) == whole == tokenizer.prompt(text, None)
        for room in range(1, len(whole) + 3):
            found = tokenizer.prompt(text, room)
            assert found[0] == user and len(found) == min(room, len(whole))
            # of what follows <|user|>, the end
            assert found[1:] == whole[len(whole) - len(found) + 1:]
        assert tokenizer.prompt(text, 3) == [user, end, assistant] or text == ""


def test_the_chat_template_gives_the_prompt(tokenizer):
    jinja2 = pytest.importorskip("jinja2")

    def raise_exception(words):
        raise ValueError(words)
    template = jinja2.Environment().from_string(tk.CHAT_TEMPLATE)
    template.globals["raise_exception"] = raise_exception
    roles = [dict(role="user", content="a b"), dict(role="assistant", content="c"),
             dict(role="user", content="d")]
    text = template.render(messages=roles[:1], add_generation_prompt=True)
    assert text == "<|user|>a b<|end|><|assistant|>"
    assert template.render(messages=roles) == "<|user|>a b<|end|><|assistant|>c<|end|><|user|>d<|end|>"
    system = dict(role="system", content="be brief")
    text = template.render(messages=[system, *roles[:2]])
    assert text == "<|user|>be brief\n\na b<|end|><|assistant|>c<|end|>"
    for wrong in (roles[1:], [roles[0], roles[0]], [roles[0], system], [system, roles[1]]):
        with pytest.raises(ValueError, match="the roles must be user and assistant in turn"):
            template.render(messages=wrong)


PLAIN = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
         "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OPENING = ("{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n" + SYSTEM
           + "<|im_end|>\\n' }}{% endif %}")
DEFAULT = PLAIN.replace("{{'<|im_start|>'", OPENING + "{{'<|im_start|>'", 1)


def test_templates_are_known_however_they_are_written():
    tidy = known_template(PLAIN)
    for same in [tidy, PLAIN.replace("\\n", "\n"), PLAIN.replace("'", '"'), PLAIN + "\n", PLAIN.replace(" }}", "}}"),
                 re.sub("{([{%])", r"\n  {\1-", re.sub("([%}])}", r"-\1}\n", PLAIN)), PLAIN.replace("%}{", "%}\n{"),
                 PLAIN.replace("%}{{'", "%}\n    {{- '").replace("}}{%", "}}{%- "), PLAIN.replace("%}{%", "%}\n  {%"),
                 PLAIN.replace("<", "\\x3c").replace("|", "\\u007c")]:
        assert known_template(same) == tidy, same
    assert known_template("\n" + DEFAULT) is None and known_template(DEFAULT) != tidy and SYSTEM in known_template(DEFAULT)
    assert known_template(CHAT_TEMPLATE) == known_template(f"\n{CHAT_TEMPLATE}\n") == CHAT_TEMPLATE
    assert known_template(re.sub(r"\s*\n\s*", "", CHAT_TEMPLATE).replace("-", "")) == CHAT_TEMPLATE
    assert known_template("") == ""
    for other in [None, [PLAIN], "x", PLAIN + "x", "\n" + PLAIN, PLAIN.replace("}}{%", "}}\n{%"), PLAIN.replace("%}{{", "%} {{"),
                  PLAIN.replace(" + '\\n'}}", "}}"), PLAIN.replace("assistant", "bot"), PLAIN.replace("role", "Role"), OPENING + PLAIN,
                  PLAIN.replace("{% endfor %}", OPENING + "{% endfor %}"), DEFAULT.replace(OPENING, OPENING * 2),
                  DEFAULT.replace(SYSTEM, ""), DEFAULT.replace("loop.first and ", ""), PLAIN.replace("\\n", "\\x"),
                  DEFAULT.replace(SYSTEM, "a' + messages[0]['role'] + 'b"), CHAT_TEMPLATE.replace("user", "human")]:
        assert known_template(other) is None, other


@pytest.mark.parametrize("part", [" ", "\n\t", "{%", "%}\n ", "- ", " -}}", "'", '"', "\\", '"\\"', "{%- for message in messages -%}   "])
@pytest.mark.parametrize("begin", ["", "'{{", PLAIN])
def test_a_long_template_takes_time_in_proportion_to_its_length(part, begin):
    """2 MB; were the time quadratic, it would be an hour."""
    template = begin + part * (2_000_000 // len(part))
    started = time.process_time()
    assert known_template(template) is None
    assert time.process_time() - started < 3                # 0.5 s where nothing else runs


def test_a_known_template_may_have_much_white_space():
    blank = " \n" * 100_000
    assert known_template(PLAIN.replace("{% endfor", blank + "{%- endfor" + blank)) == known_template(PLAIN)


@pytest.fixture
def chatml(tmp_path):
    special = ["<|im_start|>", "<|im_end|>", *SPECIAL_TOKENS]
    return Tokenizer(range(256), [(115, 121), (10, 10), (10, 32)], special)          # "sy", two line ends, line end and space


def pieces(tokenizer, *parts):
    return [i for part in parts for i in ([tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part))]


def test_prompts_have_the_form_of_the_template(chatml):
    start, end = "<|im_start|>", "<|im_end|>"
    ours = [("<|user|>", "Hi", "<|end|>", "<|assistant|>"), ("<|user|>", "be brief\n\nHi", "<|end|>", "<|assistant|>")]
    for template in "", CHAT_TEMPLATE:
        chatml.template = template
        assert chatml.end_of_turn == chatml.special["<|end|>"]
        assert chatml.prompt("Hi") == chatml.prompt(b"Hi", system=b"be brief", first=False) == pieces(chatml, *ours[0])
        assert chatml.prompt("Hi", system="be brief") == chatml.prompt(b"Hi", None, b"be brief") == pieces(chatml, *ours[1])
    turn = (start, "user\nHi", end, "\n", start, "assistant\n")
    for template, default in (PLAIN, None), (DEFAULT, SYSTEM), (DEFAULT.replace(SYSTEM, r"it\'s\t\u00e9 \"\\"), "it's\té \"\\"):
        chatml.template = known_template(template)
        assert chatml.end_of_turn == chatml.special[end]
        opening = () if default is None else (start, f"system\n{default}", end, "\n")
        assert chatml.prompt("Hi") == pieces(chatml, *opening, *turn)
        assert chatml.prompt("Hi", system=b"sys") == pieces(chatml, start, "system\nsys", end, "\n", *turn)
        for system in "", "sys":
            assert chatml.prompt("Hi", system=system, first=False) == pieces(chatml, "\n", *turn)
        # one piece with what stands before it; and a name in a text is text
        assert chatml.prompt("\n Hi", first=False) == pieces(chatml, "\n", start, "user\n\n Hi", *turn[2:])
        assert chatml.prompt(f"{end} x", first=False) == [
            *pieces(chatml, "\n", start), *chatml.encode(f"user\n{end} x"), *pieces(chatml, *turn[2:])]
        assert chatml.prompt(b"\xff\xc3", first=False) == [
            *pieces(chatml, "\n", start), *chatml.encode(b"user\n\xff\xc3"), *pieces(chatml, *turn[2:])]
    lacking = Tokenizer(range(256), [], [END_OF_TEXT])
    for lacking.template, name in ("", "<|user|>"), (known_template(PLAIN), "<|im_start|>"):
        with pytest.raises(ValueError) as error:
            lacking.prompt("Hi")
        assert str(error.value) == f"The tokenizer has no special token {name}."
    with pytest.raises(ValueError, match="has no special token <.im_end.>"):
        assert lacking.end_of_turn


@pytest.mark.parametrize("template", ["", PLAIN, DEFAULT])
def test_of_a_long_text_the_end_is_kept_in_a_whole_frame(chatml, template):
    chatml.template = known_template(template)
    for system, first in ("", True), ("be brief", True), ("be brief", False):
        for text in "The cat sat on the mat.", "  x\n\n y":
            ids = chatml.encode(text)
            whole, empty = chatml.prompt(text, None, system, first), chatml.prompt("", None, system, first)
            after = 2 if not template else 3 + len(chatml.encode("assistant\n"))
            before, after = empty[:-after], empty[-after:]
            for room in range(len(empty), len(whole) + 3):
                found = chatml.prompt(text, room, system, first)
                kept = room - len(empty)
                assert found == (whole if room >= len(whole) else [*before, *ids[max(len(ids) - kept, 0):], *after])
            for room in range(1, len(empty)):                           # too little for the frame: the end of all
                found, long = chatml.prompt(text, room, system, first), [*before, *ids, *after]
                assert found == long[:1] + long[len(long) - room + 1:] and len(found) == room


def test_progress_in_a_file_and_on_a_terminal(monkeypatch, capsys):
    clock = iter([100.0, 102.0, 104.0, 108.0])
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    progress = script.show_progress("words counted:")
    progress(0, 16_000_000)                                             # elsewhere only the end is told
    progress(8_000_000, 16_000_000)
    assert capsys.readouterr().out == ""
    progress(16_000_000, 16_000_000)
    assert capsys.readouterr().out == "words counted: 16 MB, 2.0 MB/s, 8.0 s\n"
    clock = itertools.count(1.0, 0.5)
    # of nearly nothing, none
    for total, said in ((999_999, ""), (1_000_000, "words: 1 MB, 2.0 MB/s, 0.5 s\n"), (0, "")):
        script.show_progress("words:")(total, total)
        assert capsys.readouterr().out == said
    clock = iter([50.0, 50.0, 54.0, 58.0, 60.0])
    progress = script.show_progress("seen:", "thousand", 1e3)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for done in (0, 2000, 6000, 8000):
        progress(done, 8000)
    assert capsys.readouterr().out == (
        "\rseen: 0 thousand, 0.0 thousand/s, 0%, 0 s left \033[K"
        "\rseen: 2 thousand, 0.5 thousand/s, 25%, 12 s left \033[K"
        "\rseen: 6 thousand, 0.8 thousand/s, 75%, 3 s left \033[K"
        "\rseen: 8 thousand, 0.8 thousand/s, 100%, 0 s left \033[K\n")
    clock = iter([70.0, 72.0])
    script.show_progress("read:", "files", 1)(1, 3)                         # the least that can be done
    assert capsys.readouterr().out == "\rread: 1 files, 0.5 files/s, 33%, 4 s left \033[K"


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
        assert len(tk.find_chunks(path, size=300)) > 5
        assert encode_to_ids(tokenizer, path) == expected_ids(tokenizer, [text])
    for text in "a" * 5000, "中" * 3000, " " * 5000, "👍" * 2000:       # one word, cut between two characters
        path.write_text(text, encoding="utf-8")
        chunks = tk.find_chunks(path, size=300)
        assert len(chunks) > 5 and max(end - start for _, start, end in chunks) < 800
        assert all(script.read_chunk(*chunk).decode("utf-8") for chunk in chunks)
        assert tokenizer.decode(encode_to_ids(tokenizer, path)) == text + EOT


def test_binary_file_comes_back(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tk, "CHUNK", 300)
    monkeypatch.setattr(tk, "CUT_WINDOW", 120)
    path = tmp_path / "noise.bin"
    path.write_bytes(random.Random(9).randbytes(20_000))
    *ids, end = encode_to_ids(tokenizer, path)
    assert tokenizer.decode_bytes(ids) == path.read_bytes() and ids == tokenizer.encode(path.read_bytes())
    assert end == tokenizer.special[EOT]


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
        files.append(path)
        documents += texts
    out = tmp_path / "ids"
    count = tokenizer.encode_files(files, out, progress=lambda done, total: seen.append((done, total)))
    assert out.read_bytes() == b"".join(token.to_bytes(2, "little") for token in expected_ids(tokenizer, documents))
    assert count == out.stat().st_size // 2 and seen[-1][0] == seen[-1][1] == sum(os.path.getsize(path) for path in files)


def test_a_part_of_a_file(tokenizer, tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(f"one two\n\n{EOT}\n\nthree four\n")
    assert encode_to_ids(tokenizer, path, (4, 7)) == expected_ids(tokenizer, ["two"])
    assert encode_to_ids(tokenizer, path, (9, path.stat().st_size)) == expected_ids(tokenizer, ["three four\n"])
    assert encode_to_ids(tokenizer, path, (3, 3)) == []
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """4.5 MB in which documents, emoji and bytes that are not UTF-8 fall across the borders of chunks."""
    path = tmp_path_factory.mktemp("large") / "large.txt"
    rng = random.Random(10)
    words = TEXT.split()
    texts = [" ".join(rng.choices(words, k=2000)) + rng.choice([" 👍", "\n", " \udcff", ""]) for _ in range(400)]
    path.write_bytes(f"\n\n{EOT}\n\n".join(texts).encode("utf-8", "surrogateescape"))
    return path


@pytest.fixture(params=["fork", "spawn"])
def method(request, monkeypatch):
    """Both ways in which a worker may start."""
    monkeypatch.setattr(script, "START_METHOD", request.param)
    return request.param


def test_processes_do_not_change_results(tokenizer, large, method, monkeypatch):
    calls = []
    documents = [text.rstrip(b"\n") for text in large.read_bytes().split(f"\n\n{EOT}\n\n".encode())]
    ids = encode_to_ids(tokenizer, large, processes=3, progress=lambda *call: calls.append(call))
    assert ids == expected_ids(tokenizer, documents)
    assert len(calls) == 5 and calls[-1] == (large.stat().st_size,) * 2 and calls == sorted(calls)
    monkeypatch.setattr(tk, "CHUNK", 1 << 18)
    assert Tokenizer.train_files([large], 500, processes=2).merges == Tokenizer.train(documents, 500).merges


class Pool:
    """Notes what a ProcessPoolExecutor is asked for, and does it here."""
    seen = []

    def __init__(self, processes, context, initializer, arguments):
        assert context.get_start_method() == script.START_METHOD and initializer is script.start_worker
        self.seen.append(processes)
        script.work.function, = arguments

    def map(self, function, chunks):
        assert function is script.work and signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.seen.append(len(chunks))
        return map(function, chunks)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.seen.append("shut down")


@pytest.mark.parametrize("count, asked, seen", [
    (9, None, [3, 9]), (9, 2, [2, 9]), (20, 20, [20, 20]), (4, 9, [4, 4]), (2, 2, [2, 2]), (9, 1, []), (1, 9, []),
    (300, 2, [2, 128, 128, 44])])
def test_as_many_processes_as_pay_and_bounded_work(monkeypatch, count, asked, seen):
    """As many as asked for or as there are cores, but each has enough to do."""
    monkeypatch.setattr(Pool, "seen", [])
    monkeypatch.setattr(script, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(script, "available_cores", lambda: 3)
    monkeypatch.setattr(script, "WORTH_A_PROCESS", 100)
    chunks = [("x", i * 100, i * 100 + 100) for i in range(count)]
    with contextlib.closing(script.run_chunks(lambda *chunk: chunk, chunks, asked, None)) as results:
        assert [*results] == chunks
    assert Pool.seen == [*seen, *["shut down"] * bool(seen)]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_file_that_goes_away_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "WORTH_A_PROCESS", 1)
    (tmp_path / "text").write_text("ab")
    chunks, done = [(str(tmp_path / "text"), 0, 2), (str(tmp_path / "gone"), 0, 2)], []
    for processes in 1, 2:
        results = script.run_chunks(tk.read_documents, chunks, processes, lambda *call: done.append(call))
        assert next(results) == [b"ab"]
        with pytest.raises(OSError, match="gone"):
            next(results)
    assert done == [(2, 4)] * 2


def test_an_interrupt_leaves_no_process_and_no_file(tokenizer, large, tmp_path, method):
    began = []

    def interrupt(done, total):
        began.extend(multiprocessing.active_children())
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_file(large, tmp_path / "out.bin", processes=2, progress=interrupt)
    assert len(began) == 2 and not any(worker.is_alive() for worker in began)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_is_one_sentence(tmp_path, monkeypatch, method):
    """Its function is found by its name, as a worker that is spawned must find it."""
    (tmp_path / "deadly.py").write_text("import os\ndef die(*chunk):\n    os._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(script, "WORTH_A_PROCESS", 1)
    die = importlib.import_module("deadly").die
    with pytest.raises(concurrent.futures.BrokenExecutor) as died:
        next(script.run_chunks(die, [("x", 0, 9)] * 5, 2, None))
    assert script.explain(died.value) == ("A process of the tokenizer ended early.  If memory is short, allow fewer "
                                      "cores: taskset -c 0 python ...")


def test_an_interrupt_while_processes_start_ends_them(large, method):
    """At the worst moment: one has started, and nobody yet would stop it."""
    code = """if True:
        import multiprocessing.process, os, signal, sys
        import script, tokenizer
        script.START_METHOD = sys.argv[2]
        start = multiprocessing.process.BaseProcess.start
        def interrupted(self):
            start(self)
            os.kill(os.getpid(), signal.SIGINT)
        multiprocessing.process.BaseProcess.start = interrupted
        try:
            tokenizer.Tokenizer.train_files(sys.argv[1:2], 300, processes=2)
        except KeyboardInterrupt:
            sys.exit(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"""
    done = subprocess.run([sys.executable, "-c", code, large, method], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_workers_end_with_their_parent_and_ctrl_c_does_not_reach_them(tokenizer, large, tmp_path, method):
    tokenizer.save(tmp_path / "t.json")
    (tmp_path / "parent.py").write_text(f"""
import multiprocessing, sys, time
sys.path.insert(0, {str(ROOT)!r})
import script
from tokenizer import Tokenizer
def stay(done, total):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)
script.START_METHOD = {method!r}
if __name__ == "__main__":
    Tokenizer.load("t.json").encode_file({str(large)!r}, "o", processes=2, progress=stay)""")
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    workers = list(map(int, parent.stdout.readline().split()))
    assert len(workers) == 2

    def alive():
        return [pid for pid in workers if os.path.exists(f"/proc/{pid}")
                and " Z " not in open(f"/proc/{pid}/stat").read()]
    for pid in workers:
        os.kill(pid, signal.SIGINT)
    assert all(int(re.search(r"SigBlk:\s+(\w+)", open(f"/proc/{pid}/status").read())[1], 16) >> 1 & 1
               for pid in workers) and alive() == workers
    parent.kill()
    parent.wait()
    for _ in range(600):                                    # a minute, if need be; as a rule at once
        if not alive():
            return
        time.sleep(0.1)
    pytest.fail("workers outlive their parent")


def test_a_script_from_standard_input_may_use_processes(large, tmp_path):
    """Where workers are forked; the others look for its file."""
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tokenizer import Tokenizer\n"
            f"print(Tokenizer.train_files([{str(large)!r}], 270, processes=2).vocab_size)")
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "270\n", "")


def test_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: {1, 5, 7}}[pid], raising=False)
    assert script.available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert script.available_cores() == 4
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert script.available_cores() == 1


def test_training_files(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(TEXT + f"\n\n{EOT}\n\n" * 30 + TEXT)
    trained = Tokenizer.train_files([tmp_path / "a.txt"], 300)
    assert not any(b"endoftext" in token for token in trained.tokens[:-4])
    part = len(TEXT.encode())
    assert Tokenizer.train_files([(tmp_path / "a.txt", 0, part)], 400).merges == tokenizer.merges
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="no text in .*empty.txt"):
        Tokenizer.train_files([tmp_path / "empty.txt"], 300)
    (tmp_path / "late").write_bytes(b"\0" + b"ab " * 2730 + b"cc\0")               # its first 8192 bytes are looked at
    size = (tmp_path / "late").stat().st_size
    assert Tokenizer.train_files([(tmp_path / "late", 1, size)], 300).encode("ab")[0] >= 256
    with pytest.raises(ValueError, match="late holds NUL bytes"):
        Tokenizer.train_files([(tmp_path / "late", 2, size)], 300)
    with pytest.raises(ValueError, match="late holds NUL bytes"):
        Tokenizer.train_files([tmp_path / "late"], 300)
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


def test_the_saved_file_is_all_that_the_format_asks_for(tmp_path):
    """What `tokenizers` reads, key by key."""
    Tokenizer.train([" é é"], 262).save(tmp_path / "tokenizer.json")
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    names = [*tk.byte_chars(), "ĠÃ", "ĠÃ©"]
    assert names[:4] + names[32:35] + names[126:130] + names[160:163] + names[172:175] == [
        *"ĀāĂă", *'Ġ!"', *"~ġĢģ", *"ł¡¢", *"¬Ń®"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    assert json.loads(text) == {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": None, "decoder": byte_level,
        "added_tokens": [{"id": 258 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for i, name in enumerate(SPECIAL_TOKENS)],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {name: i for i, name in enumerate([*names, *SPECIAL_TOKENS])},
                  "merges": ["Ġ Ã", "ĠÃ ©"]}}
    assert "ĠÃ" in text and text.startswith('{\n "version"')         # readable, a line an entry


def test_damaged_files_are_refused_in_one_sentence(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    whole = path.read_bytes()
    rng = random.Random(11)
    for size in [0, 1, len(whole) - 1, *rng.sample(range(len(whole)), 60)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="tokenizer.json is (damaged: it is no JSON|not a tokenizer)") as error:
            Tokenizer.load(path)
        assert "\n" not in str(error.value)
    for _ in range(200):        # a flipped bit either is found or does no harm
        place = rng.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1:])
        try:
            assert Tokenizer.load(path).encode(TEXT) == tokenizer.encode(TEXT)
        except ValueError as error:
            assert re.search("tokenizer.json is (damaged|not a tokenizer)", str(error))


@pytest.mark.parametrize("change", [
    lambda t: t["model"].update(type="WordPiece"), lambda t: t.update(pre_tokenizer=None), lambda t: t.pop("model"),
    lambda t: t["model"]["merges"].append("a"), lambda t: t["model"]["merges"].append(7), lambda t: t.update(added_tokens=None),
    lambda t: t["added_tokens"].append({"id": "x", "content": "<|x|>"}), lambda t: t.update(model=[]),
    lambda t: t["added_tokens"].append({"id": "x", "content": "<|x|>", "special": True}), lambda t: t.update(pre_tokenizer="x"),
    lambda t: t["model"].update(vocab=[]), lambda t: t.pop("pre_tokenizer"), lambda t: t["model"].update(type=None),
    lambda t: t["added_tokens"].append({"id": 7, "content": "<|x|>", "special": True}),
])
def test_foreign_files_are_refused(tokenizer, tmp_path, change):
    path = tmp_path / "other.json"
    tokenizer.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="other.json is not a tokenizer that tokenizer.py reads ") as error:
        Tokenizer.load(path)
    assert "\n" not in str(error.value)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize("key, value", [
    ("normalizer", {"type": "NFC"}), ("normalizer", {"type": "Sequence", "normalizers": []}),
    *[("post_processor", {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * n}) for n in (0, 2)],
    ("decoder", None), ("decoder", {"type": "Metaspace"}), ("post_processor", {"type": "RobertaProcessing"}),
    ("type", "WordPiece"), ("type", "Unigram"), ("dropout", 0.1), ("byte_fallback", True), ("ignore_merges", True),
    ("continuing_subword_prefix", "##"), ("end_of_word_suffix", "</w>"), ("unk_token", "<unk>")])
def test_a_refusal_names_the_key_and_its_value(tmp_path, key, value):
    """A tokenizer without byte "b", where an unknown token would matter."""
    tokenizer = Tokenizer.from_vocab({"a": 0, "aa": 1, "<unk>": 2}, ["a a"], ["<unk>"])
    tokenizer.save(tmp_path / "good.json")
    assert Tokenizer.load(tmp_path / "good.json").encode("baaba") == [1, 0]
    content = json.loads((tmp_path / "good.json").read_text())
    (content if key in content else content["model"])[key] = value
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:
        Tokenizer.load(tmp_path / "bad.json")
    assert str(error.value) == (f'{tmp_path / "bad.json"} is not a tokenizer that tokenizer.py reads '
                                f'("{key}": {json.dumps(value)[:200]} is not known here).')


@pytest.mark.parametrize("value", [
    None, {"type": "Whitespace"}, DIGITS,
    {**BYTE_LEVEL, "add_prefix_space": True}, {**BYTE_LEVEL, "use_regex": False},
    *[{"type": "Sequence", "pretokenizers": steps} for steps in (
        [{**DIGITS, "individual_digits": False}, BYTE_LEVEL], [BYTE_LEVEL, DIGITS], [DIGITS], [DIGITS, DIGITS, BYTE_LEVEL],
        [DIGITS, {**BYTE_LEVEL, "add_prefix_space": True}],
        [{"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}, {**BYTE_LEVEL, "use_regex": False}])]])
def test_other_words_are_refused_without_their_pattern(tokenizer, tmp_path, value):
    path = tmp_path / "llama.json"
    tokenizer.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "pre_tokenizer": value}))
    with pytest.raises(ValueError) as error:
        Tokenizer.load(path)
    assert str(error.value) == (f"{path} is not a tokenizer that tokenizer.py reads (its pre_tokenizer divides text into "
                                "other words than GPT-2's and SmolLM's do).")


@pytest.mark.parametrize("flag", ["special", "lstrip", "rstrip", "single_word", "normalized"])
def test_an_added_token_is_found_as_it_is_written(tokenizer, tmp_path, flag):
    path = tmp_path / "added.json"
    tokenizer.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"][1][flag] = flag != "special"
    path.write_text(json.dumps(content))
    if flag == "normalized":                                # where nothing is normalized
        assert Tokenizer.load(path).special == tokenizer.special
        return
    with pytest.raises(ValueError, match=r"its added token .*<.user.>.* is not known here"):
        Tokenizer.load(path)


def test_what_a_file_may_leave_out(tmp_path):
    """As older files do; `tokenizers` loads them, too."""
    Tokenizer.from_vocab({"a": 0, "aa": 1}, ["a a"], []).save(path := tmp_path / "old.json")
    content = json.loads(path.read_text())
    del content["added_tokens"], content["model"]["type"]
    path.write_text(json.dumps(content))
    assert Tokenizer.load(path).encode("aaa") == [1, 0]


@pytest.mark.parametrize("special, end", [(["</s>", "<|endoftext|>"], "<|endoftext|>"), (["<s>", "</s>"], "</s>"),
                                          (["<|im_start|>", "<|im_end|>"], "<|im_end|>"), (["<s>"], None)])
def test_what_ends_a_text_for_others(tmp_path, special, end):
    """The first of those names; a line of <|endoftext|> in a corpus becomes it."""
    other = Tokenizer.from_vocab({char: i for i, char in enumerate([*special, *tk.byte_chars()])}, [], special)
    (tmp_path / "text.txt").write_text("ab\n<|endoftext|>\nc\n")
    if end is None:
        with pytest.raises(ValueError, match=r"^The tokenizer has no special token <\|endoftext\|>\.$"):
            other.encode_file(tmp_path / "text.txt", tmp_path / "ids.bin", processes=1)
        return
    other.encode_file(tmp_path / "text.txt", tmp_path / "ids.bin", processes=1)
    i = other.special[end]
    assert array.array("H", (tmp_path / "ids.bin").read_bytes()).tolist() == [*other.encode("ab"), i, *other.encode("c\n"), i]


def test_other_peoples_files(tokenizer, tmp_path):
    """By hand: special tokens first, the bytes in another order, none for "c", ids with a gap, two ways to "aba"."""
    special = [{"id": i, "content": name, "special": True} for i, name in [(12, "<|im_end|>"), (0, "<|im_start|>")]]
    content = {"added_tokens": special, "decoder": {"type": "ByteLevel"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}]}, "post_processor": {**BYTE_LEVEL, "trim_offsets": False},
        "model": {"type": "BPE", "dropout": 0.0, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                  "fuse_unk": True, "vocab": {"b": 1, "a": 2, "1": 3, "Ġ": 4, "aba": 5, "ab": 7, "ba": 6, "<|im_start|>": 0},
                  "merges": ["ab a", ["a", "ba"], "b a", "a b"]}}
    (tmp_path / "other.json").write_text(json.dumps(content))
    other = Tokenizer.load(tmp_path / "other.json")
    assert other.tokens == [b"<|im_start|>", b"b", b"a", b"1", b" ", b"aba", b"ba", b"ab", b"", b"", b"", b"", b"<|im_end|>"]
    assert other.vocab_size == 13 and other.digits and other.special == {"<|im_start|>": 0, "<|im_end|>": 12}
    assert list(other.merges.items()) == [((7, 2), 5), ((2, 6), 5), ((1, 2), 6), ((2, 1), 7)]
    assert other.encode("aba ab 11acba<|im_end|>") == [5, 4, 7, 4, 3, 3, 5]     # "acba" is "aba", and "<|im_end|>" nothing
    assert other.decode([0, 5, 8, 12]) == "<|im_start|>aba<|im_end|>"
    other.save(tmp_path / "again.json")
    again = Tokenizer.load(tmp_path / "again.json")
    for name in "tokens", "special", "vocab_size", "digits", "template":
        assert getattr(again, name) == getattr(other, name)
    assert list(again.merges.items()) == list(other.merges.items())
    saved = json.loads((tmp_path / "again.json").read_text())
    assert saved["pre_tokenizer"] == {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}
    assert list(saved["model"]["vocab"].items()) == [("<|im_start|>", 0), ("b", 1), ("a", 2), ("1", 3), ("Ġ", 4), ("aba", 5), ("ba", 6),
                                                     ("ab", 7), ("<|im_end|>", 12)]
    content["pre_tokenizer"]["pretokenizers"].pop(0)                                # a sequence of one is that one
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert not Tokenizer.load(tmp_path / "other.json").digits
    tokenizer.save(tmp_path / "ours.json")                  # where all bytes are there, none is unknown
    content = json.loads((tmp_path / "ours.json").read_text(encoding="utf-8"))
    content["model"]["unk_token"] = EOT
    (tmp_path / "ours.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path / "ours.json").encode(TEXT) == tokenizer.encode(TEXT)


def test_what_makes_no_difference_is_accepted(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "other.json")
    content = json.loads((tmp_path / "other.json").read_text(encoding="utf-8"))
    content["added_tokens"].reverse()
    content["model"]["merges"] = [merge.split(" ") for merge in content["model"]["merges"]]     # as newer versions write
    for key in "ignore_merges", "dropout":
        del content["model"][key]
    del content["pre_tokenizer"]["use_regex"]
    (tmp_path / "other.json").write_text(json.dumps(content))
    again = Tokenizer.load(tmp_path / "other.json")
    assert again.merges == tokenizer.merges and again.special == tokenizer.special


def test_a_failed_save_keeps_the_old_file(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        tokenizer.save(path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


# What every script shares, where tests/test_scripts.py does not look

def test_an_error_without_a_number_keeps_its_words():
    with pytest.raises(OSError) as caught, script.naming("file"):
        raise OSError("A sentence of our own.")
    assert str(caught.value) == script.explain(caught.value) == "A sentence of our own."


def test_a_file_is_replaced_when_all_is_on_the_disk(tmp_path, monkeypatch):
    path, calls, fsync, replace = tmp_path / "file", [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("fsync", os.fstat(fd).st_size)) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append(("replace", str(a), str(b))) or replace(a, b))
    path.write_text("old")
    os.mkfifo(tmp_path / "file.new")                        # which nobody reads: opening it would wait
    with script.replace_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and calls == [("fsync", 3), ("replace", f"{path}.new", str(path))]
    for error in KeyboardInterrupt(), OSError(28, "No space left on device"), ValueError("x"):
        with pytest.raises(type(error)) as caught, script.replace_file(path) as file:
            file.write(b"half")
            raise error
        assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
        assert getattr(caught.value, "filename", f"{path}.new") == f"{path}.new"
    with pytest.raises(FileNotFoundError, match="no/file.new"), script.replace_file(tmp_path / "no" / "file"):
        pass


def test_options_are_checked_in_one_sentence(capsys):
    parser = script.Parser(prog="x")
    parser.add_argument("--n", type=script.whole_number(2, 2000))
    parser.add_argument("--m", type=script.whole_number(0))
    parser.add_argument("--p", type=script.number_type(float, lambda x: 0 < x <= 1, "a number"))
    for n in "2", "2000":
        assert parser.parse_args(["--n", n]).n == int(n)
    assert parser.parse_args(["--m", "1000000000", "--p", "1"]).p == 1.0
    for arguments, words in [
            (["--n", "1"], "argument --n: must be a whole number of at least 2 and at most 2,000, not '1'"),
            (["--n", "2001"], "not '2001'"), (["--n", "2.0"], "not '2.0'"), (["--n", ""], "not ''"),
            (["--m", "-1"], "at least 0 and at most 1,000,000,000, not '-1'"), (["--m", "1000000001"], "not '1000000001'"),
            (["--p", "nan"], "argument --p: must be a number, not 'nan'"), (["--p", "0"], "not '0'"),
            (["--p", "y" * 40], f"not '{'y' * 40}'"), (["--p", "y" * 41], f"not '{'y' * 40}...'"),
            (["--k"], "unrecognized arguments: --k")]:
        with pytest.raises(SystemExit) as error:
            parser.parse_args(arguments)
        lines = capsys.readouterr().err
        assert error.value.code == 2 and lines.startswith("error: ") and lines.endswith(f"{words}; --help lists the options.\n")
        assert lines.count("\n") == 1


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_script_ends_with_its_code(code, monkeypatch):
    def main(arguments):
        assert arguments == ["a", "b"]
        print("out")
        return code
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    for name, value in [("stdin", None), ("stdout", out), ("stderr", err), ("argv", ["x", "a", "b"])]:
        monkeypatch.setattr(sys, name, value)
    with pytest.raises(SystemExit) as error:
        script.run_script(main)
    assert sys.stdin.read() == ""                           # it was closed
    assert error.value.code == code and out.buffer.getvalue() == b"out\n" and err.getvalue() == ""


def test_an_error_of_the_gpu_is_a_sentence_and_a_mistake_of_ours_is_not(monkeypatch, capsys):
    gpu_error = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})
    monkeypatch.setattr(os, "_exit", sys.exit)          # which does not give back what a broken GPU would refuse
    for kind, words in ((gpu_error, "error: The GPU: it is lost\n"), (script.GpuError, "error: The GPU: it is lost\n"),
                        (ValueError, "error: it is lost\n"), (RuntimeError, None)):
        def main(arguments, kind=kind):
            raise kind("it is lost")
        for name in ("stdin", "stdout", "stderr"):
            monkeypatch.setattr(sys, name, getattr(sys, name))              # run_script wraps them
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(SystemExit if words else RuntimeError) as error:
            script.run_script(main)
        assert not words or (error.value.code == 2 and capsys.readouterr().err == words)


@pytest.mark.parametrize("options, work_done", [("", False), (", to_the_end=True", True)])
def test_a_script_whose_reader_leaves(tmp_path, options, work_done):
    (tmp_path / "a_script.py").write_text(f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from script import run_script
def main(arguments):
    for _ in range(10):
        print("x" * 100_000)
    open("done", "w").close()
    raise ValueError("the end")
run_script(main{options})
""")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "a_script.py"], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=600)
    os.close(writer)
    assert (tmp_path / "done").exists() == work_done
    assert (done.returncode, done.stderr) == ((2, b"error: the end\n") if work_done else (0, b""))
    done = subprocess.run(f"exec {sys.executable} a_script.py <&- >&- 2>&-", shell=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 2 and (tmp_path / "done").exists()            # all streams closed from the start


# The command line

def run(*arguments, folder, stdin=b""):
    return subprocess.run([sys.executable, str(ROOT / "tokenizer.py"), *map(str, arguments)], cwd=folder, input=stdin,
                          capture_output=True, timeout=600)


def test_command_line(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    trained = run("train", "text.txt", "--vocab", 300, folder=tmp_path)
    assert trained.returncode == 0 and b"tokenizer.json: 300 of 300 tokens" in trained.stdout, trained.stderr
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    ids = run("show", "--ids", "the cat, naïve", "--tokenizer", "tokenizer.json", folder=tmp_path).stdout.decode().split()
    assert list(map(int, ids)) == tokenizer.encode("the cat, naïve")
    noise = bytes(range(256)) * 2
    ids = run("show", "-", "--ids", "--tokenizer", "tokenizer.json", folder=tmp_path, stdin=noise).stdout.split()
    assert tokenizer.decode_bytes(map(int, ids)) == noise
    shown = run("show", "the cat", "--tokenizer", "tokenizer.json", folder=tmp_path).stdout.decode()
    assert shown.splitlines()[0] == "|".join(tokenizer.decode([token]) for token in tokenizer.encode("the cat"))


def test_bytes_are_shown_as_printable_text():
    for data, shown in [(b"a \xc3\xa9", "a é"), (b"\n\t\0\x7f", r"\n\t\x00\x7f"), (b"\\n", r"\\n"), (b"\x80\xff\xe4", r"\x80\xff\xe4"),
                        (b"\xe3\x80\x80\xc2\xad'\"", r"\xe3\x80\x80\xc2\xad'" + '"')]:
        assert tk.visible(data) == shown


def test_tokens_are_shown_with_bars():
    tokenizer = Tokenizer.train(["ab ab\n\n"], 262)
    assert list(tokenizer.merges) == [(97, 98)]
    assert tk.show(tokenizer, "ab a\nb\n") == "ab| |a|\\n|\nb|\\n\n6 tokens for 7 bytes, 1.17 bytes a token"
    assert tk.show(tokenizer, "") == "\n0 tokens for 0 bytes, 0.00 bytes a token"


def test_the_commands(tmp_path, monkeypatch, capfdbinary):
    """The same program, called here: what each command prints, to the letter."""
    def called(*arguments):
        tk.main(list(map(str, arguments)))
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        assert err == b""
        return out.decode()

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("ab ab ab\n")
    assert called("train", "text.txt") == "tokenizer.json: 262 of 4096 tokens learned\n"
    assert called("train", "text.txt", "text.txt", "--vocab", 261, "--out", "x.json") == "x.json: 261 of 261 tokens learned\n"
    assert Tokenizer.load("x.json").merges == {(97, 98): 256}
    assert called("show", "--ids", "ab ab", "--tokenizer", "tokenizer.json") == "256 257\n"
    assert called("show", "--ids", "ab ab", "--tokenizer", "x.json") == "256 32 256\n"
    assert called("show", "ab ab", "--tokenizer", "tokenizer.json") == "ab| ab\n2 tokens for 5 bytes, 2.50 bytes a token\n"
    for name in "old", "new":
        os.makedirs(f"out/{name}")
        Path(f"out/{name}/model.safetensors").touch()
    os.utime("out/old/model.safetensors", (1, 1))
    os.replace("x.json", "out/new/tokenizer.json")
    assert called("show", "ab ab", "--ids") == "256 32 256\n"       # that of the newest model
    with pytest.raises(ValueError, match="^Cannot write no/such.json; "):      # before the text is read
        called("train", "missing.txt", "--out", "no/such.json")


def test_a_terminal_gets_only_what_it_can_show(tmp_path):
    Tokenizer.train(["ab"], 260).save(tmp_path / "tokenizer.json")
    done = subprocess.run([sys.executable, str(ROOT / "tokenizer.py"), "show", "x", "--tokenizer", "中.json"], cwd=tmp_path,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=600)
    assert done.returncode == 2 and rb"\u4e2d.json" in done.stderr
    Tokenizer(range(256), [(0xe4, 0xb8), (256, 0xad)], SPECIAL_TOKENS).save(tmp_path / "tokenizer.json")
    done = subprocess.run([sys.executable, str(ROOT / "tokenizer.py"), "show", "中", "--tokenizer", "tokenizer.json"], cwd=tmp_path,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, b"\\u4e2d\n1 tokens for 3 bytes, 3.00 bytes a token\n")


@pytest.mark.parametrize("arguments, words", [
    ([], "command"), (["train", "missing.txt"], "missing.txt"), (["train", "empty.txt"], "no text in"),
    (["train", "binary"], "NUL bytes"),
    (["train", "."], "not a plain file"), (["train", "text.txt", "--vocab", "259"], "at least 260"),
    (["train", "text.txt", "--out", "no/such/folder.json"], "no/such/folder.json"),
    (["show", "x"], "tokenizer.py train"),
    (["show", "x", "--tokenizer", "text.txt"], "text.txt is damaged: it is no JSON"), (["show", "x", "--unknown"], "unrecognized"),
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
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == "0\n" and done.stderr == ""
