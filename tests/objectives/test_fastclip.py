"""Oracle 4 and more: FastCLIP's variants against linear-space moving averages in plain Python and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from neuclip.objectives.registry import build_objective
from torch import Tensor

from neuclip import CLIP, FastCLIP
from neuclip.evaluation.normalizer_error import normalizer_error
from neuclip.objectives.objective import NoEstimate
from neuclip.settings.objectives import FastCLIPSettings
from tests.objectives.features import CORNERS, close, corner, unit

N, B, D, EPS, RHO = 11, 6, 5, 1e-6, 6.5
# New samples, old ones, and from the third batch on a sample twice in one batch.
VISITS = [[0, 1, 2, 3, 4, 5], [3, 4, 6, 0, 7, 8], [9, 9, 1, 6, 2, 0], [5, 8, 5, 4, 3, 9], [0, 1, 0, 3, 0, 10]]
VARIANTS = ["v0", "v1", "v2", "v3", "sogclr", "isogclr"]


def batch(step: int) -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=2 * step).requires_grad_(), unit(B, D, seed=2 * step + 1).requires_grad_()


def scale_of(tau: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(1 / tau, dtype=dtype, requires_grad=True)


class Temperature:
    """One sample's temperature of one side, moved by torch's own Adam (v2) or by hand (isogclr)."""

    def __init__(self, variant: str):
        self.value = torch.tensor({"v2": 0.03, "isogclr": 0.01}[variant], dtype=torch.float64, requires_grad=True)
        self.limits = {"v2": (0.01, 1.0), "isogclr": (0.005, 0.05)}[variant]
        self.adam = torch.optim.Adam([self.value], lr=0.0133) if variant == "v2" else None
        self.momentum = 0.0

    def step(self, gradient: float) -> None:
        with torch.no_grad():
            if self.adam:
                self.value.grad = torch.tensor(max(-5.0, min(5.0, gradient)), dtype=torch.float64)
                self.adam.step()
            else:
                self.momentum = 0.1 * self.momentum + 0.9 * gradient
                self.value -= 0.01 * self.momentum
            self.value.clamp_(*self.limits)


class Reference:
    """Section 2.3 and 2.4 of the specification row by row: u in linear space, gradients by autograd."""

    def __init__(self, variant: str, gamma: float, doubled: bool = False):
        self.variant, self.gamma, self.doubled = variant, gamma, doubled
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
            if self.variant in ("v2", "isogclr"):
                self.move(side, ids, g, taus)
        return value, through

    def row(self, ratio: Tensor, log_u: float, own: Tensor, tau: Tensor) -> tuple[float, Tensor]:
        if self.variant == "v0":
            return log_u, ratio
        if self.variant == "v3":
            return tau.item() * (log_u + RHO), tau * (log_u + RHO) + tau.detach() * ratio
        if self.variant in ("v2", "isogclr"):
            return own.item() * (log_u + RHO), own.detach() * ratio
        return tau.item() * log_u, tau.detach() * ratio

    def tau_of(self, side: int, sample: int, tau: Tensor) -> Tensor:
        if self.variant in ("v2", "isogclr"):
            kept = self.temperatures.setdefault((side, sample), Temperature(self.variant))
            return kept.value.detach().clone().requires_grad_()
        if self.variant in ("v1", "sogclr"):
            return tau.detach()
        return 2 * tau - tau.detach() if self.doubled else tau

    @staticmethod
    def normalizer(s: Tensor, i: int, tau: Tensor, ids: list[int]) -> Tensor:
        others = [torch.exp((s[i, j] - s[i, i]) / tau) for j in range(len(ids)) if ids[j] != ids[i]]
        return torch.stack(others).mean()

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


def make(variant: str = "v3", gamma: float = 0.3, **changes) -> FastCLIP:
    settings = {"gamma_schedule": "constant", "eps": EPS, "rho": RHO} | changes
    return FastCLIP(N, variant=variant, gamma=gamma, **settings)


@pytest.mark.parametrize(
    ("variant", "temperature_gradient"), [*((v, "paper") for v in VARIANTS), ("v0", "fastclip"), ("v3", "fastclip")]
)
@pytest.mark.parametrize(("gamma", "tau"), [(0.3, 0.07), (0.9, 0.5)])
def test_five_steps_of_each_variant_equal_the_reference(variant, gamma, tau, temperature_gradient):
    objective = make(variant, gamma, temperature_gradient=temperature_gradient)
    reference = Reference(variant, gamma, doubled=temperature_gradient == "fastclip")
    for step, ids in enumerate(VISITS):
        image, text = batch(step)
        scale = scale_of(tau)
        got = objective(image, text, scale, sample_ids=torch.tensor(ids))
        value, through = reference.loss(image, text, 1 / scale, ids)
        assert got.item() == pytest.approx(value, rel=1e-11)
        wanted = torch.autograd.grad(through, [image, text, scale], allow_unused=True)
        for mine, want in zip(torch.autograd.grad(got, [image, text, scale]), wanted, strict=True):
            assert close(mine, torch.zeros(()) if want is None else want, 1e-11)
    state = objective.state_dict()
    # Where exponents reach 80, each move of an individual temperature multiplies rounding by as much.
    tolerance = 1e-8 if objective.individual else 1e-11
    for (side, sample), u in reference.u.items():
        name = ("image", "text")[side]
        assert math.exp(state[f"table.log_u_{name}"][sample]) == pytest.approx(u, rel=tolerance)
        if objective.individual:
            want = reference.temperatures[side, sample].value.item()
            assert state[f"table.temperature_{name}"][sample].item() == pytest.approx(want, rel=tolerance)


@pytest.mark.parametrize("eps", [0.0, 1e-14, 1e-6, 1e-2])
@pytest.mark.parametrize("tau", [0.01, 0.07, 0.5])
def test_with_gamma_one_it_is_the_minibatch_form(eps, tau):
    objective, plain = make(gamma=1.0, eps=eps), CLIP(form="minibatch", eps=eps, rho=RHO)
    for step, ids in enumerate(VISITS[:2]):
        image, text = batch(step)
        scale = scale_of(tau)
        got, want = (f(image, text, scale, sample_ids=torch.tensor(ids)) for f in (objective, plain))
        assert close(got, want, 1e-12)
        pairs = zip(*(torch.autograd.grad(x, [image, text, scale]) for x in (got, want)), strict=True)
        assert all(close(a, b, 1e-11) for a, b in pairs)


def test_the_fastclip_temperature_gradient_counts_the_part_through_g_once_more():
    gradients, parts = {}, []
    for mode in ("paper", "fastclip"):
        objective = make(temperature_gradient=mode)
        for step, ids in enumerate(VISITS):
            image, text = batch(step)
            scale = scale_of(0.07)
            loss = objective(image, text, scale, sample_ids=torch.tensor(ids))
        gradients[mode] = torch.autograd.grad(loss, [image, text, scale])
        u = [column[torch.tensor(VISITS[-1])].exp() for column in list(objective.state_dict().values())[-2:]]
    tau = torch.tensor(0.07, dtype=torch.float64, requires_grad=True)
    for s, u_side in ((image @ text.T, u[0]), (text @ image.T, u[1])):
        others = torch.tensor(VISITS[-1])[:, None] != torch.tensor(VISITS[-1])[None, :]
        g = (torch.exp((s.detach() - s.detach().diagonal()[:, None]) / tau) * others).sum(1) / others.sum(1)
        parts.append((g / u_side).mean())
    (slope,) = torch.autograd.grad(sum(parts), tau)
    once = 0.07 * slope * -(0.07**2)  # tau = 1 / scale
    assert close(gradients["fastclip"][2] - gradients["paper"][2], once, 1e-11)
    assert all(torch.equal(a, b) for a, b in zip(gradients["fastclip"][:2], gradients["paper"][:2], strict=True))


@pytest.mark.parametrize(
    ("schedule", "decay", "want"),
    [
        ("constant", 40, [0.2] * 6),
        ("cosine", 40, [1.0, 1.0, None, None, None, 0.2]),
        ("staircase", 40, [1.0, 1.0, None, None, None, 0.2]),
        ("cosine", None, [1.0, 1.0, 0.2, 0.2, 0.2, 0.2]),
    ],
)
def test_gamma_falls_from_one_after_the_first_pass_to_its_last_value(schedule, decay, want):
    objective = FastCLIP(10, gamma=0.2, gamma_schedule=schedule, gamma_decay_samples=decay)
    for seen, expected in zip((0, 9, 10, 17, 39, 40), want, strict=True):
        objective.samples_seen = seen
        if expected is None:
            place = seen // 10 * 10 if schedule == "staircase" else seen
            expected = 0.2 + 0.8 * (1 + math.cos(math.pi * place / 40)) / 2
        assert objective.gamma_now() == pytest.approx(expected)


def test_each_step_counts_its_samples_and_uses_the_gamma_of_the_moment():
    objective = FastCLIP(B, gamma=0.2, gamma_decay_samples=4 * B)
    for step, want in enumerate([1.0, 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, 0.6]):
        objective(*batch(step), scale_of(0.1), sample_ids=torch.arange(B))
        assert objective.metrics["gamma"] == pytest.approx(want)
    assert objective.samples_seen == 3 * B


@pytest.mark.parametrize(("correction", "want"), [("visits", 0.03 + 8 * 0.0133), ("epochs", 0.0603)])
def test_bias_correction_by_epochs_slows_individual_temperatures_after_the_first_epoch(correction, want):
    """A constant gradient, by a rho that pushes it to its cap. By epochs, the step of epoch e > 0 is the rate times
    sqrt(1 - 0.999^(e+1)) / (1 - 0.9^(e+1)), as in the authors' code."""
    objective = FastCLIP(B, variant="v2", rho=-100.0, temperature_correction=correction)
    for step in range(8):
        objective(*batch(step), scale_of(0.1), sample_ids=torch.arange(B))
    assert objective.metrics["mean_temperature_image"] == pytest.approx(want, abs=1e-4)
    assert objective.metrics["mean_temperature_text"] == pytest.approx(want, abs=1e-4)


