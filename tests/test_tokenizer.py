"""tokenizer.py against slow, obvious versions of itself, in several processes, and through its command line.

tests/peers/test_tokenizer_peers.py has other people's tokenizers as judges."""
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import unicodedata
from array import array
from collections import Counter
from itertools import accumulate, count, pairwise
from pathlib import Path
from random import Random

import pytest
from cases import once_a_module, parametrize, put, read, refusal, rows, write

import script
import tokenizer as tk
from tokenizer import CHAT_TEMPLATE, CHATML, CHATML_SYSTEMS, SPECIAL_TOKENS, Tokenizer, known_template

ROOT = Path(__file__).resolve().parent.parent
EOT = "<|endoftext|>"
WHITE_SPACE = ("\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
               "\u2028\u2029\u202f\u205f\u3000")

LONG = "".join(Random(2).choices("abn", k=400))
SAMPLES = [
    "", "I'd say they've won, don't we'll 'S 're''s!'s", "  two  spaces\n\n\n new\tline \r\n",
    "naïve café ČŽ Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語 中文字", "👍🏽 👨‍👩‍👧 🇩🇪 𝐀𝐁 𝟙𝟚 1½²Ⅷ٣",
    LONG, "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\xa0\u200b\u2028\u3000 a\x1cb\ufeff",
    "\ud800 lone \udc80 \udfff surrogates \ud83d\ude00"]

TEXT = ("The cat sat on the mat. The cat's hat, the rat's bat: that's that!\n" * 3 + "aaaa aaaaa aaa banana bandana\n"
        + "naïve café 中文 中文字 👍👍 1234 12345 123\n" * 2 + "low lower lowest newer newest wider widest\n" * 4 + LONG)


def random_text(rng, length):
    """Text that mixes all planes with what breaks pretokenizers: white space, quotes, controls, digits, surrogates."""
    kinds = ["abcdefgh", "aab", "'sdmtrevl", " \t\n\r", WHITE_SPACE, "0123456789", ".,;!?<|>_\"-"]
    text = ""
    while len(text) < length:
        kind = rng.choice([*kinds, chr(rng.randrange(0x300)), chr(rng.randrange(0x110000))])
        text += "".join(rng.choices(kind, k=rng.randrange(1, 5)))
    return text


def slow_words(text, digits=False):
    """GPT-2's own pattern, on a text in which each character is replaced by one of its kind in ASCII.  digits: each
    number by itself, and the pattern on each run between two of them, as if it were the whole text."""
    def plain(char):
        if char in WHITE_SPACE:
            return " " if char == " " else "\t"
        return char if char in "'stmdrevl" else {"L": "a", "N": "0"}.get(unicodedata.category(char)[0], "!")
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?[a-z]+| ?0+| ?[^\sa-z0]+|\s+(?!\S)|\s+"
    parts = re.split("(0)" if digits else "(?!)", "".join(map(plain, text)))
    ends = accumulate((len(word) for part in parts for word in re.findall(pattern, part)), initial=0)
    return [text[slice(*ends)] for ends in pairwise(ends)]


def slow_bpe(ids, merges):
    """The first merge that fits, at its first place, again and again."""
    for pair, new in merges.items():
        for i in range(len(ids) - 1):
            if (ids[i], ids[i + 1]) == pair:
                return slow_bpe([*ids[:i], new, *ids[i + 2:]], merges)
    return ids


def made(pairs, special, digits=False):
    """The tokenizer of the 256 bytes, what these pairs of ids make, and special tokens of these names."""
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in pairs:
        tokens.append(tokens[left] + tokens[right])
    ids = dict(zip(special, count(len(tokens))))
    return Tokenizer([*tokens, *map(str.encode, special)], dict(zip(pairs, count(256))), ids, digits)


def expected_ids(tokenizer, documents):
    """By the slow versions: each word by itself, and the separator after each document."""
    ids = []
    for text in documents:
        for word in slow_words(tk.to_str(text), tokenizer.digits):
            ids += slow_bpe([*tk.to_bytes(word)], tokenizer.merges)
        ids.append(tokenizer.special[EOT])
    return ids


