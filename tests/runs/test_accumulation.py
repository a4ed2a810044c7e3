"""Chunks give the features, the gradients and the state of the whole batch, through an ordinary `loss.backward()`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip import CLIP, LargeBatch, SigLIP
from neuclip.objectives import OBJECTIVES, build_objective
from neuclip.objectives.objective import Objective
from neuclip.settings.objectives import OBJECTIVES as OBJECTIVE_SETTINGS
from tests.objectives.features import reference_features

B, WIDTH, VOCABULARY, LENGTH = 8, 6, 20, 3


class Model(nn.Module):
    """Two towers of one layer each, with what makes a second run dangerous if asked for."""

    def __init__(self, extra: nn.Module | None = None):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.Tanh(), extra or nn.Identity(), nn.Linear(10, 6))
        self.text = nn.EmbeddingBag(VOCABULARY, WIDTH)
        # Autograd gives these two one and the same gradient.
        self.shift, self.same_shift = nn.Parameter(torch.zeros(B, WIDTH)), nn.Parameter(torch.zeros(B, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        self.logit_bias = nn.Parameter(torch.tensor(-3.0))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        shift = (self.shift + self.same_shift).mean(dim=0)
        image, text = F.normalize(self.image(images), dim=1), F.normalize(self.text(tokens) + shift, dim=1)
        return image, text, self.logit_scale.exp(), self.logit_bias


def model_with(extra: nn.Module | None = None) -> Model:
    torch.manual_seed(1)
    return Model(extra).double().train()


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2 + number)
    images = torch.randn(B, 3, 2, 2, generator=generator, dtype=torch.float64)
    return images, torch.randint(VOCABULARY, (B, LENGTH), generator=generator)


def objective_named(name: str) -> Objective:
    known = {"embed_dim": WIDTH, "dataset_size": 4 * B, "epoch_samples": 4 * B, "total_samples": 8 * B}
    reference = {"reference": reference_features(4 * B)} if OBJECTIVE_SETTINGS[name].needs_reference else {}
    return build_objective(name, OBJECTIVE_SETTINGS[name](), **known, **reference).double()


def gradients(encode: Callable[..., tuple[Tensor, ...]], model: nn.Module, objective: Objective) -> list[Tensor]:
    """Of three steps; zeros where there is none."""
    found = []
    for number in range(3):
        model.zero_grad()
        ids = torch.arange(number * B, (number + 1) * B)
        objective(*encode(*batch(number)), sample_ids=ids).backward()
        found += gradients_of(model)
    return found


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("micro_batch_size", [0, 1, 3, 100])
def test_chunks_give_the_gradient_of_the_whole_batch_with_temperature_and_bias(name, micro_batch_size):
    whole, model = model_with(), model_with()
    wanted = gradients(whole, whole, objective_named(name))
    found = gradients(LargeBatch(model, micro_batch_size=micro_batch_size), model, objective_named(name))
    assert_close(found, wanted)
    assert any(g.abs().max() > 1e-3 for g in wanted)


def test_a_step_holds_the_activations_of_one_chunk_at_a_time():
    rows = []
    model = model_with()
    model.image[1].register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    CLIP()(*LargeBatch(model, micro_batch_size=3)(*batch())).backward()
    assert rows == [3, 3, 2] * 2


def test_a_scaled_loss_gives_a_scaled_gradient():
    """As a GradScaler needs it."""
    found = []
    for scale in (1.0, 1024.0):
        model = model_with()
        (scale * SigLIP()(*LargeBatch(model, micro_batch_size=3)(*batch()))).backward()
        found.append([gradient / scale for gradient in gradients_of(model)])
    assert_close(*found)


@pytest.mark.parametrize("inside", [False, True])
def test_the_second_run_uses_the_autocast_of_the_first_also_if_backward_is_inside_autocast(inside):
    """Its cache of cast weights must not keep those of the run without a graph."""
    images, tokens = batch()
    found = []
    for micro_batch_size in (0, 4):
        model = model_with().float()
        encode = LargeBatch(model, micro_batch_size=micro_batch_size)
        with torch.autocast("cpu", torch.bfloat16):
            features = encode(images.float(), tokens)
            if inside:
                CLIP()(*features).backward()
        if not inside:
            CLIP()(*features).backward()
        found.append(model.image[1].weight.grad)
    whole, chunks = found
    assert whole.abs().max() > 0 and torch.allclose(chunks, whole, rtol=0.02, atol=1e-4)


def in_chunks(model: Model) -> list[tuple[Tensor, ...]]:
    return [model(*chunk) for chunk in zip(*(x.tensor_split(3) for x in batch()), strict=True)]


def test_both_runs_draw_the_same_dropout_and_leave_the_generator_where_one_would():
    model, reference = model_with(nn.Dropout(0.5)), model_with(nn.Dropout(0.5))
    torch.manual_seed(7)
    features = LargeBatch(model, micro_batch_size=3)(*batch())
    torch.rand(3)  # as an objective might
    CLIP()(*features).backward()
    after = torch.get_rng_state()
    torch.manual_seed(7)
    parts = in_chunks(reference)
    torch.rand(3)
    assert torch.equal(after, torch.get_rng_state())
    image, text = (torch.cat([part[side] for part in parts]) for side in (0, 1))
    CLIP()(image, text, reference.logit_scale.exp()).backward()
    assert_close(*(gradients_of(one) for one in (model, reference)))


def test_running_statistics_of_batchnorm_see_each_chunk_once():
    model, reference = model_with(nn.BatchNorm1d(10)), model_with(nn.BatchNorm1d(10))
    CLIP()(*LargeBatch(model, micro_batch_size=3)(*batch())).backward()
    in_chunks(reference)
    assert_close([x.double() for x in model.buffers()], [x.double() for x in reference.buffers()])
    assert model.image[3].num_batches_tracked == 3


@pytest.mark.parametrize("micro_batch_size", [0, 3])
@pytest.mark.parametrize("learned", ["text.weight", "logit_scale"])
def test_only_trained_parameters_get_a_gradient(learned, micro_batch_size):
    model = model_with().requires_grad_(False)
    model.get_parameter(learned).requires_grad_()
    CLIP()(*LargeBatch(model, micro_batch_size=micro_batch_size)(*batch())).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == {learned} and found[learned].abs().max() > 1e-4


def test_without_a_graph_the_features_are_those_of_the_model():
    model = model_with().eval()
    with torch.no_grad():
        found, wanted = LargeBatch(model, micro_batch_size=3)(*batch()), model(*batch())
    assert_close([*found], [*wanted])
    assert not found[0].requires_grad


class Dictionary(Model):
    def forward(self, images: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return dict(zip(("image", "text"), super().forward(images, tokens), strict=False))


class Short(Model):
    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[:-1] for x in super().forward(images, tokens)[:2])


@pytest.mark.parametrize("micro_batch_size", [0, 3])
def test_a_model_with_other_outputs_is_refused_and_the_error_names_them(micro_batch_size):
    with pytest.raises(TypeError, match="Dictionary returns a dict; wrap it in a module that returns a tuple"):
        LargeBatch(Dictionary().double(), micro_batch_size=micro_batch_size)(*batch())
    with pytest.raises(ValueError, match=r"for [38] rows"):
        LargeBatch(Short().double(), micro_batch_size=micro_batch_size)(*batch())


def test_inputs_and_wrappers_without_an_exact_gradient_are_refused():
    images, tokens = batch()
    with pytest.raises(ValueError, match="compute this input inside the model"):
        LargeBatch(model_with(), micro_batch_size=3)(images.requires_grad_(), tokens)
    with pytest.raises(ValueError, match="micro_batch_size is -1"):
        LargeBatch(model_with(), micro_batch_size=-1)
    model = model_with()
    image = LargeBatch(model, micro_batch_size=3)(*batch())[0]
    (gradient,) = torch.autograd.grad(image.pow(3).sum(), [model.image[1].weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
