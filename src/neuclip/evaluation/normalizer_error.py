"""How far a method's normalizers are from the exact ones over the whole data set (the paper's estimation error).

A anchors, n pairs, d embedding, B the run's global batch. s_ij is the similarity of anchor i and candidate j.
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
    """Mean squared difference of log-normalizers on `anchors` seeded random pairs, for the method and for a mini-batch.

    Both estimators see the same anchors in the same random batches. Anchors for which the method answers not-a-number
    (FastCLIP: never visited) are left out of its mean and counted as `without_estimate`.

    Collective: every rank passes the same features, computes the exact normalizers of its share of the anchors, and
    gets the result. The main rank asks the objective; the others may pass None.

    Args:
        image_features, text_features: unit rows; row i of both is one pair of the training set.
        eps: of the exact normalizers and of both estimates.
        objective: its `log_normalizers` are measured; if it has none, "method" is missing and "method_note" says why.
        caption_of: equal for equal captions; anchors whose caption occurs again are also left out of a second mean.
        sample_ids: the data set's number of each row; default: the row. Anchors are drawn among these numbers, so that
            every model on the same data is measured at the same ones.
        dataset_size: how many numbers there are; default: up to the largest.
    """
    _check(image_features, text_features, batch_size, eps)
    size, tau = len(image_features), 1 / float(logit_scale)
    sample_ids = torch.arange(size) if sample_ids is None else sample_ids
    drawn = draw_rows(sample_ids, dataset_size or int(sample_ids.max()) + 1, seed)
    index = drawn[:anchors]
    truth = _exact_over_ranks(image_features, text_features, index, tau=tau, eps=eps)
    device = logit_scale.device if isinstance(logit_scale, Tensor) else image_features.device

    def of_batch(batch: Tensor, own: Tensor) -> Both:
        return both_log_normalizers(image_features[batch], text_features[batch], own, tau=tau, eps=eps)

    def of_method(batch: Tensor, own: Tensor) -> Both:
        # It is handed whole batches of the run's size, as in training: CLIP's estimate depends on them.
        image, text = objective.log_normalizers(
            image_features[batch].to(device),
            text_features[batch].to(device),
            torch.as_tensor(logit_scale),
            sample_ids=sample_ids[batch].to(device),
            eps=eps,
        )
        return image.cpu()[own], text.cpu()[own]

    def score() -> dict[str, Any]:
        repeated = (torch.bincount(caption_of)[caption_of] > 1).cpu()[index]
        result: dict[str, Any] = {"eps": eps, "temperature": tau, **_facts(truth, eps, repeated), "estimators": {}}
        batches = list(windows(drawn, anchors=len(index), batch_size=min(batch_size, size)))
        try:
            result["estimators"]["method"] = squared_errors(in_batches(of_method, batches), truth, repeated)
        except NoEstimate as reason:  # no normalizer at all, or nothing stored yet
            result["method_note"] = str(reason)
        result["estimators"]["minibatch"] = squared_errors(in_batches(of_batch, batches), truth, repeated)
        return result

    return cast("dict[str, Any]", all_gather_object(on_main_rank(score))[0])


def _facts(truth: Both, eps: float, repeated: Tensor) -> dict[str, Any]:
    """Of the anchors: what their errors must be read with."""
    near_floor = torch.cat(truth) < (math.log(eps) + 1 if eps else -math.inf)
    return {
        "anchors": len(repeated),
        "duplicates": int(repeated.sum()),
        "share_at_floor": near_floor.double().mean().item(),
    }


def draw_rows(sample_ids: Tensor, dataset_size: int, seed: int) -> Tensor:  # (n,) -> (n,)
    """All rows in a random order that depends on the seed and their ids alone: where a row is missing the others keep
    their order."""
    order = torch.randperm(dataset_size, generator=torch.Generator().manual_seed(seed))
    place = torch.argsort(order)
    return torch.argsort(place[sample_ids], stable=True)


def windows(drawn: Tensor, *, anchors: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive full batches of `drawn` that cover its first `anchors` entries, each with the places in it of the
    anchors not yet covered. The last one reaches back where too few pairs are left."""
    for start in range(0, anchors, batch_size):
        first = min(start, len(drawn) - batch_size)
        yield drawn[first : first + batch_size], torch.arange(start, min(start + batch_size, anchors)) - first


