"""The gradient of DPO's weights in rl.py beside PyTorch's autograd in float64, and the log-probabilities."""
import numpy as np
import torch
import torch.nn.functional as F
import torch_twin

import model_cpu
import rl


def test_the_gradient_of_dpo_is_autograds():
    """Odd shapes, further heads, which count nothing, and masked prompts.  The weights come from a pass before."""
    config = model_cpu.Config(dim=24, heads=3, kv_heads=1, layers=2, context=32, vocab=40, predict=3)
    rng = np.random.default_rng(2)
    model = model_cpu.Model(config, threads=3)
    model.flat_params[:] = 0.2 * rng.standard_normal(model.flat_params.shape, np.float32)       # as the twin takes it
    tokens, targets = rng.integers(0, 40, (12, 17)), rng.integers(0, 40, (12, 19))
    targets[:, :2] = targets[0, 4:] = -1
    reference = rng.standard_normal(12) - 20
    twin = torch_twin.Twin(config, model.params, torch.float64).double()
    logits = twin.logits(torch.from_numpy(tokens), *torch_twin.tables(config, 17, dtype=torch.float64))
    nll = F.cross_entropy(logits[..., :40].mT, torch.from_numpy(targets[:, :17]), ignore_index=-1, reduction="none")
    expected = -nll.sum(1)
    found = model.log_probs(tokens, targets)
    np.testing.assert_allclose(found, expected.detach())
    chosen, rejected = (expected - torch.from_numpy(reference)).view(-1, 2).T
    (-F.logsigmoid(0.3 * (chosen - rejected)).mean()).backward()
    weights, _ = rl.dpo_weights(found, reference, 0.3)
    model.forward(tokens, targets, [6] * 3, weights)
    model.backward()
    for name, gradient in model.grads.items():
        exact = twin.weights[name.replace(".", "_")].grad.numpy()
        assert np.linalg.norm(gradient - exact) < 1e-12 * np.linalg.norm(exact)
