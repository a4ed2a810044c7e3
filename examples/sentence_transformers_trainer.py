"""NeuCLIP as a loss for sentence-transformers, on queries, documents and one hard negative each; copy `NeuCLIPLoss`.

python examples/sentence_transformers_trainer.py
python examples/sentence_transformers_trainer.py --resume --epochs 12
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny_data import COLOURS, SIZE, parts
from tokenizers import Tokenizer, models, pre_tokenizers

import neuclip.models  # noqa: F401 - lets a torchvision for CUDA import beside a CPU-only torch
from neuclip import NeuCLIP
from neuclip.objectives.contrast import contrast
from neuclip.objectives.formulas import add_eps, conjugate

# isort: split
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint


class TextPairs(NeuCLIP):
    """NeuCLIP at a fixed temperature: cross-entropy over the data set, minus the log of its size.

    With k hard negatives, a query's normalizer is a mean over the N documents of other pairs and its own k. The batch
    and the prototypes estimate the sum over the N documents; the sum over the k is known and is added to both.
    """

    hard_negatives = None  # (b, k, d), set before each call

    def loss(self, pairs, tau):
        batch = contrast(pairs, tau)
        log_z = add_eps(batch.log_g, self.eps)
        with torch.no_grad():  # for the calibration: the prediction before the batch is learnt
            unseen = self.predict(pairs, tau) if self.normalizer.ready else None
        if self.training:
            self.normalizer.restart(pairs)
            self.learn(pairs, log_z, tau, steps=self.inner_steps)
        alpha = self.predict(pairs, tau)
        self.record(accuracy=batch.accuracy)
        self.record_normalizers(log_z, unseen, alpha)
        if self.hard_negatives is None:
            return conjugate(log_z, alpha).mean() - 1
        similarity = torch.einsum("bd,bkd->bk", pairs.features[0], self.hard_negatives)
        hard = torch.logsumexp((similarity - pairs.positive[:, None]) / tau, dim=1)
        count, total = pairs.negatives.log(), (pairs.negatives + similarity.shape[1]).log()
        queries = conjugate(*(torch.logaddexp(x[0] + count, hard) - total for x in (log_z, alpha)))
        return (queries + conjugate(log_z[1], alpha[1])).mean() / 2 - 1


class NeuCLIPLoss(torch.nn.Module):
    """For (anchor, positive) pairs, with any number of hard negatives: (anchor, positive, negative_1, ...)."""

    def __init__(self, model, *, scale=20.0, num_prototypes=1024):
        super().__init__()
        self.model, self.scale = model, torch.tensor(scale)
        options = {"restart": "rolling", "inner_steps": 3, "network_lr": 0.01}  # for batches of about 32
        self.objective = TextPairs(model.get_embedding_dimension(), num_prototypes=num_prototypes, **options)

    def forward(self, sentence_features, labels=None):
        query, document, *negatives = (
            F.normalize(self.model(column)["sentence_embedding"], dim=1) for column in sentence_features
        )
        self.objective.hard_negatives = torch.stack(negatives, dim=1) if negatives else None
        self.objective.train(self.model.training)  # the prototypes must not learn from evaluation data
        return self.objective(query, document, self.scale)


class SaveObjective(TrainerCallback):
    def __init__(self, loss):
        self.loss = loss

    def on_save(self, args, state, control, **unused):
        saved = self.loss.objective.state_dict()  # on every rank, because each holds a part of the state
        if args.should_save:
            torch.save(saved, Path(args.output_dir) / f"checkpoint-{state.global_step}" / "objective.pt")

    def on_log(self, args, state, control, logs, **unused):
        logs.update({name: self.loss.objective.metrics.get(name) for name in ("accuracy", "calibration")})


def texts(number: int) -> dict[str, str]:
    """A query, a document that describes the same in other words, and a negative with another colour."""
    colour, shape, row, column = parts(number)
    place = f"{shape} row{row} column{column}"
    other = list(COLOURS)[(list(COLOURS).index(colour) + 1) % len(COLOURS)]
    return {"query": f"{colour} {place}", "document": f"{place} {colour}ish", "negative": f"{place} {other}ish"}


def tiny_model(data: Dataset) -> SentenceTransformer:
    words = sorted({word for column in data.to_dict().values() for text in column for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=64)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="total epochs, including those before --resume")
    parser.add_argument("--folder", default="runs/sentence_transformers_trainer")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    arguments = parser.parse_args()
    settings = {"learning_rate": 2e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 32}
    settings |= {"logging_strategy": "epoch", "save_strategy": "epoch", "disable_tqdm": True, "report_to": "none"}
    settings |= {"num_train_epochs": arguments.epochs, "use_cpu": not torch.cuda.is_available()}
    settings = SentenceTransformerTrainingArguments(arguments.folder, **settings)
    torch.manual_seed(0)
    model = tiny_model(data := Dataset.from_list([texts(number) for number in range(SIZE)]))
    loss = NeuCLIPLoss(model, num_prototypes=512)
    if last := get_last_checkpoint(arguments.folder) if arguments.resume else None:
        loss.objective.load_state_dict(torch.load(Path(last) / "objective.pt", weights_only=True))
    options = {"train_dataset": data, "loss": loss, "callbacks": [SaveObjective(loss)]}
    SentenceTransformerTrainer(model, settings, **options).train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