def test_the_trainer_lets_gamma_fall_over_half_the_run_unless_told():
    known = {"embed_dim": D, "dataset_size": 7, "total_samples": 100}
    built = build_objective("fastclip", FastCLIPSettings(), **known)
    assert (built.dataset_size, built.gamma_decay_samples) == (7, 50)
    assert build_objective("fastclip", FastCLIPSettings(gamma_decay_samples=30), **known).gamma_decay_samples == 30
    assert build_objective("fastclip", FastCLIPSettings(variant="sogclr"), **known).gamma_schedule == "constant"


@pytest.mark.parametrize("variant", ["v3", "v2"])
def test_eval_mode_writes_nothing_and_uses_the_batch_for_samples_it_does_not_know(variant):
    objective = make(variant)
    objective(*batch(0), scale_of(0.1), sample_ids=torch.tensor(VISITS[0]))
    before = objective.state_dict()
    objective.eval()
    ids = torch.tensor(VISITS[1])  # half of them new
    image, text = batch(1)
    loss = objective(image, text, scale_of(0.1), sample_ids=ids)
    if variant == "v3":
        s = (image @ text.T).detach()
        own = [torch.exp((x - x.diagonal()[:, None]) / 0.1).fill_diagonal_(0).sum(1) / (B - 1) for x in (s, s.T)]
        logs = [before[f"table.log_u_{side}"][ids] for side in ("image", "text")]
        used = [torch.where(u.isnan(), (EPS + g).log(), u) for u, g in zip(logs, own, strict=True)]
        assert loss.item() == pytest.approx(0.1 * (used[0].mean() + used[1].mean() + 2 * RHO).item(), rel=1e-11)
        objective.log_normalizers(image, text, scale_of(0.1), sample_ids=ids)
    after = objective.state_dict()
    assert all(torch.equal(before[key].nan_to_num(), after[key].nan_to_num()) for key in before if "table" in key)
    assert objective.samples_seen == B


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("in_file", [False, True])
def test_saved_it_continues_to_the_bit(variant, in_file, tmp_path):
    def steps(objective: FastCLIP, which: range) -> list[float]:
        return [
            objective(*(x.float() for x in batch(k)), torch.tensor(14.0), sample_ids=torch.tensor(VISITS[k])).item()
            for k in which
        ]

    settings = {"gamma_schedule": "cosine", "gamma_decay_samples": 50}
    want = steps(make(variant, **settings), range(5))
    first = make(variant, **settings)
    got = steps(first, range(2))
    second = make(variant, table_path=str(tmp_path / "table") if in_file else None, **settings)
    second.load_state_dict(first.state_dict())
    assert got + steps(second, range(2, 5)) == want


