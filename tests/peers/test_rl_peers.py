"""rl.py's gradients beside PyTorch's autograd in float64, and its log-probabilities."""
import numpy as np
import pytest
import torch
import torch_twin

import model_cpu
import rl


@pytest.mark.parametrize("heads, T, method", [(1, 5, "dpo"), (3, 9, "reinforce"), (2, 17, "dpo")])
def test_the_gradient_is_autograds(heads, T, method):
    """Odd shapes, further heads, which count nothing, and masked prompts."""
    config = model_cpu.Config(dim=24 if heads == 3 else 16, heads=heads, kv_heads=1, layers=2, context=32, vocab=40, predict=3)
    rng = np.random.default_rng(heads)
    model = model_cpu.Model(config, seed=1, threads=3)
    wide = model.flat_params + 0.2 * rng.standard_normal(model.flat_params.size)
    model.write(model.flat_params, wide.astype(np.float32))                 # the twin takes float32
    B = 2 * rl.GROUP if method == "reinforce" else 6
    tokens, targets = rng.integers(0, 40, (B, T)), rng.integers(0, 40, (B, T + 2))
    targets[:, :2] = targets[0, 4:] = -1
    twin = torch_twin.Twin(config, model.params).double()
    cos, sin = torch.from_numpy(model.rope[:, :T, 0].copy())
    sin[:, :config.head_dim // 2] *= -1                                     # it has the sign in the rotation
    y = torch.from_numpy(targets[:, :T].copy())
    log_probs = twin.log_probs(torch.from_numpy(tokens), y, cos, sin)
    reference, rewards = rng.standard_normal(B) - 20, rng.standard_normal(B)
    if method == "dpo":
        loss = torch_twin.dpo_loss(log_probs, torch.from_numpy(reference), 0.3)
        counted, weights = B // 2, rl.dpo_weights(model.log_probs(tokens, targets), reference, 0.3)
    else:
        groups = torch.from_numpy(rewards).reshape(-1, rl.GROUP)
        counted, weights = int((y >= 0).sum()), rl.reinforce_weights(rewards)
        loss = -((groups - groups.mean(1, keepdim=True)).ravel() * log_probs).sum() / counted
    np.testing.assert_allclose(model.log_probs(tokens, targets), log_probs.detach().numpy(), rtol=1e-12)
    loss.backward()
    model.forward(tokens, targets, np.full(3, counted), weights)
    model.backward()
    for name in model.grads:
        expected = twin.weights[name.replace(".", "_")].grad.numpy()
        error = np.linalg.norm(model.grads[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-12, (name, error)
