"""FastCLIP's variants against moving averages in plain Python and linear space, and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neuclip import CLIP, FastCLIP
from tests.objectives.features import close, number, same_gradients, unit

N, B, D, EPS, RHO = 11, 6, 5, 1e-6, 6.5
# New samples, old ones, and from the third batch on a sample twice in one batch.
VISITS = [[0, 1, 2, 3, 4, 5], [3, 4, 6, 0, 7, 8], [9, 9, 1, 6, 2, 0], [5, 8, 5, 4, 3, 9], [0, 1, 0, 3, 0, 10]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=2 * step).requires_grad_(), unit(B, D, seed=2 * step + 1).requires_grad_()


class Temperature:
    """One sample's temperature of one side, moved by torch's own Adam."""

    def __init__(self) -> None:
        self.value = number(0.03)
        self.adam = torch.optim.Adam([self.value], lr=0.0133)

    def step(self, gradient: float) -> None:
        self.value.grad = torch.tensor(max(-5.0, min(5.0, gradient)), dtype=torch.float64)
        self.adam.step()
        with torch.no_grad():
            self.value.clamp_(0.01, 1.0)


class Reference:
    """The method row by row: u in linear space, gradients by autograd."""

    def __init__(self, temperature: str, doubled: bool):
        self.temperature, self.doubled = temperature, doubled
        self.gamma = 1.0
        self.captions: list[int] = []  # of the batch; pairs with equal ones are no negatives
        self.u: dict[tuple[int, int], float] = {}  # (side, sample)
        self.temperatures: dict[tuple[int, int], Temperature] = {}

    def loss(self, image: Tensor, text: Tensor, tau: Tensor, ids: list[int]) -> tuple[float, Tensor]:
        """The value of the loss, and a scalar whose gradient is the method's."""
        value, through = 0.0, torch.zeros((), dtype=torch.float64)
        for side in (0, 1):
            s = image @ text.T if side == 0 else text @ image.T
            taus = [self.tau_of(side, sample, tau) for sample in ids]
            g = [self.normalizer(s, i, taus[i], ids) for i in range(len(ids))]
            self.visit(side, ids, [x.item() for x in g])
            for i, sample in enumerate(ids):
                u = self.u[side, sample]
                v, t = self.row(g[i] / u, math.log(u), taus[i], tau)
                value, through = value + v / len(ids), through + t / len(ids)
            if self.temperature == "individual":
                self.move(side, ids, g, taus)
        return value, through

    def row(self, ratio: Tensor, log_u: float, own: Tensor, tau: Tensor) -> tuple[float, Tensor]:
        if self.temperature == "global":
            return tau.item() * (log_u + RHO), tau * (log_u + RHO) + tau.detach() * ratio
        if self.temperature == "individual":
            return own.item() * (log_u + RHO), own.detach() * ratio
        return tau.item() * log_u, tau.detach() * ratio

    def tau_of(self, side: int, sample: int, tau: Tensor) -> Tensor:
        if self.temperature == "individual":
            kept = self.temperatures.setdefault((side, sample), Temperature())
            return kept.value.detach().clone().requires_grad_()
        if self.temperature == "constant":
            return tau.detach()
        return 2 * tau - tau.detach() if self.doubled else tau

    def normalizer(self, s: Tensor, i: int, tau: Tensor, ids: list[int]) -> Tensor:
        keys = [*zip(ids, self.captions, strict=True)]
        others = [j for j, (sample, caption) in enumerate(keys) if sample != ids[i] and caption != self.captions[i]]
        return torch.stack([torch.exp((s[i, j] - s[i, i]) / tau) for j in others]).mean()

    def visit(self, side: int, ids: list[int], g: list[float]) -> None:
        for sample in set(ids):
            said = [EPS + g[i] for i in range(len(ids)) if ids[i] == sample]
            now = sum(said) / len(said)
            before = self.u.get((side, sample), now)
            self.u[side, sample] = (1 - self.gamma) * before + self.gamma * now

    def move(self, side: int, ids: list[int], g: list[Tensor], taus: list[Tensor]) -> None:
        for sample in set(ids):
            u, gradients = self.u[side, sample], []
            for i in [i for i in range(len(ids)) if ids[i] == sample]:
                (slope,) = torch.autograd.grad(g[i], taus[i], retain_graph=True)
                gradients.append(math.log(u) + RHO + taus[i].item() * slope.item() / u)
            self.temperatures[side, sample].step(sum(gradients) / len(gradients))