def test_estimates_are_what_is_stored_and_not_a_number_where_never_visited():
    objective = make()
    image, text = batch(0)
    ids = torch.tensor([2, 9, 0, 10, 4, 6])
    with pytest.raises(NoEstimate, match="visited no sample yet"):
        objective.log_normalizers(image, text, scale_of(0.1), sample_ids=ids)
    objective(image, text, scale_of(0.1), sample_ids=torch.tensor(VISITS[0]))
    found = objective.log_normalizers(image, text, scale_of(0.3), sample_ids=ids)
    for side, got in zip(("image", "text"), found, strict=True):
        want = objective.state_dict()[f"table.log_u_{side}"][ids]
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got[~got.isnan()], want[~want.isnan()])
        assert got.isnan().tolist() == [False, True, False, True, False, True]


def test_normalizer_error_counts_samples_never_visited_and_does_without_any_estimate():
    image, text, objective = unit(N, D, seed=1), unit(N, D, seed=2), make()
    asked = {"logit_scale": 10.0, "eps": EPS, "batch_size": 6, "anchors": N, "seed": 0, "caption_of": torch.arange(N)}
    objective(image[:4], text[:4], torch.tensor(10.0), sample_ids=torch.arange(4))
    found = normalizer_error(image, text, objective=objective, **asked)
    assert found["estimators"]["method"]["without_estimate"] == N - 4
    fewer = asked | {"anchors": 1, "sample_ids": torch.full((N,), 10)}
    nothing = normalizer_error(image, text, objective=objective, **fewer)
    assert "method" not in nothing["estimators"] and "no estimate yet" in nothing["method_note"]
    individual = normalizer_error(image, text, objective=make("v2"), **asked)
    assert "a temperature of its own" in individual["method_note"]


