"""tests/bench.py, as far as a moment goes: counted losses by hand, the solvers and generation on a tiny model."""
import contextlib
import dataclasses
import io
import math
import os
import re
import sys
import types

import bench
import numpy as np
import pytest
from cases import put, value_error, write

import checkpoint
import model_cpu
import model_gpu
import train


def run(*arguments):
    """python tests/bench.py ... -> what it printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr("sys.argv", ["bench.py", *arguments])
        bench.main()
    return out.getvalue()


def test_counts_by_hand():
    """The text "ababac" before "ababc", of which the last three are predicted."""
    losses = bench.count_losses([0, 1, 0, 1, 0, 2], [0, 1, 0, 1, 2], 3)
    unigram = [4 / 9, 3 / 9, 2 / 9]                                     # (3 + 3/3) / (6 + 3), and so on
    bigram = [(2 + 4 / 9) / 3, (2 + 2 * 3 / 9) / 5, (0 + 2 / 9) / 3]    # a after b, b after a, c after b
    trigram = [(2 + bigram[0]) / 3, (1 + 2 * bigram[1]) / 4, (0 + bigram[2]) / 3]
    expected = {"uniform": [1 / 3] * 3, "unigram": unigram, "bigram": bigram, "trigram": trigram}
    assert losses == pytest.approx({name: -np.log(chances).mean() for name, chances in expected.items()}, rel=1e-12)
    # after tokens that never came before, what is known without them: the last token has no next one to learn
    losses = bench.count_losses([0, 1, 2], [2, 2, 0], 4)
    assert losses["trigram"] == losses["unigram"] == pytest.approx(-math.log((1 + 3 / 4) / 6))
    for parts in ([0, 1], [0, 1, 2]), ([0, 1, 2], [0, 1]):
        with value_error("too short to count in"):
            bench.count_losses(*parts, 4)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A text, and a model in out/tiny that has begun to learn it."""
    monkeypatch.chdir(tmp_path)
    write("tiny.txt", "the cat sat on the mat and the dog lay on the rug. " * 40)
    for module, name in (train, "set_threads"), (checkpoint, "lock_folder"):
        monkeypatch.setattr(module, name, lambda *rest: None)
    with contextlib.redirect_stdout(io.StringIO()):
        train.main("--data tiny.txt --out out/tiny --dim 16 --heads 2 --layers 2 --context 16 --vocab 272 "
                   "--steps 40 --batch-tokens 32 --threads 1 --lr 0.02".split())
    return tmp_path


def test_counts_of_a_text(tiny):
    _, learned, val, _ = train.prepare(["tiny.txt"], 272)
    losses = bench.count_losses(learned, val["tiny"], 272)
    assert run("counts", "tiny.txt", "--vocab", "272").splitlines() == [
        f"tiny.txt: {len(learned)} tokens of a vocabulary of 272 to learn from, {len(val['tiny'])} held out; nats a token",
        *[f"  {name:10s} {loss:.4f}" for name, loss in losses.items()], ""]


