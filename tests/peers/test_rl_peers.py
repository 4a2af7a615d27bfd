"""The gradients of rl.py's weights beside PyTorch's autograd in float64, and the log-probabilities."""
import numpy as np
import pytest
import torch
import torch_twin

import model_cpu
import rl


@pytest.mark.parametrize("heads, T, dpo", [(2, 17, True), (3, 9, False)])
def test_the_gradient_is_autograds(heads, T, dpo):
    """Odd shapes, further heads, which count nothing, and masked prompts.  DPO's weights come from a pass before."""
    config = model_cpu.Config(dim=8 * heads, heads=heads, kv_heads=1, layers=2, context=32, vocab=40, predict=3)
    rng, B, tensor = np.random.default_rng(heads), 2 * rl.GROUP, torch.from_numpy
    model = model_cpu.Model(config, threads=3)
    model.write(model.flat_params, 0.2 * rng.standard_normal(model.flat_params.shape, np.float32))      # as the twin takes it
    tokens, targets = rng.integers(0, 40, (B, T)), rng.integers(0, 40, (B, T + 2))
    targets[:, :2] = targets[0, 4:] = -1
    twin = torch_twin.Twin(config, model.params).double()
    cos, sin = model.rope[:, :T, 0]
    # it has the sign of the sine in the rotation
    expected = twin.log_probs(tensor(tokens), tensor(targets[:, :T]), tensor(cos), tensor(np.tile(sin[:, 4:], 2)))
    found, reference = model.log_probs(tokens, targets), rng.standard_normal(B) - 20
    np.testing.assert_allclose(found, expected.detach().numpy())
    if dpo:
        loss = torch_twin.dpo_loss(expected, tensor(reference), 0.3)
        weights, _ = rl.dpo_weights(found, reference, 0.3)
    else:
        groups = tensor(reference).reshape(2, -1)
        weights = rl.reinforce_weights(reference)
        loss = -((groups - groups.mean(1, keepdim=True)).ravel() @ expected) / rl.GROUP
    loss.backward()
    model.forward(tokens, targets, [rl.GROUP] * 3, weights)
    model.backward()
    for name, gradient in model.grads.items():
        exact = twin.weights[name.replace(".", "_")].grad.numpy()
        assert np.linalg.norm(gradient - exact) < 1e-12 * np.linalg.norm(exact)
