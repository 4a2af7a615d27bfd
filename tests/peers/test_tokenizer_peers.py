"""tokenizer.py against independent judges: tiktoken's "gpt2", tokenizers and transformers on our tokenizer.json, and on
tokenizers and templates of other people.

Strings are drawn from the code points that this interpreter's unicodedata assigns: a peer's Unicode may be newer.
"""
import random
import sys
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, Tokenizer, known_template  # noqa: E402

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
from tiktoken.load import data_gym_to_mergeable_bpe_ranks  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
needs_gpt2 = pytest.mark.skipif(not (DATA / "gpt2").is_dir(), reason="the real texts that this test reads are no part of the repository")

ASSIGNED = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
CONTROLS = [char for char in ASSIGNED if unicodedata.category(char) in ("Cc", "Cf", "Zs", "Zl", "Zp")]

TEXTS = [
    "", " ", "\n", "Hello world", "I'd say they've won; don't we'll 'S 're''s!'s I'M IT'S", "a" * 5000, " " * 5000,
    "9" * 5000, "\n" * 3000, "!?" * 2000,
    " \n" * 2000 + "x", "\r\n\r\n  \t\tx  \r\n", "ab" * 3000, "x" + " " * 999 + "y",
    "Ŷŝ naïve café ČŽ ſ ß İi Ǆ ª º ʰ ﬁ", "Ελληνικά ΆΐΰΏ", "русский язык, Ѐѐ", "עברית מְנֻקָּד", "العربية ٠١٢٣ ۴۵۶",
    "हिन्दी १२३ क्षत्रिय", "ไทยภาษา ๑๒๓",
    "한국어 한글", "日本語の文章。カタカナ 漢字 〇一二三", "中文，没有空格的句子。", "Tiếng Việt", "ქართული ᲐᲑ", "አማርኛ ፩፪፫",
    "தமிழ் ௧௨௩",
    "👍🏽 👨‍👩‍👧 🇩🇪 ❤️ ☃ ©®™", "𝐀𝐁𝒞 𝟙𝟚 𐍈𐎀 𠀀𠀁 🂡", "1½²³Ⅷⅷ①⑳٣௰一",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x80\x85\xa0\u180e\u200b\u2028\u2060\u3000\ufeff",
    "def f(x):\n    if x:\n\treturn {'a': 3.14, \"b\": 0xFF}  # yes\n",
]


def random_texts(alphabet, seed, count=10_000):
    rng = random.Random(seed)
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(count)]


def all_texts():
    """Fixed texts, 10,000 strings of any assigned code points, 10,000 of controls and white space, 10,000 of a mix."""
    mix = random.Random(0).choices(ASSIGNED, k=300) + CONTROLS[:40] * 3 + list("aabcdestmrelv'''  \n\n\t0123.,!-") * 12
    return (TEXTS + random_texts(ASSIGNED, 1) + random_texts(CONTROLS, 2) + random_texts(mix, 3)
            + [f"a{char}1 {char}b {char} 'S{char}\n{char}" for char in ASSIGNED if not "\uac00" < char < "\ud7a3"][::3])


def first_difference(ours, theirs, texts):
    return [ascii(text)[:200] for a, b, text in zip(ours, theirs, texts, strict=True) if a != b][:5]


@pytest.fixture(scope="module")
def gpt2():
    return Tokenizer.from_gpt2(DATA / "gpt2" / "vocab.bpe", DATA / "gpt2" / "encoder.json")


@pytest.fixture(scope="module")
def trained():
    """Trained on every script in TEXTS, so that its merges meet the random strings."""
    files = [path.read_text(encoding="utf-8") for path in (Path(__file__), ROOT / "tokenizer.py")]
    return Tokenizer.train(["\n".join(TEXTS) * 3, *files, *random_texts(CONTROLS, 4, 1000)], 3000)


@needs_gpt2
def test_gpt2_ids_equal_tiktoken(gpt2):
    ranks = data_gym_to_mergeable_bpe_ranks(str(DATA / "gpt2" / "vocab.bpe"), str(DATA / "gpt2" / "encoder.json"))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    judge = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    texts = all_texts()
    if (DATA / "tinyshakespeare.txt").exists():
        texts.append((DATA / "tinyshakespeare.txt").read_text(encoding="utf-8"))
    theirs = [judge.encode_ordinary(text) for text in texts]
    assert first_difference(map(gpt2.encode, texts), theirs, texts) == []
    # Every assigned code point, between a letter and a digit, is of the kind that the judge takes it for.
    text = "".join(f"a{char}1{char} {char}" for char in ASSIGNED)
    assert gpt2.encode(text) == judge.encode_ordinary(text)


