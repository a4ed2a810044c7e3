from __future__ import annotations

import pytest
import torch
from neuclip.training.truncated_captions import TruncatedCaptions

from neuclip import api
from neuclip.models import open_clip_module
from neuclip.records import RunFolder, read_lines
from neuclip.runs.checkpoint import checkpoint_name, checkpoints_in
from neuclip.settings.reading import read_settings
from tests.images import write_csv
from tests.training.conftest import BATCH

LENGTH = 8


def filled_up_with_its_end(texts: list[str]) -> torch.Tensor:
    """Tokens as some tokenizers give them: no start, and the end token (1) also fills up."""
    rows = [[5] * min(len(text.split()), LENGTH - 1) + [1] * LENGTH for text in texts]
    return torch.tensor([row[:LENGTH] for row in rows])


def test_captions_as_long_as_the_context_or_longer_are_counted():
    tokenizer = open_clip_module().SimpleTokenizer(context_length=LENGTH)  # start and end are two of the eight
    full = TruncatedCaptions(tokenizer)
    assert full.share is None
    full.note(tokenizer(["", "a b c d e", "a b c d e f", "a b c d e f g", "a " * 100]))
    full.note(tokenizer(["a", "b", "c"]))
    assert full.share == 3 / 8


def test_an_end_token_that_also_fills_up_hides_nothing():
    full = TruncatedCaptions(filled_up_with_its_end)
    full.note(filled_up_with_its_end(["", "a b", "a b c d e f", "a b c d e f g", "a " * 100]))
    assert full.share == 2 / 5


@pytest.mark.slow
def test_a_resumed_run_records_the_share_that_one_in_one_go_records(small_settings, tmp_path):
    table = write_csv(tmp_path / "pairs", 40)
    header, *rows = table.read_text().splitlines()
    rows[::3] = [row + " and so on" * 50 for row in rows[::3]]
    table.write_text("\n".join([header, *rows]))
    flags = f"--run.name long --data.train {table} --train.samples {5 * BATCH} --checkpoint.keep 9"
    folder = RunFolder(api.train(small_settings(tmp_path, *flags.split())))
    in_one_go = [record["truncated_captions"] for record in read_lines(folder.records)]
    assert len(set(in_one_go)) > 2 and in_one_go[-1] == 14 / 40  # one epoch
    *_, checkpoint, last = checkpoints_in(folder.checkpoints)
    assert checkpoint.name == checkpoint_name(3 * BATCH)
    last.unlink()
    api.train(read_settings(folder.settings, []), resume=folder.path)
    assert [record["truncated_captions"] for record in read_lines(folder.records)] == in_one_go
