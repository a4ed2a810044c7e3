"""Between two models: each weight is the mean that was asked for, in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neuclip.errors import UserError
from neuclip.models.build import build_model
from neuclip.models.interpolation import interpolate


@pytest.fixture(scope="module")
def states():
    """Of two models with other random weights."""
    return [build_model("tiny").towers.model.state_dict() for _ in range(2)]


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_every_weight_lies_between_and_integers_are_kept(weight, states):
    base, tuned = states[0], dict(states[1])
    tuned["logit_scale"] = base["logit_scale"] + 1
    tuned["visual.bn1.num_batches_tracked"] = torch.tensor(7)
    merged = interpolate(base, tuned, weight)
    assert merged.keys() == tuned.keys()
    for name, tensor in merged.items():
        first, second = base[name].double().numpy(), tuned[name].double().numpy()
        wanted = second if "num_batches" in name else (1 - weight) * first + weight * second
        np.testing.assert_allclose(tensor.double().numpy(), wanted, rtol=1e-5, atol=1e-6, err_msg=name)
        assert tensor.dtype == tuned[name].dtype
    if weight in (0.0, 1.0):
        end = tuned if weight else base
        assert all(torch.equal(merged[name], end[name]) for name in merged if merged[name].is_floating_point())


def test_half_precision_is_computed_in_float32():
    base = {"w": torch.tensor([1000.0, 0.1], dtype=torch.float16)}
    tuned = {"w": torch.tensor([1001.0, 0.3], dtype=torch.float16)}
    assert interpolate(base, tuned, 0.25)["w"].tolist() == torch.tensor([1000.25, 0.15]).half().tolist()


def test_models_with_other_weights_are_refused():
    weights = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(UserError, match="differ in 2 of their weights, the first is b"):
        interpolate(weights, {"a": torch.zeros(2), "b": torch.zeros(4), "c": torch.zeros(1)}, 0.5)