@pytest.mark.parametrize("name", ["trained", pytest.param("gpt2", marks=needs_gpt2)])
def test_tokenizers_and_transformers_read_our_file(name, request, tmp_path):
    ours = request.getfixturevalue(name)
    ours.save(tmp_path / "tokenizer.json")
    texts = all_texts()
    mine = [ours.encode(text) for text in texts]

    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = [encoding.ids for encoding in fast.encode_batch(texts, add_special_tokens=False)]
    assert first_difference(mine, theirs, texts) == []
    assert fast.get_vocab_size() == ours.vocab_size
    assert [fast.token_to_id(token) for token in ours.special] == list(ours.special.values())
    decoded = [fast.decode(ids, skip_special_tokens=False) for ids in mine[:3000]]
    assert first_difference(decoded, map(ours.decode, mine[:3000]), texts[:3000]) == []

    auto = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert first_difference(mine[:5000], auto(texts[:5000], add_special_tokens=False)["input_ids"], texts[:5000]) == []
    assert len(auto) == ours.vocab_size


def test_special_tokens_are_theirs_to_find(trained, tmp_path):
    """The one difference: they parse special tokens in text, which ours never does."""
    trained.save(tmp_path / "tokenizer.json")
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(SPECIAL_TOKENS)
    assert fast.encode(text).ids == list(trained.special.values())
    assert not set(trained.encode(text)) & set(trained.special.values())


@needs_gpt2
def test_we_read_a_file_that_tokenizers_wrote(gpt2, tmp_path):
    gpt2.save(tmp_path / "ours.json")
    tokenizers.Tokenizer.from_file(str(tmp_path / "ours.json")).save(str(tmp_path / "theirs.json"))
    theirs = Tokenizer.load(tmp_path / "theirs.json")
    assert theirs.merges == gpt2.merges and theirs.tokens == gpt2.tokens and theirs.special == gpt2.special


# Tokenizers that the library trained.  SmolLM2's 17 special tokens have the ids 0 to 16; where there is no initial
# alphabet, the bytes are those that were seen, in any order.

SMOLLM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>",
          "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>",
          "<jupyter_output>", "<jupyter_script>", "<empty_output>"]


def foreign(digits, alphabet, special, texts, vocab=1500):
    pre = tokenizers.pre_tokenizers
    peer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = pre.ByteLevel(add_prefix_space=False)
    peer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), byte_level]) if digits else byte_level
    peer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, show_progress=False,
                                             initial_alphabet=pre.ByteLevel.alphabet() if alphabet else [])
    peer.train_from_iterator(texts, trainer)
    return peer


FOREIGN = [(digits, alphabet, special) for digits in (False, True) for alphabet in (False, True) for special in ([], SMOLLM)]


@pytest.fixture(scope="module", params=FOREIGN, ids=lambda p: f"digits={p[0]}-alphabet={p[1]}-special={len(p[2])}")
def peer(request):
    digits, alphabet, special = request.param
    ours = (ROOT / "tokenizer.py").read_text(encoding="utf-8")
    seen = [ours, *TEXTS] if alphabet else [ours, *TEXTS[3:5], *TEXTS[16:17]]       # few bytes are in these
    return foreign(digits, alphabet, special, seen)


def other_texts():
    """Also numbers of all scripts, and words of more than 1,000 bytes, of one kind of character and of many."""
    rng = random.Random(5)
    numbers = [char for char in ASSIGNED if unicodedata.category(char)[0] == "N"]
    long = ["".join(rng.choices(kind, k=rng.randrange(300, 3000))) for kind in ("ab", "abcdefghij", "etaoinshr", "中文字", "a١é", "=-")
            for _ in range(5)]
    code = [(ROOT / name).read_text(encoding="utf-8").replace("<|", "< |") for name in ("tokenizer.py", "model_cpu.py")]
    spaced = random_texts(numbers[::40] + list("  \n\tab'.-,") * 3, 6, 3000)
    return [*long, *code, *spaced, "".join(numbers), " ".join(numbers), "3.14 1,000,000  42\n7   8", "x" + "1" * 500,
            *random_texts(ASSIGNED, 7, 2000), *random_texts(CONTROLS + numbers[:20], 8, 2000), *TEXTS]


