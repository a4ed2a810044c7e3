"""The normalizer error: how far a method's normalizers are from the exact ones over the whole data set (the paper's
estimation error).

Shapes: A anchors, n pairs, embedding dimension d. s_ij is the similarity of anchor i and candidate j.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from neuclip.distributed.collectives import all_gather_object, gather_shares, is_main, local_range
from neuclip.distributed.ranks import on_main_rank, sync_errors
from neuclip.errors import RunFailed, UserError
from neuclip.evaluation.embedding import check_finite
from neuclip.objectives.objective import NoEstimate
from neuclip.progress import track

Both = tuple[Tensor, Tensor]  # image side, text side


def normalizer_error(
    image_features: Tensor,
    text_features: Tensor,
    *,
    logit_scale: Tensor | float,
    eps: float,
    objective: Any,
    batch_size: int,
    anchors: int,
    seed: int,
    caption_of: Tensor,
    sample_ids: Tensor | None = None,
    dataset_size: int | None = None,
) -> dict[str, Any]:  # (n, d), (n, d), (n,), (n,)
    """The mean squared error of log-normalizers on `anchors` random pairs, for the method and for a mini-batch.

    Both estimators are given the same anchors in the same random batches. Anchors for which the method returns NaN
    (FastCLIP: never visited) are left out of its mean and counted as `without_estimate`.

    Collective: every rank passes the same features, computes the exact normalizers of its share of the anchors, and
    gets the result. Only the main rank calls the objective; the others may pass None.

    Args:
        image_features, text_features: unit rows; row i of both is one pair of the training set.
        eps: for the exact normalizers and both estimates.
        objective: its `log_normalizers` are measured; if it has none, "method" is missing and "method_note" says why.
        caption_of: the number of each row's caption, equal for equal captions. A second mean leaves out the anchors
            whose caption occurs more than once.
        sample_ids: the id of each row's sample; default: the row's number. Anchors are drawn by these ids, so that all
            models on the same data are measured at the same anchors.
        dataset_size: the number of ids; default: the largest id + 1.
    """
    _check(image_features, text_features, batch_size, eps)
    size, tau = len(image_features), 1 / float(logit_scale)
    sample_ids = torch.arange(size) if sample_ids is None else sample_ids
    drawn = draw_rows(sample_ids, dataset_size or int(sample_ids.max()) + 1, seed)
    index = drawn[:anchors]
    truth = _exact_over_ranks(image_features, text_features, index, tau=tau, eps=eps)
    scale = torch.as_tensor(logit_scale)

    def estimate_by_batch(batch: Tensor, rows: Tensor) -> Both:
        return both_log_normalizers(image_features[batch], text_features[batch], rows, tau=tau, eps=eps)

    def estimate_by_method(batch: Tensor, rows: Tensor) -> Both:
        # The method gets batches of the run's size, as in training, because CLIP's estimate depends on them.
        image, text, ids = (values[batch].to(scale.device) for values in (image_features, text_features, sample_ids))
        image, text = objective.log_normalizers(image, text, scale, sample_ids=ids, eps=eps)
        return image.cpu()[rows], text.cpu()[rows]

    def score() -> dict[str, Any]:
        repeated = (torch.bincount(caption_of)[caption_of] > 1).cpu()[index]
        result: dict[str, Any] = {"eps": eps, "temperature": tau, **_facts(truth, eps, repeated), "estimators": {}}
        batches = list(windows(drawn, anchors=len(index), batch_size=min(batch_size, size)))
        try:
            result["estimators"]["method"] = squared_errors(in_batches(estimate_by_method, batches), truth, repeated)
        except NoEstimate as reason:  # the method has no normalizer, or has stored none yet
            result["method_note"] = str(reason)
        result["estimators"]["minibatch"] = squared_errors(in_batches(estimate_by_batch, batches), truth, repeated)
        return result

    return cast("dict[str, Any]", all_gather_object(on_main_rank(score))[0])


def _facts(truth: Both, eps: float, repeated: Tensor) -> dict[str, Any]:
    """Statistics of the anchors that are needed to interpret the errors."""
    near_floor = torch.cat(truth) < (math.log(eps) + 1 if eps else -math.inf)
    return {
        "anchors": len(repeated),
        "duplicates": int(repeated.sum()),
        "share_at_floor": near_floor.double().mean().item(),
    }


def draw_rows(sample_ids: Tensor, dataset_size: int, seed: int) -> Tensor:  # (n,) -> (n,)
    """All rows in a random order that depends only on the seed and the rows' ids: if rows are missing, the others keep
    their order."""
    order = torch.randperm(dataset_size, generator=torch.Generator().manual_seed(seed))
    position = torch.argsort(order)
    return torch.argsort(position[sample_ids], stable=True)


def windows(drawn: Tensor, *, anchors: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive full batches of `drawn` that cover its first `anchors` entries. Each comes with the positions in the
    batch of the anchors that earlier batches did not cover. If too few pairs are left, the last batch overlaps the one
    before."""
    for start in range(0, anchors, batch_size):
        first = min(start, len(drawn) - batch_size)
        yield drawn[first : first + batch_size], torch.arange(start, min(start + batch_size, anchors)) - first


