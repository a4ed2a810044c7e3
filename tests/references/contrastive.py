"""Twins of Eq. 9 to 12 and of Algorithms 1 and 3, row by row in linear space, through autograd and torch.optim."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_mean_exp(exponents: list[float], eps: float) -> float:
    """log(eps + mean of exp), by Python's floats; without any exponent log(eps)."""
    mean = sum(math.exp(x) for x in exponents) / len(exponents) if exponents else 0.0
    return math.log(eps + mean)


def log_g(image: Tensor, text: Tensor, taus: Tensor, negatives: Tensor) -> Tensor:  # (b, d), (b, d), (2, b), (b, b)
    """Eq. 9 without eps, (2, b): the mean over the negatives of an anchor of exp((s_ij - s_ii) / tau_i)."""
    sides = []
    for s, tau in zip((image @ text.T, text @ image.T), taus, strict=True):
        excess = [(s[i] - s[i, i])[negatives[i]] / tau[i] for i in range(len(s))]
        sides.append(torch.stack([row.exp().mean().log() for row in excess]))
    return torch.stack(sides)


def predicted_log_g(image: Tensor, text: Tensor, rows: Tensor, tau: Tensor, candidates: Tensor) -> Tensor:
    """Eq. 10 and 11 without eps, (2, b): the mean over prototypes `rows` (2, m, d) that are candidates (b, m)."""
    positive, sides = (image * text).sum(dim=1), []
    for anchors, prototypes in zip((image, text), rows, strict=True):
        cosine = anchors @ (prototypes / prototypes.norm(dim=1, keepdim=True)).T
        excess = [(cosine[i] - positive[i])[candidates[i]] / tau for i in range(len(anchors))]
        sides.append(torch.stack([row.exp().mean().log() for row in excess]))
    return torch.stack(sides)


def unified_objective(
    image: Tensor,
    text: Tensor,
    rows: Tensor,  # (2, m, d)
    tau: Tensor,
    *,
    rho: float,
    eps: float,
    negatives: Tensor | None = None,  # (b, b)
    candidates: Tensor | None = None,  # (b, m)
    detach_alpha: bool = False,
) -> Tensor:
    """Eq. 12 with autograd throughout; overflows where the package must not."""
    normalizer, alpha = normalizers(image, text, rows, tau, eps, negatives, candidates)
    alpha = alpha.detach() if detach_alpha else alpha
    return tau * (torch.exp(-alpha) * normalizer + alpha).mean(dim=1).sum() + 2 * tau * (rho - 1)


def separate_objective(image: Tensor, text: Tensor, rows: Tensor, tau: Tensor, *, rho: float, eps: float) -> Tensor:
    """Half the mean squared difference of predicted and batch log-normalizers, both sides."""
    normalizer, alpha = normalizers(image, text, rows, tau, eps)
    return (alpha - normalizer.log()).square().mean(dim=1).sum() / 2


def normalizers(
    image: Tensor,
    text: Tensor,
    rows: Tensor,
    tau: Tensor,
    eps: float,
    negatives: Tensor | None = None,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """eps + g of the batch, and the predicted log of it."""
    negatives = ~torch.eye(len(image), dtype=torch.bool) if negatives is None else negatives
    candidates = torch.ones(len(image), rows.shape[1], dtype=torch.bool) if candidates is None else candidates
    g = log_g(image, text, tau.expand(2, len(image)), negatives).exp()
    return eps + g, torch.log(eps + predicted_log_g(image, text, rows, tau, candidates).exp())


class Algorithm1:
    """Algorithm 1 for up to B prototypes that all restart at once; with `simultaneous` Algorithm 3. `loss` is what the
    encoders differentiate."""

    def __init__(self, prototypes: int, *, restart_every: int, inner_steps: int, rate: float, rho: float, eps: float):
        self.prototypes, self.restart_every, self.inner_steps = prototypes, restart_every, inner_steps
        self.rate, self.rho, self.eps = rate, rho, eps
        self.steps = 0
        self.fit, self.simultaneous, self.detach_alpha = "unified", False, False
        self.rows = torch.nn.Parameter(torch.empty(0))
        self.optimizer: torch.optim.Optimizer

    def loss(self, image: Tensor, text: Tensor, tau: Tensor) -> Tensor:
        if self.steps == 0 or (self.restart_every and self.steps % self.restart_every == 0):
            self.restart(image.detach(), text.detach())
        self.steps += 1
        if not self.simultaneous:
            self.learn(image, text, tau, self.inner_steps)
        given = {"rho": self.rho, "eps": self.eps, "detach_alpha": self.detach_alpha}
        loss = unified_objective(image, text, self.rows.detach().clone(), tau, **given)
        if self.simultaneous:
            self.learn(image, text, tau, 1)
        return loss

    def restart(self, image: Tensor, text: Tensor) -> None:
        """Lines 3 and 4: texts are prototypes for images and the other way round; the optimizer remembers its sums."""
        evenly = [k * len(image) // self.prototypes for k in range(self.prototypes)]
        stored = torch.stack([text[evenly], image[evenly]])
        if self.steps:
            self.rows.data.copy_(stored)
            return
        self.rows = torch.nn.Parameter(stored)
        kind = torch.optim.Adam if self.simultaneous else torch.optim.Adagrad
        self.optimizer = kind([self.rows], self.rate)

    def learn(self, image: Tensor, text: Tensor, tau: Tensor, steps: int) -> None:
        """Lines 6 to 8."""
        objective = unified_objective if self.fit == "unified" else separate_objective
        for _ in range(steps):
            self.optimizer.zero_grad()
            objective(image.detach(), text.detach(), self.rows, tau.detach(), rho=self.rho, eps=self.eps).backward()
            self.optimizer.step()
