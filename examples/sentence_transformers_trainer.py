"""NeuCLIP as a loss of sentence-transformers, on queries, documents and a hard negative each:

python examples/sentence_transformers_trainer.py
python examples/sentence_transformers_trainer.py --resume --epochs 12
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from tiny_data import COLOURS, SIZE, parts
from tokenizers import Tokenizer, models, pre_tokenizers

from neuclip.integrations.sentence_transformers import NeuCLIPLoss
from neuclip.models.torchvision_guard import guard_torchvision

guard_torchvision()  # for a CPU-only torch beside a torchvision built for CUDA, which transformers would not survive
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402


class SaveObjective(TrainerCallback):
    def __init__(self, loss):
        self.loss = loss

    def on_save(self, args, state, control, **unused):
        saved = self.loss.objective.state_dict()  # on every rank, as each holds a part of it
        if args.should_save:
            torch.save(saved, Path(args.output_dir) / f"checkpoint-{state.global_step}" / "objective.pt")

    def on_log(self, args, state, control, logs, **unused):
        logs.update({name: self.loss.objective.metrics.get(name) for name in ("accuracy", "calibration")})


def texts(number: int) -> dict[str, str]:
    """What is searched for, what describes it in other words, and what describes the same in another colour."""
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
    parser.add_argument("--epochs", type=int, default=6, help="in all, those before --resume too")
    parser.add_argument("--folder", default="runs/sentence_transformers_trainer")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    arguments = parser.parse_args()
    settings = {"learning_rate": 2e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 32}
    settings |= {"logging_strategy": "epoch", "save_strategy": "epoch", "disable_tqdm": True, "report_to": "none"}
    settings |= {"num_train_epochs": arguments.epochs, "use_cpu": not torch.cuda.is_available()}
    settings = SentenceTransformerTrainingArguments(arguments.folder, **settings)
    torch.manual_seed(0)
    model = tiny_model(data := Dataset.from_list([texts(number) for number in range(SIZE)]))
    loss = NeuCLIPLoss(model, directions=("query_to_doc", "doc_to_query"), num_prototypes=512)  # the one line
    if last := get_last_checkpoint(arguments.folder) if arguments.resume else None:
        loss.objective.load_state_dict(torch.load(Path(last) / "objective.pt", weights_only=True))
    given = {"train_dataset": data, "loss": loss, "callbacks": [SaveObjective(loss)]}
    SentenceTransformerTrainer(model, settings, **given).train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
