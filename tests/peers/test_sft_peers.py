"""sft.py against a judge that others wrote: a twin in PyTorch, fine-tuned on the same batches."""
import numpy as np
import torch
import torch_twin
from runs import read_log, run

import checkpoint
import model_cpu
import script
import sft
import train


def test_a_twin_fine_tuned_on_the_same_batches_has_the_same_losses(tmp_path, monkeypatch):
    """On the English inside Python and the questions that go with it, from the same weights."""
    monkeypatch.chdir(tmp_path)
    run("train.py --steps 100 --batch-tokens 512 --eval-every 100 --out base")
    run("sft.py --base base --optimizer adamw --steps 40 --eval-every 40 --out tuned")
    training = train.open_run("sft.py", {}, "tuned", script.Ranks())
    base, _ = checkpoint.load("base", model_cpu)
    step = torch_twin.Step(torch_twin.Twin(base.config, base.params), compiled=False)
    batch = sft.fine_tuning_job(training).batch
    theirs = []
    for i in range(40):
        arrays = train.make_batch(batch(i)[0], 128, 4)
        theirs.append(step(*map(torch.from_numpy, arrays), train.learning_rate(i, training.settings)))
    ours = [record["losses"] for record in read_log("tuned") if "losses" in record]
    assert ours[-1][0] < ours[0][0] - 0.3
    np.testing.assert_allclose(ours, torch.stack(theirs), atol=1e-5)