def test_without_ids_it_says_what_to_pass():
    with pytest.raises(ValueError, match="pass sample_ids"):
        make()(*batch(0), scale_of(0.1))


def test_an_id_outside_the_data_set_is_refused_and_writes_nothing():
    objective = make()
    with pytest.raises(ValueError, match=r"sample id 11 is outside 0\.\.10, for dataset_size=11"):
        objective(*batch(0), scale_of(0.1), sample_ids=torch.tensor([0, 1, 11, 3, 4, -5]))
    assert objective.samples_seen == 0 and objective.state_dict()["table.log_u_image"].isnan().all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="variant is 'v4'; choose v0, v1, v2, v3, sogclr or isogclr"):
        FastCLIP(3, variant="v4")
    with pytest.raises(ValueError, match="dataset_size is 0"):
        FastCLIP(0)
    with pytest.raises(ValueError, match=r"temperature_initial 0\.5 is not within"):
        FastCLIP(3, variant="isogclr", temperature_initial=0.5)
    for wrong in ({"gamma": 0.0}, {"gamma": 1.5}, {"temperature_range": (0.0, 1.0)}):
        with pytest.raises(ValueError, match=f"objective.{next(iter(wrong))} is"):
            FastCLIPSettings(**wrong)


def test_individual_temperatures_obey_their_arguments():
    objective = make("v2", temperature_initial=0.2, temperature_lr=0.05, temperature_range=(0.18, 0.3))
    objective(*batch(0), scale_of(0.1), sample_ids=torch.tensor(VISITS[0]))
    moved = objective.state_dict()["table.temperature_image"][:B]
    assert all(x == pytest.approx(0.18) or x == pytest.approx(0.25) for x in moved.tolist())  # Adam's first step is lr
    assert objective.metrics["temperatures_at_limit"] > 0


def test_capped_gradients_of_individual_temperatures_are_counted():
    for variant, rho, want in (("v2", 100.0, 1.0), ("v2", 0.0, 0.0), ("isogclr", 100.0, 0.0)):
        objective = make(variant, rho=rho, temperature_initial=0.05)
        text = unit(1, D, seed=0).expand(B, D)  # all equal: g = 1, the gradient is rho
        objective(text, text, scale_of(0.1), sample_ids=torch.tensor(VISITS[0]))
        assert objective.metrics["temperature_gradients_capped"] == want


def test_state_of_another_variant_is_refused():
    with pytest.raises(ValueError, match="temperature_image"):
        make("v3").load_state_dict(make("v2").state_dict())


def test_no_outer_optimizer_can_find_the_table_and_it_stays_on_the_host():
    objective = make("v2")
    assert list(objective.parameters()) == []
    objective.to("meta")
    objective(*batch(0), scale_of(0.1), sample_ids=torch.tensor(VISITS[0]))
    assert objective.table.read(torch.tensor([0])).device.type == "cpu"


def test_metrics_tell_calibration_before_the_update_of_the_samples_known():
    objective = make()
    objective(*batch(0), scale_of(0.1), sample_ids=torch.tensor(VISITS[0]))
    assert objective.metrics["calibration"] is None and objective.metrics["unvisited"] == 1.0
    image, text = batch(1)
    ids = torch.tensor(VISITS[1])
    stored = [objective.state_dict()[f"table.log_u_{side}"][ids] for side in ("image", "text")]
    batch_says = CLIP(eps=EPS).log_normalizers(image, text, scale_of(0.1), sample_ids=ids)
    objective(image, text, scale_of(0.1), sample_ids=ids)
    ratios = [torch.exp(l - u).nanmean() for l, u in zip(batch_says, stored, strict=True)]
    assert objective.metrics["calibration"] == pytest.approx((sum(ratios) / 2).item(), rel=1e-6)
    assert objective.metrics["unvisited"] == pytest.approx(3 / 6)
    assert objective.metrics["capped"] == 0