def in_batches(estimate: Callable[[Tensor, Tensor], Both], batches: Iterable[tuple[Tensor, Tensor]]) -> Both:
    """The estimates for all anchors, (A,) for each side. `estimate` gets the pairs of a batch and the positions of its
    anchors."""
    image, text = zip(*(estimate(batch, rows) for batch, rows in batches), strict=True)
    return torch.cat(image), torch.cat(text)


def squared_errors(
    estimate: Both, truth: Both, repeated: Tensor
) -> dict[str, float | int | None]:  # (A,) x 2, (A,) x 2, (A,) bool
    """The mean squared error of each side, their mean, and the mean over anchors with unique captions (None if there
    are none)."""
    if any(side.isinf().any() for side in estimate):
        raise RunFailed("the estimated log-normalizers are infinite for some anchors; use an eps above 0")
    errors = torch.stack([(a.double() - b.double()).square() for a, b in zip(estimate, truth, strict=True)])  # (2, A)
    known = ~errors.isnan().any(dim=0)
    if not known.any():
        raise NoEstimate("the method has no estimate yet for any of the anchors")
    image, text = errors[:, known].mean(dim=1).tolist()
    unique = errors[:, known & ~repeated]
    return {
        "image": image,
        "text": text,
        "mean": (image + text) / 2,
        "mean_without_duplicates": unique.mean().item() if unique.numel() else None,
        "without_estimate": int((~known).sum()),
    }


def _exact_over_ranks(
    image_features: Tensor, text_features: Tensor, index: Tensor, *, tau: float, eps: float
) -> Both:  # (n, d), (n, d), (A,) -> (A,), (A,)
    """Collective. Like `both_log_normalizers`, but every rank computes a share of the anchors and returns all."""
    share = local_range(len(index))
    with sync_errors():
        local = both_log_normalizers(
            image_features, text_features, index[share.start : share.stop], tau=tau, eps=eps, what="exact normalizers"
        )
    image, text = gather_shares(torch.stack(local, dim=1), len(index)).unbind(dim=1)
    return image, text


def both_log_normalizers(
    image_features: Tensor, text_features: Tensor, index: Tensor, *, tau: float, eps: float, what: str = ""
) -> Both:  # (n, d), (n, d), (A,) -> (A,), (A,)
    """The exact log-normalizers of the pairs `index` among all n pairs, image side and text side. `what` is the label
    of the progress line; "" shows none."""
    image, text = image_features[index], text_features[index]
    positives = (image * text).sum(dim=1)
    images, texts = (f"{what} of {side}" if what and is_main() else "" for side in ("images", "texts"))
    return (
        exact_log_normalizers(image, positives, text_features, index, tau=tau, eps=eps, what=images),
        exact_log_normalizers(text, positives, image_features, index, tau=tau, eps=eps, what=texts),
    )


