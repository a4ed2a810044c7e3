"""What the settings of every objective have in common: the facts that need no torch, and formulas that methods share.

Report, doctor and command line ask an objective's settings what they must know of it, and never its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from neuclip.errors import UserError
from neuclip.settings.fields import check_choices, described

if TYPE_CHECKING:
    from neuclip.settings.sections import OptimizerSettings

FLOAT = 4  # bytes
BLOCKS = 6  # (b, B) matrices that a loss has in memory at a time, about


class PlannedRun(NamedTuple):
    """What a method's advice depends on."""

    batch_size: int
    steps: int
    pairs: int  # of the data set
    pairs_per_epoch: int  # another number where sources have weights

    @property
    def samples(self) -> int:
        return self.steps * self.batch_size


Advice = tuple[str, str, str]  # what, why it matters, remedy


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What every method has. A new one subclasses it and overrides the facts in which it differs."""

    title: ClassVar[str]  # its name in reports
    predicts_normalizers: ClassVar[bool] = True  # whether there is a calibration
    uses_bias: ClassVar[bool] = False  # whether the model needs a logit bias
    model_fields: ClassVar[tuple[str, ...]] = ()  # fields that the model is built with, not the objective

    mask_duplicates: bool = described(False, "pairs with an equal caption are no negatives of each other")

    eps = 1e-6  # for `normalizer_eps`; a method with a field of this name overrides it

    def __post_init__(self) -> None:
        check_choices(self, "objective")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """The checked settings of a constructor that was called with `arguments`, its `locals()`.

        Names that are no fields are ignored, and None leaves a field at its default.
        """
        names = {field.name for field in fields(cls)}
        try:
            return cls(**{name: x for name, x in arguments.items() if name in names and x is not None})
        except UserError as error:
            raise UserError(str(error).removeprefix("objective.")) from None

    def with_defaults_of(self, optimizer: OptimizerSettings) -> Self:
        """With the values of the encoders' AdamW wherever the method's own optimizer is meant to have the same."""
        return self

    @property
    def normalizer_eps(self) -> float:
        """The eps with which the normalizer error is measured."""
        return self.eps

    @property
    def state_is_sharded(self) -> bool:
        """Whether each rank keeps a part of the state only."""
        return False

    def initial_bias(self, batch_size: int) -> float | None:
        """Where the model's logit bias starts; None: it has none."""
        return None

    def learns_temperature(self) -> Literal["yes", "no", "per sample"]:
        return "yes"

    def loss_at_chance(self, batch_size: int, temperature: float) -> float:
        """The loss where all similarities are equal, about that of untrained encoders."""
        return math.log(batch_size)

    def state_bytes(self, embed_dim: int, dataset_size: int) -> int:
        """What the method remembers, over all ranks."""
        return 0

    def working_bytes(self, batch_size: int, ranks: int, embed_dim: int) -> int:
        """What one step needs beside the state, on one rank."""
        return feature_bytes(batch_size, embed_dim) + BLOCKS * FLOAT * (batch_size // ranks) * batch_size

    def figures(self, run: PlannedRun) -> dict[str, float]:
        """What `neuclip doctor` notes under `objective`, beside what it notes for every method."""
        return {}

    def advice(self, run: PlannedRun) -> list[Advice]:
        """What `neuclip doctor` warns of."""
        return []


def robust_loss_at_chance(temperature: float, rho: float, eps: float) -> float:
    """Eq. 1 where every g is 1."""
    return 2 * temperature * (math.log1p(eps) + rho)


def softplus(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def feature_bytes(batch_size: int, embed_dim: int) -> int:
    """Both sides of the global batch, as they came and as they are computed with."""
    return 2 * 2 * FLOAT * batch_size * embed_dim


def mlp_weights(embed_dim: int, width: int) -> int:
    """Of the residual MLP: two matrices, their biases and norms, and the last layer."""
    return 2 * embed_dim * width + 3 * width + 4 * embed_dim + 1


def rho_figures(rho: float, candidates: int) -> dict[str, float]:
    return {"rho": rho, "largest_useful_rho": math.log(max(2, candidates - 1))}


def rho_advice(rho: float, candidates: int, where: str) -> list[Advice]:
    """rho bounds how far an anchor's weights may be from equal: their divergence ends at the log of their number."""
    others = max(2, candidates - 1)
    if rho <= math.log(others):
        return []
    return [
        (
            f"rho {rho:g} is above log({others:,}) = {math.log(others):.1f}",
            f"with {others:,} others in {where} the temperature can only fall",
            f"give --objective.rho {0.7 * math.log(others):.2g}",
        )
    ]