def encode_to_ids(tokenizer, *files, **options):
    assert 2 * tokenizer.encode_files(files, "ids", **options) == os.path.getsize("ids")
    return array("H", read("ids")).tolist()


@once_a_module
def tokenizer():
    return Tokenizer.train([TEXT], 310)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# Words and merges

@parametrize("digits", [False, True])
def test_words_are_those_of_the_pattern(digits):
    """Of short texts; of long ones, which are cut into parts; and of every kind of character."""
    every = "".join(f"a{chr(code)}1 {chr(code)}" for code in [*range(0x10000), *range(0x10000, 0x110000, 9)])
    rng = Random(0)
    texts = [every, *SAMPLES, *(random_text(rng, length) for length in [60] * 999 + [9000] * 9)]
    for text in map(tk.to_str, texts):
        words = [word for part in tk.split_words(text, digits) for word in part]
        assert words == slow_words(text, digits), ascii(text[:99])


@parametrize("words, merges", [
    ({"aaa": 1, "ab": 1}, "[(97, 97)]"),                                            # "aa" counts twice, merges once
    ({" zb": 2, " ya": 2, " xc": 2}, "[(32, 120), (32, 121), (32, 122), (256, 99), (257, 97), (258, 98)]"),     # ties
    # the words of Sennrich, Haddow and Birch
    ({"low": 5, "lower": 2, "newest": 6, "widest": 3},
     "[(101, 115), (256, 116), (108, 111), (258, 119), (101, 119), (110, 260)]")])
def test_merges_by_hand(words, merges):
    assert str(tk.learn_merges_plain(Counter(words), 6)) == str(tk.learn_merges(Counter(words), 6)) == merges


def test_the_plain_and_the_fast_way_learn_the_same():
    """Ties, runs of one byte, pairs that run out, byte 0.  And they encode every word alike."""
    rng = Random(0)
    for alphabet in ["a", "ab", "abc", "aab", " ab", "é中a", "\0\1", TEXT] * 20:
        texts = ["".join(rng.choices(alphabet, k=rng.randrange(1, 30))) for _ in range(9)]
        words = Counter(rng.choices(texts, k=15))
        merges = tk.learn_merges(words, 12)
        assert merges == tk.learn_merges_plain(words, 12), words
        tokenizer = made(merges, SPECIAL_TOKENS)
        for word in [*words, TEXT[-900:]]:
            ids = tk.encode_word_plain(word, merges)
            assert [*array("H", tokenizer.encoder[word])] == ids and tokenizer.decode(ids) == word


def test_training(tokenizer):
    """Texts of any kind, or a file with separators, give the merges of their words; special tokens come last, and no
    text gives one."""
    merges = tk.learn_merges_plain(Counter(slow_words(TEXT)), 50)
    assert [*tokenizer.merges] == merges == [*Tokenizer.train(reversed(TEXT.encode().splitlines(True)), 310).merges]
    assert tokenizer.special == dict(zip(SPECIAL_TOKENS, range(306, 310)))
    assert max(Tokenizer.train([EOT * 50], 300).encode("".join(SPECIAL_TOKENS))) < 267
    write("a", TEXT + f"\n{EOT}\n" * 30 + TEXT)
    assert [*Tokenizer.train_files(["a"], 310).merges] == merges
    for size in 259, 65537:
        assert str(size) in refusal(Tokenizer.train, [TEXT], size)


def test_encoding_equals_replaying_the_merges(tokenizer, monkeypatch):
    """Of short words and of long ones; every text and every byte string comes back.  With a cache that is full again
    and again, too, and with merges in any order, such as no training gives."""
    monkeypatch.setattr(tk, "MAX_CACHED_WORDS", 30)
    rng = Random(13)
    shuffled = dict(rng.sample([*tokenizer.merges.items()], 50))
    tokenizers = tokenizer, Tokenizer(tokenizer.tokens, shuffled, tokenizer.special)
    for text in SAMPLES + [bytes(range(256))] + [rng.choice([random_text, Random.randbytes])(rng, 60) for _ in range(300)]:
        tokenizer = rng.choice(tokenizers)
        ids = tokenizer.encode(text)
        assert [*ids, 306] == expected_ids(tokenizer, [text])
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        assert tokenizer.decode_bytes(ids) == data and tokenizer.decode(ids) == data.decode("utf-8", "replace")
        assert len(tokenizer.encoder) <= 30


