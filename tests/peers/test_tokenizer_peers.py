"""tokenizer.py against independent judges: tiktoken's "gpt2", tokenizers and transformers on our tokenizer.json, and on
tokenizers and templates of other people.

Strings are drawn from the code points that this interpreter's unicodedata assigns: a peer's Unicode may be newer.
"""
import contextlib
import sys
import unicodedata
from pathlib import Path
from random import Random

import pytest
from cases import once_a_module, parametrize, write
from test_tokenizer import DEFAULT, PLAIN, random_merges

ROOT = Path(__file__).resolve().parent.parent.parent

import checkpoint  # noqa: E402
from tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, Tokenizer, known_template  # noqa: E402

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
from tiktoken.load import data_gym_to_mergeable_bpe_ranks  # noqa: E402

DATA = ROOT.parent / "shared/data"
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
    rng = Random(seed)
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(count)]


def all_texts():
    """Fixed texts, 10,000 strings of any assigned code points, 10,000 of controls and white space, 10,000 of a mix."""
    mix = Random(0).choices(ASSIGNED, k=300) + CONTROLS[:40] * 3 + list("aabcdestmrelv'''  \n\n\t0123.,!-") * 12
    return (TEXTS + random_texts(ASSIGNED, 1) + random_texts(CONTROLS, 2) + random_texts(mix, 3)
            + [f"a{char}1 {char}b {char} 'S{char}\n{char}" for char in ASSIGNED[::3]])


def first_difference(ours, theirs, texts):
    return [ascii(text)[:200] for a, b, text in zip(ours, theirs, texts, strict=True) if a != b][:5]


@once_a_module
def trained():
    """Trained on every script in TEXTS, so that its merges meet the random strings."""
    files = [path.read_text() for path in (Path(__file__), ROOT / "tokenizer.py")]
    return Tokenizer.train(["\n".join(TEXTS) * 3, *files, *random_texts(CONTROLS, 4, 1000)], 3000)


@needs_gpt2
def test_gpt2_ids_equal_tiktoken():
    files = [str(DATA / "gpt2" / name) for name in ("vocab.bpe", "encoder.json")]
    gpt2, ranks = Tokenizer.from_gpt2(*files), data_gym_to_mergeable_bpe_ranks(*files)
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    judge = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    texts = all_texts()
    # every assigned code point, between a letter and a digit, is of the kind that the judge takes it for
    texts.append("".join(f"a{char}1{char} {char}" for char in ASSIGNED))
    theirs = [judge.encode_ordinary(text) for text in texts]
    assert gpt2.vocab_size == judge.n_vocab and first_difference(map(gpt2.encode, texts), theirs, texts) == []


def test_tokenizers_and_transformers_read_our_file(trained, tmp_path):
    ours, path = trained, f"{tmp_path}/tokenizer.json"
    ours.save(path)
    texts = all_texts()
    mine = [ours.encode(text) for text in texts]

    fast = tokenizers.Tokenizer.from_file(path)
    theirs = [encoding.ids for encoding in fast.encode_batch(texts, add_special_tokens=False)]
    assert first_difference(mine, theirs, texts) == []
    decoded = fast.decode_batch(mine[:3000], skip_special_tokens=False)
    assert first_difference(decoded, map(ours.decode, mine[:3000]), texts[:3000]) == []
    # the one difference: they look for special tokens in a text, which we never do
    assert fast.encode("".join(ours.special)).ids == list(ours.special.values())
    assert not {*ours.encode("".join(ours.special))} & {*ours.special.values()}

    auto = transformers.PreTrainedTokenizerFast(tokenizer_file=path)
    assert first_difference(mine[:5000], auto(texts[:5000], add_special_tokens=False)["input_ids"], texts[:5000]) == []
    assert len(auto) == fast.get_vocab_size() == ours.vocab_size
    for save in fast.save, lambda path: auto.save_pretrained(tmp_path):         # and we read what they write
        save(path)
        again = Tokenizer.load(path)
        assert (again.merges, again.tokens, again.special) == (ours.merges, ours.tokens, ours.special)


# Tokenizers that the library trained.  SmolLM2's 17 special tokens have the ids 0 to 16; where there is no initial
# alphabet, the bytes are those that were seen, in any order.

SMOLLM = """<|endoftext|> <|im_start|> <|im_end|> <repo_name> <reponame> <file_sep> <filename> <gh_stars>
    <issue_start> <issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code>
    <jupyter_output> <jupyter_script> <empty_output>""".split()


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


@pytest.fixture(scope="module", params=[(False, True, SMOLLM), (True, False, []), (True, True, []), (False, False, SMOLLM)])
def peer(request):
    digits, alphabet, special = request.param
    ours = (ROOT / "tokenizer.py").read_text()
    seen = [ours, *TEXTS] if alphabet else [ours, *TEXTS[3:5], *TEXTS[16:17]]       # few bytes are in these
    return foreign(digits, alphabet, special, seen)


