"""tokenizer.py against independent judges: tiktoken's "gpt2", and tokenizers and transformers on our tokenizer.json.

Strings are drawn from the code points that this interpreter's unicodedata assigns: a peer's Unicode may be newer.
"""
import random
import sys
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tokenizer import SPECIAL_TOKENS, Tokenizer  # noqa: E402

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
from tiktoken.load import data_gym_to_mergeable_bpe_ranks  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
needs_gpt2 = pytest.mark.skipif(not (DATA / "gpt2").is_dir(), reason="shared/data/gpt2 is not there")

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