def test_long_words_are_not_quadratic(tokenizer):
    """Such a word takes half a second; were the time quadratic, it would take minutes."""
    started = time.process_time()
    assert len(tokenizer.encode("".join(Random(1).choices("abcdefghst", k=100_000)))) < 100_000
    assert time.process_time() - started < 10


# Files

@parametrize("text, documents", [       # X: the separator
    ("", []), ("\n\none\n", ["\n\none\n"]), ("X\nX\n\nX\n", []), ("one\nX\ntwo\n", ["one", "two\n"]),
    ("X\n\none\n\n\nX\n\n\nX\n\n\n two\n\nX", ["one", " two"]), ("one\r\n\r\nX\r\n\r\ntwo\r\n", ["one", "two\r\n"]),
    ("one X\nX two\n X\n", ["one X\nX two\n X\n"])])
def test_documents(tokenizer, text, documents):
    write("corpus", text.replace("X", EOT).encode())
    assert encode_to_ids(tokenizer, "corpus") == expected_ids(tokenizer, [text.replace("X", EOT) for text in documents])


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(tk, "CHUNK", 300)
    monkeypatch.setattr(script, "CUT_WINDOW", 120)


@parametrize("digits", [False, True])
def test_chunks_do_not_change_ids(tokenizer, digits, small_chunks):
    """Many small chunks, cut in all kinds of text and separators, give the ids of whole documents."""
    tokenizer = made(tokenizer.merges, SPECIAL_TOKENS, digits)
    rng = Random(8)
    corpora = [["abc123" * 300], ["1 2  3\n\n4,中。" * 99], [f"12 lowlow{EOT}\n" * 99]]
    for documents in corpora + [[f"x{random_text(rng, 200)}x", f"x{random_text(rng, 99)}."] for _ in range(150)]:
        line_ends = rng.choice(["\n", "\r\n"]) * rng.randrange(1, 4)
        separators = (line_ends + EOT) * rng.choice([1, 1, 1, 90]) + line_ends
        write("corpus", separators.join(documents).encode("utf-8", "surrogatepass"))
        assert encode_to_ids(tokenizer, "corpus") == expected_ids(tokenizer, documents), ascii(documents)


@parametrize("word", ["a" * 5000, "中" * 3000, "👍a.b" * 900])
def test_a_text_without_a_place_to_cut_is_cut_between_two_characters(tokenizer, small_chunks, word):
    write("corpus", word)
    for _, start, end in script.find_chunks("corpus", 300, tk.find_cut):
        assert end - start < 800 and read("corpus")[start:end].decode()
    assert tokenizer.decode(encode_to_ids(tokenizer, "corpus")) == word + EOT


@parametrize("text", ["c", "\x01", "ab", "\x02\x01", "c\n"])
def test_files_and_parts_end_with_one_separator_whatever_their_last_id(text):
    """Its id, 257, has the bytes 1, 1: as bytes, those of "c" are greater, those of 0 less."""
    tokenizer = made([(97, 98)], SPECIAL_TOKENS)
    write("a", text)
    write("b", f"zero\n{EOT}\n\n")
    ids = [*tokenizer.encode(text), 257]
    assert encode_to_ids(tokenizer, "a", "b", ("b", 0, 0), "a", ("b", 1, 3)) == [*ids, *b"zero", 257, *ids, *b"er", 257]


def test_what_ends_a_text_for_others():
    """The first of some names; a line of <|endoftext|> in a corpus becomes it."""
    write("text", f"a\n{EOT}\nc")
    for special in ["</s>", EOT], ["<|im_start|>", "<|im_end|>"]:
        assert encode_to_ids(made([], special), "text") == [97, 257, 99, 257]


# Several processes

