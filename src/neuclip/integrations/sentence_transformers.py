"""A loss for sentence-transformers: MultipleNegativesRankingLoss with normalizers over the whole data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip.integrations.text_pairs import TextPairs

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class NeuCLIPLoss(nn.Module):
    """For (anchor, positive) pairs, with any number of hard negatives: (anchor, positive, negative_1, ..., negative_k).

    >>> loss = NeuCLIPLoss(model)                                                                  # doctest: +SKIP
    >>> SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss).train()       # doctest: +SKIP

    Similarity is the cosine. The prototypes live in `loss.objective`; the trainer saves the model alone, so save
    `loss.objective.state_dict()` beside it to continue a run. Without it they fill again within num_prototypes / batch
    steps. On several ranks the pairs of all are candidates, and hard negatives serve their own query.

    Args:
        model: a SentenceTransformer.
        scale: 1 / temperature, fixed.
        directions: ("query_to_doc",), or ("query_to_doc", "doc_to_query") for the mean of both.
        num_prototypes, restart, inner_steps, network_lr, eps, settings: of `neuclip.NeuCLIP`, with defaults that suit
            batches of about 32. `rho` has no effect: it drives a temperature that learns.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        scale: float = 20.0,
        directions: Sequence[str] = ("query_to_doc",),
        num_prototypes: int = 1024,
        restart: str = "rolling",
        inner_steps: int = 3,
        network_lr: float = 0.01,
        eps: float = 1e-6,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise ValueError(f"scale is {scale}; give 1 / temperature, such as 20")
        self.model, self.scale, self.directions = model, scale, tuple(directions)
        self.settings = {
            **{"num_prototypes": num_prototypes, "restart": restart, "inner_steps": inner_steps},
            **{"network_lr": network_lr, "eps": eps, **settings},
        }
        embed_dim = model.get_embedding_dimension()
        if embed_dim is None:
            raise ValueError("the model does not know its embedding dimension; end it with a pooling or a dense module")
        self.objective = TextPairs(embed_dim, directions, **self.settings)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        columns = [F.normalize(self.model(column)["sentence_embedding"], dim=1) for column in sentence_features]
        if len(columns) < 2:
            raise ValueError("the data set has one text column; NeuCLIPLoss needs two or more: anchor, positive, ...")
        query, document, *negatives = columns
        self.objective.train(self.model.training)  # an evaluation must teach the prototypes nothing
        scale = query.new_tensor(self.scale, dtype=torch.float32)
        return self.objective(query, document, scale, torch.stack(negatives, dim=1) if negatives else None)

    def get_config_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "directions": self.directions, **self.settings}

    @property
    def temperature(self) -> float:
        return 1 / self.scale

    @property
    def citation(self) -> str:
        return """
@inproceedings{wei2026neuclip,
    title={NeuCLIP: Efficient Large-Scale CLIP Training with Neural Normalizer Optimization},
    author={Wei and Lin and Yang},
    booktitle={International Conference on Learning Representations},
    year={2026}
}
"""