def test_we_read_tokenizers_that_others_trained(peer, tmp_path):
    peer.save(str(tmp_path / "tokenizer.json"))
    ours, texts = Tokenizer.load(tmp_path / "tokenizer.json"), other_texts()
    theirs = [encoding.ids for encoding in peer.encode_batch(texts, add_special_tokens=False)]
    assert first_difference(map(ours.encode, texts), theirs, texts) == []
    decoded = [peer.decode(ids, skip_special_tokens=False) for ids in theirs[:2000]]
    assert first_difference(map(ours.decode, theirs[:2000]), decoded, texts[:2000]) == []
    assert ours.vocab_size == peer.get_vocab_size()
    assert list(ours.special) == [token.content for _, token in sorted(peer.get_added_tokens_decoder().items())]
    if len(ours.encoder.byte_ids) == 256:
        rng = random.Random(9)
        for data in [rng.randbytes(rng.randrange(60)) for _ in range(500)]:
            ids = ours.encode(data)
            assert ours.decode_bytes(ids) == data and ours.decode(ids) == data.decode("utf-8", "replace")

    ours.save(tmp_path / "again.json")                          # what is written is read with the same ids, by both
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "again.json"))
    assert first_difference([encoding.ids for encoding in again.encode_batch(texts)], theirs, texts) == []
    loaded = Tokenizer.load(tmp_path / "again.json")
    assert (loaded.tokens, list(loaded.merges.items()), loaded.special, loaded.digits) == (
        ours.tokens, list(ours.merges.items()), ours.special, ours.digits)
    assert again.get_vocab() == peer.get_vocab()
    loaded.save(tmp_path / "third.json")
    assert (tmp_path / "third.json").read_bytes() == (tmp_path / "again.json").read_bytes()


def test_a_name_in_a_text_stays_text(peer, tmp_path):
    peer.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path / "tokenizer.json")
    for name in ours.special:
        assert not {*ours.special.values()} & {*ours.encode(f"a {name} b")} and peer.encode(name).ids == [ours.special[name]]


def test_merges_in_any_order_and_two_that_make_one_token(tmp_path):
    """Tables that no training gives: a part that a later merge makes, ids in another order, two ways to one token."""
    letters, rng, texts = list("abcd"), random.Random(10), []
    for trial in range(200):
        names, merges = [*letters], []
        for _ in range(rng.randrange(1, 12)):
            left, right = rng.choices(names, k=2)
            if (left, right) not in merges:
                merges.append((left, right))
                names += [left + right] if left + right not in names else []
        rng.shuffle(merges)
        rng.shuffle(names)
        peer = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, merges))
        peer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        peer.decoder = tokenizers.decoders.ByteLevel()
        peer.save(str(tmp_path / "tokenizer.json"))
        ours = Tokenizer.load(tmp_path / "tokenizer.json")
        texts = ["".join(rng.choices("abcde", k=rng.choice([3, 10, 40, 400]))) for _ in range(20)]
        theirs = [encoding.ids for encoding in peer.encode_batch(texts)]
        assert first_difference(map(ours.encode, texts), theirs, texts) == [], (names, merges)


# Conversations

PLAIN = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
         "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
DEFAULT = ("{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named "
           "SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}")
WITH_DEFAULT = PLAIN.replace("{{'<|im_start|>'", DEFAULT + "{{'<|im_start|>'", 1)
QUOTED = WITH_DEFAULT.replace("You are a helpful", "You\\'re \\\\ a \U0001f44d\u00e9 \\u00e9 \"helpful\"")
TURNS = [("Hi", "Hello!"), ("  two spaces", "yes"), ("\n\nlines\n", "no "), ("", "empty"), ("1 2\t3", "\u4e2d\u6587"), ("'s \n x ", "ok")]


@pytest.mark.parametrize("template", [PLAIN, PLAIN.replace("\\n", "\n"), WITH_DEFAULT, QUOTED, CHAT_TEMPLATE],
                         ids=["plain", "line ends", "default", "quoted", "ours"])
def test_conversations_equal_apply_chat_template(template, tmp_path):
    special = [*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"]
    peer = foreign(True, True, special, [(ROOT / "tokenizer.py").read_text(encoding="utf-8")])
    peer.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path / "tokenizer.json")
    auto = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    auto.chat_template, ours.template = template, known_template(template)
    # the known form is a template, too, and says the same
    tidy = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tidy.chat_template = ours.template
    rng = random.Random(11)
    for system in None, "Be brief.", " \n x\n", "":
        for _ in range(20):
            turns = rng.choices(TURNS, k=rng.randrange(1, 5))
            messages = [{"role": "system", "content": system}] if system is not None else []
            ids = []
            for i, (text, answer) in enumerate(turns):
                messages += [{"role": "user", "content": text}]
                ids += ours.prompt(text, system=system, first=i == 0)
                for judge in auto, tidy:
                    found = judge.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                    assert ids == found, (system, turns)
                messages += [{"role": "assistant", "content": answer}]
                ids += [*ours.encode(answer), ours.end_of_turn]