@parametrize("method", ["fork", "spawn"])
def test_processes_do_not_change_results(tokenizer, method, monkeypatch):
    """Of a text in which documents, emoji and bytes that are not UTF-8 fall across the borders of chunks."""
    monkeypatch.setattr(script, "WORTH_A_PROCESS", 1 << 18)
    monkeypatch.setattr(tk, "CHUNK", 1 << 12)
    multiprocessing.set_start_method(method, force=True)
    write("text", f"low cats 👍\udcff\n{EOT}\n".encode("utf-8", "surrogateescape") * 40_000)
    results = {}
    for processes in 1, 3:
        monkeypatch.setattr(script, "available_cores", lambda processes=processes: processes)
        seen = []
        ids = encode_to_ids(tokenizer, "text",
                            progress=lambda *done, seen=seen: seen.append((*done, len(multiprocessing.active_children()))))
        done, total, workers = seen[-1]
        results[workers * done // total] = ids, Tokenizer.train_files(["text"], 300).merges
    assert results[0] == results[3]


def die(*chunk):
    os._exit(3)


def test_what_fails_in_a_worker_is_one_sentence(monkeypatch):
    put(monkeypatch, script, WORTH_A_PROCESS=1, available_cores=lambda: 2)
    for function, sentence in (tk.read_documents, "Cannot use gone: No such file"), (die, "A process of the tokenizer"):
        with pytest.raises(Exception) as caught:
            next(script.run_chunks(function, [("gone", 0, 2)] * 2, None))
        assert script.explain(caught.value).startswith(sentence)


PARENT = f"""
import multiprocessing, sys, time
sys.path.insert(0, {str(ROOT)!r})
import script, tokenizer
script.WORTH_A_PROCESS = 1
script.available_cores = lambda: 2
def tell(done, total):
    time.sleep(1)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(99)
script.run_script(lambda _: tokenizer.Tokenizer.train([], 260).encode_files(["text"] * 9, "ids", tell))
"""


@parametrize("kill, number, said", [(os.killpg, signal.SIGINT, "Stopped.\n"), (os.kill, signal.SIGKILL, "")])
def test_workers_end_with_their_parent_without_a_word(kill, number, said):
    """Ctrl-C reaches them all, as in a terminal; kill -9 the parent alone."""
    write("text", TEXT)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=-1, stderr=-1, text=True, start_new_session=True)
    workers = parent.stdout.readline().split()
    kill(parent.pid, number)
    assert parent.communicate()[1] == said
    for pid in workers:                                 # as a rule at once
        while os.path.exists(f"/proc/{pid}") and " Z " not in read(f"/proc/{pid}/stat").decode():
            time.sleep(0.05)


# On disk

LEVEL = '{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true}'
STEPS = '{"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, ' + LEVEL + "]}"


def test_other_peoples_files():
    """By hand: a special token first (the vocabulary says so), the bytes in another order, none for "c", ids with a gap,
    two ways to "aba"; and once more, as we save it."""
    write("other.json", """{"added_tokens": [{"id": 9, "content": "<|im_start|>"}, {"id": 65535, "content": "<|im_end|>"}],
        "pre_tokenizer": %s, "model": {"merges": ["ab a", ["a", "ba"], "b a", "a b"],
        "vocab": {"<|im_start|>": 0, "b": 1, "a": 2, "1": 65534, "Ġ": 4, "aba": 5, "ba": 6, "ab": 7}}}""" % STEPS)
    for _ in range(2):
        other = Tokenizer.load("other.json")
        assert b",".join(other.tokens[:9]) == b"<|im_start|>,b,a,, ,aba,ba,ab,"
        assert f"{other.special}{other.digits}" == "{'<|im_start|>': 0, '<|im_end|>': 65535}True"
        assert str(other.merges) == "{(7, 2): 5, (2, 6): 5, (1, 2): 6, (2, 1): 7}"
        assert other.encode("aba ab 11acba<|im_end|>") == [5, 4, 7, 4, 65534, 65534, 5]     # "acba" is "aba", and "<|im_end|>" nothing
        assert other.decode([0, 5, 8, 65535]) == "<|im_start|>aba<|im_end|>"
        other.save("other.json")


@parametrize("text", ["\ufeff#version: 0.2\na b\nab c\n", "a b\nab c"])
def test_every_merge_of_vocab_bpe_is_read(text):
    """Also without the line of the version, and without a last line end; behind a byte order mark, too."""
    write("vocab.bpe", text)
    write("encoder.json", json.dumps({name: i for i, name in enumerate(["a", "b", "c", "ab", "abc", EOT])}))
    assert Tokenizer.from_gpt2("vocab.bpe", "encoder.json").encode("abcab") == [4, 3]