def in_batches(estimate: Callable[[Tensor, Tensor], Both], batches: Iterable[tuple[Tensor, Tensor]]) -> Both:
    """What `estimate` says of all anchors, (A,) each side: it gets a batch's pairs, and the places in it of anchors."""
    image, text = zip(*(estimate(batch, own) for batch, own in batches), strict=True)
    return torch.cat(image), torch.cat(text)


def squared_errors(
    estimate: Both, truth: Both, repeated: Tensor
) -> dict[str, float | int | None]:  # (A,) x 2, (A,) x 2, (A,) bool
    """Mean squared difference by side, their mean, and that over anchors with unique captions (None: no such)."""
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
    """Collective. `both_log_normalizers`, of which every rank computes its share and gets all."""
    share = local_range(len(index))
    with sync_errors():
        own = both_log_normalizers(
            image_features, text_features, index[share.start : share.stop], tau=tau, eps=eps, what="exact normalizers"
        )
    image, text = gather_shares(torch.stack(own, dim=1), len(index)).unbind(dim=1)
    return image, text


def both_log_normalizers(
    image_features: Tensor, text_features: Tensor, index: Tensor, *, tau: float, eps: float, what: str = ""
) -> Both:  # (n, d), (n, d), (A,) -> (A,), (A,)
    """The exact log-normalizers of the pairs `index` among all n pairs, image side and text side. `what` names the work
    for whoever waits for it."""
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
    """log(eps + 1/(n-1) sum_{j != i} exp((s_ij - s_ii) / tau)), candidate anchor_index[i] left out for anchor i.

    The own pair is left out by its index, never by its value: an equal caption elsewhere counts. Computed in blocks
    that stay in the cache, in the features' type; the result does not depend on the blocks (up to rounding).
    """
    size = len(candidates)
    if size < 2 or not len(anchors):
        return torch.full_like(positives, math.log(eps) if eps else -math.inf)
    # Powers of two instead of e: exp2 costs 0.2 of the matrix product at d = 128, exp 0.34 (one thread, AVX2).
    scaled = anchors * (math.log2(math.e) / tau)
    own_column = anchor_index.to(anchors.device)
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
            own = own_column[rows] - left
            inside = ((own >= 0) & (own < columns.shape[1])).nonzero()[:, 0]
            block[inside, own[inside]] = -math.inf
            _add_block(block, peak[rows], total[rows], bounded)
    log_mean = (peak + total.log2()) * math.log(2) - positives / tau - math.log(size - 1)
    return torch.logaddexp(log_mean, log_mean.new_tensor(math.log(eps) if eps else -math.inf))


def _fits_without_maximum(anchors: Tensor, candidates: Tensor, tau: float) -> bool:
    """Whether sums of exp(s / tau) neither overflow nor vanish: then no maximum must be found and subtracted."""
    largest = anchors.norm(dim=1).max() * candidates.norm(dim=1).max()
    limit = 0.8 * math.log(torch.finfo(anchors.dtype).max)  # the rest is room for the sum over n
    return float(largest) / tau < limit


def _add_block(block: Tensor, peak: Tensor, total: Tensor, bounded: bool) -> None:  # (b, k), (b,), (b,); in place
    """total * 2^peak grows by the sum of 2^block, row by row. `block` is used up."""
    if bounded:
        total += block.exp2_().sum(dim=1)
        return
    higher = torch.maximum(peak, block.amax(dim=1))  # finite even when the own pair is all there is in the block
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