@torch.no_grad()
def exact_log_normalizers(
    anchors: Tensor,
    positives: Tensor,
    candidates: Tensor,
    anchor_index: Tensor,
    *,
    tau: float,
    eps: float,
    chunk_rows: int = 512,
    chunk_columns: int = 2048,
    what: str = "",
) -> Tensor:  # (A, d), (A,), (n, d), (A,) -> (A,)
    """log(eps + 1/(n-1) sum_{j != i} exp((s_ij - s_ii) / tau)), where candidate anchor_index[i] is anchor i's positive.

    The positive is left out by its index, not by its value: an equal caption in another pair counts. The sum is
    computed in blocks that fit into the CPU's cache, in the dtype of the features. Up to rounding, the result does not
    depend on the blocks.
    """
    size = len(candidates)
    if size < 2 or not len(anchors):
        return torch.full_like(positives, math.log(eps) if eps else -math.inf)
    # Powers of two instead of e: exp2 costs 0.2 of the matrix product at d = 128, exp 0.34 (one thread, AVX2).
    scaled = anchors * (math.log2(math.e) / tau)
    positive_column = anchor_index.to(anchors.device)
    peak, total = torch.zeros_like(positives), torch.zeros_like(positives)
    bounded = _fits_without_maximum(anchors, candidates, tau)
    if not bounded:
        peak.fill_(torch.finfo(peak.dtype).min)
    buffer = anchors.new_empty(min(chunk_rows, len(anchors)) * min(chunk_columns, size))
    starts = range(0, size, chunk_columns)
    for left in track(starts, what, len(starts), "chunks") if what else starts:
        columns = candidates[left : left + chunk_columns].to(anchors.device).T
        for top in range(0, len(anchors), chunk_rows):
            rows = slice(top, top + chunk_rows)
            block = buffer[: len(scaled[rows]) * columns.shape[1]].view(-1, columns.shape[1])
            torch.mm(scaled[rows], columns, out=block)
            column = positive_column[rows] - left
            inside = ((column >= 0) & (column < columns.shape[1])).nonzero()[:, 0]
            block[inside, column[inside]] = -math.inf
            _add_block(block, peak[rows], total[rows], bounded)
    log_mean = (peak + total.log2()) * math.log(2) - positives / tau - math.log(size - 1)
    return torch.logaddexp(log_mean, log_mean.new_tensor(math.log(eps) if eps else -math.inf))


def _fits_without_maximum(anchors: Tensor, candidates: Tensor, tau: float) -> bool:
    """Whether sums of exp(s / tau) neither overflow nor underflow: then there is no need to subtract the maximum."""
    largest = anchors.norm(dim=1).max() * candidates.norm(dim=1).max()
    limit = 0.8 * math.log(torch.finfo(anchors.dtype).max)  # 20 % headroom for the sum over n
    return float(largest) / tau < limit


def _add_block(block: Tensor, peak: Tensor, total: Tensor, bounded: bool) -> None:  # (b, k), (b,), (b,); in place
    """Add the sum of 2^block to total * 2^peak, row by row. Overwrites `block`."""
    if bounded:
        total += block.exp2_().sum(dim=1)
        return
    higher = torch.maximum(peak, block.amax(dim=1))  # finite even if the block contains only the positive
    total *= torch.exp2(peak - higher)
    total += block.sub_(higher[:, None]).exp2_().sum(dim=1)
    peak.copy_(higher)


def _check(image_features: Tensor, text_features: Tensor, batch_size: int, eps: float) -> None:
    if len(image_features) < 2 or image_features.shape != text_features.shape:
        raise UserError(
            f"normalizer error: features {tuple(image_features.shape)} and {tuple(text_features.shape)}; "
            "give two or more pairs, one row of each per pair"
        )
    if batch_size < 2 and not eps:
        raise UserError("normalizer error: a batch of 1 with eps 0 has no normalizer; give an eps above 0")
    check_finite(image_features, "image features")
    check_finite(text_features, "text features")