@pytest.mark.parametrize("variant", ["v0", "v1", "v2", "v3", "isogclr"])
@pytest.mark.parametrize("tau", [0.005, 0.01, 1.0])
@pytest.mark.parametrize("kind", [*CORNERS, "changing"])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_loss_and_gradients_are_finite_for_every_temperature_and_any_unit_features(variant, tau, kind, size):
    objective = make(variant, gamma=0.01)
    for step in range(4):
        if step == 3:
            objective.eval()
        names = ["one-hot", "opposite", "one-hot", "opposite"] if kind == "changing" else [kind] * 4
        image, text = (x.clone().requires_grad_() for x in corner(names[step], size))
        scale = scale_of(tau, torch.float32)
        loss = objective(image, text, scale, sample_ids=torch.arange(size))
        loss.backward()
        assert all(torch.isfinite(x).all() for x in (loss, image.grad, text.grad, scale.grad))
        stored = objective.table.read(torch.arange(size))
        assert stored.dtype == torch.float32 and torch.isfinite(stored).all()


@pytest.mark.parametrize("variant", ["v0", "v3", "sogclr"])
def test_in_eval_mode_an_old_normalizer_does_not_overflow_and_what_is_capped_is_counted(variant):
    objective, hot, ids = make(variant), torch.eye(8)[:3], torch.arange(3)
    objective(hot, hot, torch.tensor(200.0), sample_ids=ids)  # normalizers at the floor
    objective.eval()
    image, text = hot.clone().requires_grad_(), (-hot).clone().requires_grad_()  # and now exp(200)
    scale = scale_of(0.005, torch.float32)
    loss = objective(image, text, scale, sample_ids=ids)
    loss.backward()
    assert all(torch.isfinite(x).all() for x in (loss, image.grad, text.grad, scale.grad))
    assert objective.metrics["capped"] == 6


def test_the_order_of_the_batch_does_not_matter():
    def run(permutation: Tensor) -> tuple[float, dict[str, Tensor]]:
        objective = make("v2")
        for step, ids in enumerate(VISITS):
            image, text = batch(step)
            loss = objective(
                image[permutation], text[permutation], scale_of(0.1), sample_ids=torch.tensor(ids)[permutation]
            )
        return loss.item(), objective.state_dict()

    (one, state), (other, shuffled) = run(torch.arange(B)), run(torch.tensor([4, 2, 0, 5, 1, 3]))
    assert one == pytest.approx(other, rel=1e-10)
    assert all(torch.allclose(x, shuffled[key], rtol=1e-9) for key, x in state.items() if isinstance(x, Tensor))


def test_under_bf16_autocast_the_objective_computes_in_float32():
    def run() -> Tensor:
        image, text = (x.detach().float() for x in batch(0))
        return make()(image, text, torch.tensor(100.0), sample_ids=torch.tensor(VISITS[0]))

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run().dtype == torch.float32 and torch.equal(run(), plain)


def test_masked_duplicates_are_left_out_of_the_moving_average():
    image, text = (x.detach() for x in batch(0))
    ids, captions = torch.tensor(VISITS[0]), torch.tensor([7, 8, 7, 9, 10, 11])
    stored = {}
    for mask in (False, True):
        objective = make(mask_duplicates=mask)
        objective(image, text, scale_of(0.1), sample_ids=ids, caption_ids=captions)
        stored[mask] = objective.state_dict()["table.log_u_image"]
    s = image @ text.T
    others = [1, 3, 4, 5]  # neither sample 0 itself nor sample 2 with the same caption
    want = math.log(EPS + torch.exp((s[0, others] - s[0, 0]) / 0.1).mean().item())
    assert stored[True][0].item() == pytest.approx(want, rel=1e-11)
    assert stored[False][0].item() != pytest.approx(want, rel=1e-3)
    assert torch.equal(stored[False][3:6], stored[True][3:6])


def test_the_constant_temperature_is_in_the_graph_with_gradient_zero():
    for variant in ("v1", "v2", "sogclr", "isogclr"):
        scale = scale_of(0.1)
        make(variant)(*batch(0), scale, sample_ids=torch.tensor(VISITS[0])).backward()
        assert scale.grad is not None and scale.grad == 0