def make(temperature: str = "global", gamma: float = 0.3, **changes) -> FastCLIP:
    settings = {"gamma_schedule": "constant", "eps": EPS, "rho": RHO} | changes
    return FastCLIP(N, temperature=temperature, gamma=gamma, **settings)


def table(objective: FastCLIP) -> Tensor:  # (columns, N): log u of both sides, temperatures of both sides, ...
    return objective.state_dict()["table.rows"].T


@pytest.mark.filterwarnings("ignore:logit_scale is 2")
@pytest.mark.parametrize("changes", [{}, {"gamma_schedule": "cosine"}, {"mask_duplicates": True}], ids=str)
@pytest.mark.parametrize(
    ("temperature", "doubled"), [("global", False), ("global", True), ("constant", False), ("individual", False)]
)
@pytest.mark.parametrize(("gamma", "tau"), [(0.3, 0.07), (0.9, 0.5)])
def test_five_steps_equal_the_reference(temperature, gamma, tau, doubled, changes):
    changes = changes | {"temperature_gradient": "fastclip" if doubled else "paper", "gamma_decay_samples": 4 * B}
    objective, reference = make(temperature, gamma, **changes), Reference(temperature, doubled)
    half = gamma + (1 - gamma) / 2
    falling = [1.0, 1.0, half, half - (1 - gamma) / math.sqrt(8), gamma]  # cosines of 0, 90, 135 and 180 degrees
    for step, ids in enumerate(VISITS):
        leaves, captions = [*batch(step), number(1 / tau)], [x % 5 for x in ids]
        got = objective(*leaves, sample_ids=torch.tensor(ids), caption_ids=torch.tensor(captions))
        reference.gamma = falling[step] if "gamma_schedule" in changes else gamma
        reference.captions = captions if "mask_duplicates" in changes else ids
        value, through = reference.loss(*leaves[:2], 1 / leaves[2], ids)
        assert got.item() == pytest.approx(value, rel=1e-11)
        assert same_gradients(got, through, leaves, 1e-11)
        assert objective.metrics["gamma"] == pytest.approx(reference.gamma)
    # Where exponents reach 80, each move of an individual temperature multiplies rounding by as much.
    tolerance = 1e-8 if temperature == "individual" else 1e-11
    stored = table(objective)
    for (side, sample), u in reference.u.items():
        assert math.exp(stored[side, sample]) == pytest.approx(u, rel=tolerance)
        if temperature == "individual":
            want = reference.temperatures[side, sample].value.item()
            assert stored[2 + side, sample].item() == pytest.approx(want, rel=tolerance)


@pytest.mark.filterwarnings("ignore:logit_scale is 2")
@pytest.mark.parametrize("eps", [0.0, 1e-14, 1e-6, 1e-2])
@pytest.mark.parametrize("tau", [0.01, 0.07, 0.5])
def test_with_gamma_one_it_is_the_minibatch_form(eps, tau):
    objective, plain = make(gamma=1.0, eps=eps), CLIP(form="minibatch", eps=eps, rho=RHO)
    for step, ids in enumerate(VISITS[:2]):
        leaves = [*batch(step), number(1 / tau)]
        got, want = (f(*leaves, sample_ids=torch.tensor(ids)) for f in (objective, plain))
        assert close(got, want, 1e-12) and same_gradients(got, want, leaves, 1e-11)


@pytest.mark.parametrize(
    ("given", "end", "first"),
    [({"gamma_decay_samples": 40}, 40, 10), ({"total_samples": 80, "epoch_samples": 17}, 40, 17), ({}, 0, 10)],
)
def test_gamma_falls_from_one_after_the_first_pass_by_a_cosine_to_its_last_value(given, end, first):
    objective = FastCLIP(10, gamma=0.2, **given)
    assert FastCLIP(10, gamma=0.2, gamma_schedule="constant", **given).gamma_now() == 0.2
    for seen in (0, 9, 10, 16, 17, 39, 40, 99):
        objective.samples_seen = seen
        falling = 0.2 + 0.8 * (1 + math.cos(math.pi * seen / end)) / 2 if seen < end else 0.2
        assert objective.gamma_now() == pytest.approx(1.0 if seen < first else falling)