@parametrize("key, value", rows(f"""
    normalizer    | {{"type": "NFC"}}
    pre_tokenizer | null
    pre_tokenizer | {LEVEL.replace("false", "true")}
    pre_tokenizer | {LEVEL.replace('regex": true', 'regex": false')}
    pre_tokenizer | {STEPS.replace("true", "false", 1)}
    pre_tokenizer | {STEPS.replace("[", f"[{LEVEL}, ")}"""))
def test_files_that_divide_text_otherwise_are_refused(tokenizer, key, value):
    tokenizer.save("t.json")
    write("t.json", json.dumps({**json.loads(read("t.json")), key: json.loads(value)}))
    assert re.match(r"t.json is not a tokenizer that tokenizer.py reads \(.*\)\.$", refusal(Tokenizer.load, "t.json"))


# Conversations

SMOLLM = [*CHATML_SYSTEMS][1]


def test_known_templates():
    """However their line ends are written; no other."""
    for template in CHATML, SMOLLM, CHAT_TEMPLATE, "":
        assert known_template(template.replace("\n", "\\n")) == known_template(template + "\n") == template
        assert known_template("x" + template) is known_template([template]) is None


def pieces(tokenizer, text):
    """The ids of what stands between two ~, each a special token or a text."""
    ids = []
    for part in text.split("~"):
        ids += [tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part)
    return ids


USER, START, END = "<|user|>", "<|im_start|>", "<|im_end|>"


@parametrize("template, system, first, before, head", [
    ("", None, True, USER, ""), (CHAT_TEMPLATE, "", True, USER, ""), ("", b"be brief", True, USER, "be brief\n\n"),
    ("", "be brief", False, USER, ""), (CHATML, None, True, START, "user\n"),
    (CHATML, "", True, f"{START}~system\n~{END}~\n~{START}", "user\n"),
    (SMOLLM, None, True, f"{START}~system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face~{END}~\n~{START}", "user\n"),
    (SMOLLM, b"sys", True, f"{START}~system\nsys~{END}~\n~{START}", "user\n"),
    (SMOLLM, "sys", False, f"\n~{START}", "user\n")])
def test_prompts_have_the_form_of_the_template(template, system, first, before, head):
    """Text is never a special token, and one piece with what stands before it.  Of a long text the end is kept, in a
    whole frame; where there is too little room for that, the end of all."""
    tokenizer = made([(115, 121), (10, 10), (10, 32)], [START, END, *SPECIAL_TOKENS])   # "sy", line ends and spaces
    tokenizer.template = template
    text = b" \n Hi, <|end|><|im_end|> \xff"
    after = pieces(tokenizer, f"{END}~\n~{START}~assistant\n" if head == "user\n" else "<|end|>~<|assistant|>")
    before = pieces(tokenizer, before)
    ids = [*before, *tokenizer.encode(head.encode() + text), *after]
    assert tokenizer.prompt(text, None, system, first) == ids and tokenizer.end_of_turn == after[0]
    frame = len(before + tokenizer.encode(head))
    for room in range(1, len(ids) + 2):
        kept = frame if room >= frame + len(after) else 1
        assert tokenizer.prompt(text, room, system, first) == ids[:kept] + ids[max(kept, kept + len(ids) - room):]


# The command line

def test_show():
    """Every byte can be seen."""
    Tokenizer.train(["ab ab\n\n"], 262).save("t.json")
    command = [sys.executable, f"{ROOT}/tokenizer.py", "show", b"ab a\nb\xff\n", "--tokenizer", "t.json"]
    shown = subprocess.run(command, stdout=-1).stdout
    assert shown == b"ab| |a|\\n|b|\\xff|\\n\n7 tokens for 8 bytes, 1.14 bytes a token\n"
    assert script.visible(b"\x80\\ \xc3\xa9\xe3\x80\x80'\"\n\0") == r"""\x80\\ é\xe3\x80\x80'"\n\x00"""
