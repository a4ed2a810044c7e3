"""The loss under sentence-transformers' own trainer and model: real training, real checkpoints, no network."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from neuclip.integrations.sentence_transformers import NeuCLIPLoss
from neuclip.integrations.text_pairs import DIRECTIONS, TextPairs
from neuclip.models.torchvision_guard import guard_torchvision

guard_torchvision()
sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from sentence_transformers.sentence_transformer.modules import StaticEmbedding  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

WIDTH, BATCH, SIZE = 16, 16, 128
SMALL = {"num_prototypes": 48, "inner_steps": 2}


def model() -> sentence_transformers.SentenceTransformer:
    torch.manual_seed(0)
    words = [f"{letter}{number}" for letter in "qd" for number in range(24)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return sentence_transformers.SentenceTransformer(
        modules=[StaticEmbedding(tokenizer, embedding_dim=WIDTH)], device="cpu"
    )


def pairs(*, negatives: int = 0) -> datasets.Dataset:
    """Text i names i mod 12 and i div 12, in words of queries and in words of documents; negatives name another."""
    columns = {"anchor": "q", "positive": "d", **{f"negative_{k}": "d" for k in range(negatives)}}

    def text(letter: str, number: int) -> str:
        return f"{letter}{number % 12} {letter}{12 + number // 12}"

    shifted = {name: 12 * max(0, place - 1) for place, name in enumerate(columns)}
    return datasets.Dataset.from_dict(
        {name: [text(letter, (i + shifted[name]) % SIZE) for i in range(SIZE)] for name, letter in columns.items()}
    )


def features(built: sentence_transformers.SentenceTransformer, data: datasets.Dataset, rows: range) -> list:
    return [built.preprocess([data[row][column] for row in rows]) for column in data.column_names]


def trained(
    folder, loss: NeuCLIPLoss, data: datasets.Dataset, **settings
) -> sentence_transformers.SentenceTransformerTrainer:
    settings = {"num_train_epochs": 6, "save_strategy": "no", "learning_rate": 0.1, **settings}
    settings |= {"per_device_train_batch_size": BATCH, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(str(folder), **settings)
    trainer = sentence_transformers.SentenceTransformerTrainer(
        loss.model, arguments, train_dataset=data, eval_dataset=data.select(range(BATCH)), loss=loss
    )
    trainer.train()
    return trainer


def recall(built: sentence_transformers.SentenceTransformer, data: datasets.Dataset) -> float:
    query, document = (built.encode(list(data[name]), convert_to_tensor=True) for name in ("anchor", "positive"))
    similarity = F.normalize(query, dim=1) @ F.normalize(document, dim=1).T
    return (similarity.argmax(dim=1) == torch.arange(len(similarity))).float().mean().item()


@pytest.mark.parametrize(("directions", "negatives"), [(DIRECTIONS[:1], 0), (DIRECTIONS, 0), (DIRECTIONS[:1], 2)])
def test_the_trainer_learns_with_pairs_and_hard_negatives_in_one_direction_or_both(tmp_path, directions, negatives):
    data, built = pairs(negatives=negatives), model()
    before = recall(built, data)
    loss = NeuCLIPLoss(built, directions=directions, **SMALL)
    trained(tmp_path, loss, data)
    assert before < 0.1 and recall(built, data) > 0.6
    assert loss.objective.network.schedule.step == 6 * SIZE // BATCH


def test_the_loss_is_that_of_the_models_unit_embeddings_at_the_given_scale():
    data, built = pairs(negatives=2), model()
    loss = NeuCLIPLoss(built, scale=12.0, **SMALL)
    columns = [F.normalize(built(column)["sentence_embedding"], dim=1) for column in features(built, data, range(8))]
    objective = TextPairs(WIDTH, DIRECTIONS[:1], **loss.settings)
    want = objective(*columns[:2], torch.tensor(12.0), torch.stack(columns[2:], dim=1))
    assert loss(features(built, data, range(8))).item() == want.item()


def test_an_evaluation_teaches_the_prototypes_nothing(tmp_path):
    loss = NeuCLIPLoss(model(), **SMALL)
    trainer = trained(tmp_path, loss, pairs())
    before = loss.objective.state_dict()
    assert "eval_loss" in trainer.evaluate()
    after = loss.objective.state_dict()
    assert after["network._extra_state"] == before["network._extra_state"]
    assert torch.equal(after["network.for_image.rows"], before["network.for_image.rows"])


def test_the_losses_state_holds_the_prototypes():
    data, first = pairs(), NeuCLIPLoss(model(), **SMALL)
    first(features(first.model, data, range(16)))
    second = NeuCLIPLoss(model(), **SMALL)
    second.load_state_dict(first.state_dict())
    more = features(first.model, data, range(16, 32))
    assert second(more).item() == first(more).item()
    assert second(more).item() != NeuCLIPLoss(model(), **SMALL)(more).item()


def test_the_model_card_names_the_loss_its_settings_and_the_paper(tmp_path):
    trained(tmp_path, NeuCLIPLoss(model(), **SMALL), pairs(), save_strategy="epoch", num_train_epochs=1)
    card = next(tmp_path.glob("checkpoint-*/README.md")).read_text(encoding="utf-8")
    assert "NeuCLIPLoss" in card and '"num_prototypes": 48' in card and "Neural Normalizer Optimization" in card


def test_what_it_cannot_use_is_refused_in_a_line():
    built = model()
    with pytest.raises(ValueError, match="give 1 / temperature"):
        NeuCLIPLoss(built, scale=0)
    with pytest.raises(ValueError, match="needs two or more"):
        NeuCLIPLoss(built)(features(built, pairs().select_columns(["anchor"]), range(4)))


def test_importing_the_package_does_not_import_its_integrations():
    code = "import sys, neuclip; neuclip.NeuCLIP; print([name for name in sys.modules if 'integrations' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