def test_in_eval_mode_samples_it_knows_use_what_is_stored_and_others_the_batch():
    objective = make()
    objective(*batch(0), number(10.0), sample_ids=torch.tensor(VISITS[0]))
    ids = torch.tensor(VISITS[1])  # half of them new
    image, text = batch(1)
    loss = objective.eval()(image, text, number(10.0), sample_ids=ids)
    own = torch.stack(CLIP(eps=EPS).log_normalizers(image, text, number(10.0)))
    stored = table(objective)[:, ids]
    used = torch.where(stored.isnan(), own, stored)
    assert loss.item() == pytest.approx(0.1 * (used.mean(dim=1).sum() + 2 * RHO).item(), rel=1e-11)


def test_estimates_are_what_is_stored_at_any_temperature_and_not_a_number_where_never_visited():
    objective, ids = make(), torch.tensor([2, 9, 0, 10, 4, 6])
    objective(*batch(0), number(10.0), sample_ids=torch.tensor(VISITS[0]))
    found = torch.stack(objective.log_normalizers(*batch(1), number(3.0), sample_ids=ids))
    assert torch.equal(found.nan_to_num(), table(objective)[:, ids].nan_to_num())
    assert found[0].isnan().tolist() == [False, True, False, True, False, True]


@pytest.mark.parametrize("eps", [1e-9, 1e-4])
def test_a_stored_eps_hides_what_is_far_below_it_and_unvisited_samples_stay_unknown(eps):
    objective = make()
    objective(*batch(0), number(10.0), sample_ids=torch.tensor(VISITS[0]))
    state = objective.state_dict()
    u = torch.tensor([0.5 + 1e-6, 1e-6 + 1e-8, 1e-6 * (1 + 1e-5), math.nan, 2.0, 1e-6], dtype=torch.float64)
    state["table.rows"][:B] = u.log()[:, None]
    objective.load_state_dict(state)
    found, _ = objective.log_normalizers(*batch(1), number(10.0), sample_ids=torch.arange(B), eps=eps)
    known = [0, 1, 4] if eps < EPS else [0, 1, 2, 4, 5]
    assert (~found.isnan()).nonzero().flatten().tolist() == known
    want = [math.log(eps + max(0.0, u[k].item() - 1e-6)) for k in known]
    assert found[known].tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("wrong", [-1, 11, 10**12])
def test_an_id_outside_the_data_set_is_refused_and_writes_nothing(wrong):
    objective = make()
    with pytest.raises(ValueError, match=r"a sample id is outside 0\.\.10, for dataset_size=11; number the samples"):
        objective(*batch(0), number(10.0), sample_ids=torch.tensor([0, 1, wrong, 3, 4, 5]))
    assert objective.samples_seen == 0 and table(objective).isnan().all()


def test_individual_temperatures_obey_their_arguments_and_stay_in_their_range():
    for rho, want in ((-100.0, 0.25), (100.0, 0.15)):  # Adam's first step is the rate
        objective = make("individual", rho=rho, temperature_initial=0.2, temperature_lr=0.05)
        for step in range(8):
            objective(*batch(0), number(10.0), sample_ids=torch.tensor(VISITS[0]))
            mean = table(objective)[2:4, :B].mean(dim=1)
            metrics = objective.metrics["mean_temperature_image"], objective.metrics["mean_temperature_text"]
            assert mean.tolist() == pytest.approx(metrics, rel=1e-6)
            assert step > 0 or mean.tolist() == pytest.approx([want, want], rel=1e-6)
    assert (table(objective)[2:4, :B] == 0.01).all()


@pytest.mark.parametrize("temperature", ["global", "constant"])
def test_in_eval_mode_an_old_normalizer_does_not_overflow_and_what_is_capped_is_counted(temperature):
    objective, hot, ids = make(temperature), torch.eye(8)[:3], torch.arange(3)
    objective(hot, hot, torch.tensor(200.0), sample_ids=ids)  # normalizers at the floor
    assert objective.metrics["share_at_eps"] == 1
    image, text = hot.clone().requires_grad_(), (-hot).clone().requires_grad_()  # and now exp(200)
    loss = objective.eval()(image, text, torch.tensor(200.0), sample_ids=ids)
    loss.backward()
    assert all(torch.isfinite(x).all() for x in (loss, image.grad, text.grad))
    assert objective.metrics["capped"] == 6


def test_the_constant_temperature_is_in_the_graph_with_gradient_zero():
    for temperature in ("constant", "individual"):
        scale = number(10.0)
        make(temperature)(*batch(0), scale, sample_ids=torch.tensor(VISITS[0])).backward()
        assert scale.grad is not None and scale.grad == 0