def test_solvers(tiny):
    """Layers as trained are one Euler step each: the loss is the model's, in the table and by a solver."""
    said = run("euler", "--model", "out/tiny")
    table = dict(re.findall(r"^  (\S.*?) +([0-9]+\.[0-9]{4})(?: .*)?$", said, re.MULTILINE))
    assert len(table) == 9 and "Heun's method" in table
    model, _ = checkpoint.load("out/tiny", model_cpu)
    held_out = train.prepare(["tiny.txt"], 272)[2]["tiny"]
    windows = held_out[:len(held_out) // 17 * 17].reshape(-1, 17).astype(int)[:64]
    targets = np.pad(windows[:, 1:], ((0, 0), (0, model.config.predict - 1)), constant_values=-1)
    loss = f"{model.forward(windows[:, :-1], targets)[0]:.4f}"
    assert table.pop("stopped after layer 1") == table["one step a layer, as trained"] == loss
    assert len(set(table.values())) == 8                # no two ways are the same
    half = model_cpu.Model(dataclasses.replace(model.config, layers=2 * model.config.layers), None)
    for name, w in half.params.items():                 # each layer twice, with half of what it adds
        source = re.sub(r"\d+", lambda number: str(int(number[0]) // 2), name, count=1)
        w[...] = model.params[source] * (0.5 if name.endswith((".out", ".down")) else 1.0)
    assert table["two half steps"] == f"{half.forward(windows[:, :-1], targets)[0]:.4f}"


def test_the_tokenizer_needs_nothing_but_a_text(tmp_path, monkeypatch):
    """No file that a clone has not; without the peers and GPT-2's files it says what would bring them."""
    monkeypatch.chdir(tmp_path)
    put(monkeypatch, bench, DATA=tmp_path / "nowhere", available_cores=lambda: 2)
    os.mkdir("data")
    write("data/tiny.txt", "the cat sat on the mat and the dog lay on the rug. " * 40)
    for name in "tokenizers", "tiktoken":
        monkeypatch.setitem(sys.modules, name, None)
    said = run("tokenizer", "--rounds", "1", "--gpt2", "nowhere")
    assert said.startswith("data/tiny.txt is a short text; ./fetch_data.sh books brings 110 MB")
    assert said.count(f" is not installed ({bench.PEERS_HINT}), so it is not measured") == 2
    assert "just trained (--gpt2 DIR: with GPT-2's)" in said
    assert len(re.findall(r"^  ours, .* MB/s$", said, re.MULTILINE)) == 5


ROW = re.compile(r"^  after +([0-9]+)  (\S.*?) +([0-9]+\.[0-9]{3}) ms a token(?:  (.*))?$", re.MULTILINE)
OURS = [f"ours, {how}{speculative}" for how in ("greedy", "sampled") for speculative in ("", ", speculative")]


@pytest.fixture
def small_presets(monkeypatch):
    config = model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=2, context=16, vocab=32)
    for name in "small", "medium", "big":
        monkeypatch.setitem(model_cpu.CONFIGS, name, config)


def test_decode_on_the_cpu(tiny, small_presets):
    """Speculation of the trained model alone; every row after one token and after 12 of a context of 16."""
    command = "decode --device cpu --rounds 1 --tokens 3".split()
    _, *models = run(*command, "--model", "out/tiny").split("generation, ")
    assert [said.split(", dim ")[0] for said in models] == ["out/tiny", "small, untrained", "medium, untrained"]
    for said, names in zip(models, (OURS, OURS[::2], OURS[::2])):
        rows = ROW.findall(said)
        assert [row[:2] for row in rows] == [(length, name) for length in ("1", "12") for name in names]
        for _, name, seconds, notes in rows:
            assert float(seconds) > 0 and bool(notes) == ("speculative" in name)
            if notes:
                assert 1 <= float(re.fullmatch("(.*) tokens a verification", notes)[1]) <= 4
    assert "out/tiny" not in run(*command)              # out/small is what is there by default
    os.rename("out/tiny", "out/small")
    assert "generation, out/small, dim 16, " in run(*command)


def test_decode_beside_pytorch(small_presets, tmp_path, monkeypatch, err_text):
    monkeypatch.chdir(tmp_path)
    command = "decode --device cpu --rounds 1 --tokens 3 --peer".split()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(SystemExit):
            run(*command)
    assert err_text() == "error: torch is missing: pip install -r tests/peers/requirements.txt.\n"
    torch = pytest.importorskip("torch", reason=f"PyTorch is not installed ({bench.PEERS_HINT})")
    before = torch.get_num_threads()
    monkeypatch.setattr(bench, "available_cores", lambda: 2)
    rows = ROW.findall(run(*command))
    torch.set_num_threads(before)
    assert [row[1] for row in rows] == [*OURS[::2], *(f"peer: PyTorch eager, threads: {n}" for n in (1, 2))] * 4
    for ours, _, *peers in zip(*[iter(rows)] * 4):
        for peer in peers:
            ratio = float(re.fullmatch("ours, greedy, is (.*) x as fast", peer[3])[1])
            assert ratio == pytest.approx(float(peer[2]) / float(ours[2]), rel=0.05)


def test_seconds_a_token(monkeypatch):
    """The clock starts after the first token: what is slow there is not counted."""
    clock = 0.0
    monkeypatch.setattr(bench, "time", types.SimpleNamespace(perf_counter=lambda: clock))

    def tokens():
        nonlocal clock
        for seconds in 100, 1, 2, 6:
            clock += seconds
            yield 0
    assert bench.seconds_a_token(tokens(), 3) == 3
    times = iter([3, 5, 2, 7])
    best = bench.measure_rows({"a": lambda: next(times), "b": lambda: next(times)}, 2)
    assert best == {"a": 2, "b": 5}


def test_the_gpu_that_is_asked_for(err_text, monkeypatch):
    monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: "There is none.")
    for hopper, command in enumerate(["train", "decode --device gpu"]):
        monkeypatch.setattr(model_gpu, "HOPPER", not hopper)
        with pytest.raises(SystemExit):
            run(*command.split(), "--hopper", str(hopper))
        assert err_text() == "error: There is none.\n" and model_gpu.HOPPER == hopper


def test_the_race(tmp_path, monkeypatch):
    # from a table of Student's distribution: beyond 2.776 lies 0.025, with 4 degrees of freedom
    a, b = np.array([-1.0, 0, 1]), np.array([-1.0, 0, 1]) + 2.776 * math.sqrt(2 / 3)
    assert bench.welch(a, b) == pytest.approx(0.025, abs=5e-5) and bench.welch(b, a) == pytest.approx(0.975, abs=5e-5)
    tiny = "--dim 16 --heads 2 --layers 1 --context 16 --vocab 264 --batch-tokens 64 --threads 1 --eval-every 9 --steps"
    monkeypatch.setattr(bench, "RECORD", ("", f"{tiny} 2"))
    monkeypatch.setattr(bench.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(str(tmp_path)))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/tiny.txt", "the cat sat on the mat and the dog lay on the rug. " * 60)
    *runs, line = run("race", "--record", str(bench.ROOT), "--options", f"{tiny} 20 --lr 0.03", "--seeds", "0", "1").split("\n")[:5]
    assert [run.split()[:3] for run in runs] == [[name, "seed", seed] for seed in "01" for name in ("record", "candidate")]
    bits = [float(run.split()[3]) for run in runs]
    assert max(bits[1::2]) < min(bits[::2]) and " p = " in line
    with pytest.raises(SystemExit, match="2"):
        run("race", "--record", str(bench.ROOT), "--options", "--wrong", "--seeds", "0")
