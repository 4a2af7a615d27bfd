"""plot.py: pictures of a run, and of what happens in a model.  It needs matplotlib.

    python docs/plot.py losses out/small [out/other ...]        losses or rewards by step, several runs together
    python docs/plot.py lens out/small "The king said"          what each layer would say next at each position
    python docs/plot.py attention out/small "The king said"     what each head of each layer looks at

The picture is written to losses.png, lens.png or attention.png.
"""
import json
import sys

sys.path[0] += "/.."                                # from docs/ to the folder above it
try:
    from matplotlib import pyplot
except ImportError:
    print("error: matplotlib is missing: pip install matplotlib")
    sys.exit(2)
import checkpoint
import model_cpu
import numpy as np
from script import refusing, run_script, visible


def losses(folders):
    """A curve for each run and each of these numbers in its log."""
    for folder in folders:
        for key in "loss", "val_loss", "reward", "accuracy":
            points = [(record["step"], record[key])
                      for record in map(json.loads, open(f"{folder}/log.jsonl")) if key in record]
            pyplot.plot(*zip(*points), label=f"{folder} {key}")
    pyplot.legend()


def lens(model, ids, tokens):
    """Columns: the tokens read.  Rows: the embedding, then each layer.  In a cell stands the likeliest next token if
    the model ended there; the darker, the larger its probability."""
    e = np.exp([logits for _, logits in model_cpu.layer_logits(model, ids)])            # (L+1,T,V)
    pyplot.axis("off")
    pyplot.table(tokens[e.argmax(-1)], pyplot.cm.Wistia(e.max(-1) / e.sum(-1)),
                 colLabels=tokens[ids[0]], bbox=(0, 0, 1, 1))


def attention(model, ids, tokens):
    """A square for each head (across) of each layer (down).  Its row t shows how much the token t attends to each token
    up to itself."""
    model.logits(ids)                               # which leaves the probabilities P (1,G,R,T,T) of each layer
    for i, layer in enumerate(model.workspaces[0].buffers(*ids.shape)[0]):
        for h, P in enumerate(np.concatenate(layer.P[0])):                          # (T,T)
            pyplot.axes((h, -i, 0.8, 0.8), title=f"layer {i}, head {h}")
            pyplot.imshow(P, "Blues")
            pyplot.yticks(range(len(P)), tokens[ids[0]])


def main(argv):
    with refusing("name a picture (losses, lens or attention), a folder, and for the last two a text"):
        picture, folder, *others = argv
        if picture == "losses":
            losses([folder, *others])
        else:
            model, tokenizer = checkpoint.load(folder, model_cpu)
            tokens = np.array([*map(visible, tokenizer.tokens)])
            globals()[picture](model, np.array([tokenizer.encode(*others)]), tokens)
    pyplot.savefig(f"{picture}.png", bbox_inches="tight")
    print(f"Wrote {picture}.png")


if __name__ == "__main__":
    run_script(main)