def other_texts():
    """Also numbers of all scripts, and words of more than 1,000 bytes, of one kind of character and of many."""
    rng = Random(5)
    numbers = [char for char in ASSIGNED if unicodedata.category(char)[0] == "N"]
    long = ["".join(rng.choices(kind, k=rng.randrange(300, 3000))) for kind in ("ab", "abcdefghij", "中文字", "a١é", "=-") * 5]
    spaced = random_texts(numbers[::40] + list("  \n\tab'.-,") * 3, 6, 3000)
    return [*long, *spaced, "".join(numbers), " ".join(numbers), *random_texts(ASSIGNED, 7, 2000), *TEXTS]


def test_we_read_tokenizers_that_others_trained(peer, tmp_path):
    path = f"{tmp_path}/tokenizer.json"
    peer.save(path)
    ours, texts = Tokenizer.load(path), other_texts()
    theirs = [encoding.ids for encoding in peer.encode_batch(texts, add_special_tokens=False)]
    assert first_difference(map(ours.encode, texts), theirs, texts) == []
    decoded = peer.decode_batch(theirs[:2000], skip_special_tokens=False)
    assert first_difference(map(ours.decode, theirs[:2000]), decoded, texts[:2000]) == []
    assert ours.vocab_size == peer.get_vocab_size()
    assert list(ours.special) == [token.content for _, token in sorted(peer.get_added_tokens_decoder().items())]
    ours.save(path)                                             # what is written is read with the same ids, by both
    again = tokenizers.Tokenizer.from_file(path)
    assert first_difference([encoding.ids for encoding in again.encode_batch(texts)], theirs, texts) == []
    assert again.get_vocab() == peer.get_vocab()


def test_merges_in_any_order_and_two_that_make_one_token(tmp_path):
    """Tables that no training gives: a part that a later merge makes, ids in another order, two ways to one token."""
    path, rng = f"{tmp_path}/tokenizer.json", Random(10)
    peer = foreign(False, False, [], ["abcd"])
    for _ in range(200):
        names, merges = random_merges(rng, "abcd")
        vocab = dict(zip(names, rng.sample(range(40), len(names))))
        peer.model = tokenizers.models.BPE(vocab, merges)
        peer.save(path)
        texts = ["".join(rng.choices("abcde", k=rng.choice([3, 10, 40, 400]))) for _ in range(20)]
        theirs = [encoding.ids for encoding in peer.encode_batch(texts)]
        assert first_difference(map(Tokenizer.load(path).encode, texts), theirs, texts) == [], (vocab, merges)


# not SmolLM's: transformers 5 forgets the digits of a GPT2Tokenizer, which is how its folder names it
@parametrize("settings, equal", [
    ("{}", True), ('{"tokenizer_class": "GPT2Tokenizer"}', True), ('{"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true}', False),
    ('{"tokenizer_class": "Qwen2Tokenizer"}', False), ('{"tokenizer_class": "PreTrainedTokenizerFast"}', True),
    ('{"added_tokens_decoder": {"400": {"content": "cat", "special": false}}}', False)])
def test_settings_give_equal_ids_or_are_refused(settings, equal, tmp_path):
    foreign(False, True, SMOLLM, TEXTS).save(f"{tmp_path}/tokenizer.json")
    write(tmp_path / "config.json", '{"model_type": "llama"}')
    write(tmp_path / "tokenizer_config.json", settings)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = [theirs.encode(text, add_special_tokens=False) for text in (*TEXTS, "a cat  12")]
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert ([*map(tokenizer.encode, (*TEXTS, "a cat  12"))] == given) == equal
    with contextlib.nullcontext() if equal else pytest.raises(ValueError, match="settings cannot be used"):
        checkpoint.read_tokenizer(str(tmp_path))


# Conversations

QUOTED = DEFAULT.replace("You are a helpful", "You\\'re \\\\ a \U0001f44d\u00e9 \\u00e9 \"helpful\"")
TURNS = [("Hi", "Hello!"), ("  two spaces", "yes"), ("\n\nlines\n", "no "), ("", "empty"), ("1 2\t3", "\u4e2d\u6587"), ("'s \n x ", "ok")]


@parametrize("template", [PLAIN, PLAIN.replace("\\n", "\n"), DEFAULT, QUOTED, CHAT_TEMPLATE],
                         ids=["plain", "line ends", "default", "quoted", "ours"])
def test_conversations_equal_apply_chat_template(template, tmp_path):
    special = [*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"]
    peer = foreign(True, True, special, [(ROOT / "tokenizer.py").read_text()])
    peer.save(f"{tmp_path}/tokenizer.json")
    ours = Tokenizer.load(tmp_path / "tokenizer.json")
    auto = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{tmp_path}/tokenizer.json")
    ours.template = known_template(template)
    rng = Random(11)
    for system in None, "Be brief.", " \n x\n", "":
        for _ in range(20):
            messages = [] if system is None else [{"role": "system", "content": system}]
            ids = []
            for text, answer in rng.choices(TURNS, k=rng.randrange(1, 5)):
                messages += [{"role": "user", "content": text}]
                ids += ours.prompt(text, system=system, first=not ids)
                # the known form is a template, too, and says the same
                for form in template, ours.template:
                    assert ids == auto.apply_chat_template(messages, chat_template=form, add_generation_prompt=True,
                                                            return_dict=False)
                messages += [{"role": "assistant", "content": answer}]
                ids += [*ours.encode(answer), ours.end_of_turn]
