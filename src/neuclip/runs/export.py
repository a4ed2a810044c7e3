"""`neuclip export`: a run's model in the format of another library, checked, with a model card."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from PIL import Image

from neuclip.data.decoding import decode
from neuclip.data.source import BadSample
from neuclip.errors import RunFailed, UserError
from neuclip.models.export import write_format
from neuclip.models.hub import first_line
from neuclip.records import RunFolder
from neuclip.runs.load import open_target
from neuclip.runs.model_card import model_card
from neuclip.runs.new_folder import new_folder, refuse_existing

PROBED = 8  # images and captions of the run's gallery
SIDES = ((64, 64), (300, 200), (90, 333))
TEXTS = (
    "a photo of a dog",
    "Two children's bicycles, 12 km from Zürich -- naïve café!",
    "a very long caption that no small context can hold, and that every tokenizer has to cut off, " * 3,
    "",
)


def export(target: str, form: str, folder: Path) -> float:
    """Write the model of a run, a checkpoint or `local-dir:FOLDER` into a new `folder`, as `form` of `FORMATS` says.
    The largest 1 - cosine between its features and those of what was written."""
    refuse_existing(folder)
    built, _ = open_target(target)
    shown = list(pairs_of_gallery(target))
    images = [*(image for image, _ in shown), *map(drawn, SIDES)]
    texts = [*(caption for _, caption in shown), *TEXTS]
    with new_folder(folder) as unfinished:
        difference = write_format(form, built, unfinished, images, texts)
        card = model_card(target, built, form, difference)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
    return difference


def pairs_of_gallery(target: str) -> Iterator[tuple[Image.Image, str]]:
    """Real held-out images and captions, where the run keeps some for its report."""
    with suppress(OSError, ValueError, KeyError, TypeError, BadSample):
        for shown in json.loads(RunFolder(target).gallery.read_text(encoding="utf-8"))["image_to_text"][:PROBED]:
            yield decode(b64decode(shown["image"].partition(",")[2])), shown["caption"]


def drawn(size: tuple[int, int]) -> Image.Image:
    """An image with edges and soft areas in all three colours."""
    red = Image.linear_gradient("L").resize(size)
    green = Image.radial_gradient("L").resize(size)
    blue = red.rotate(90).point(lambda value: 255 * (value // 32 % 2))
    return Image.merge("RGB", (red, green, blue))


def check_push() -> None:
    """Raises UserError where a push cannot work: said before an export that takes long."""
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError("--push needs a token of the Hugging Face hub; set HF_TOKEN, or run: hf auth login")


def push(folder: Path, name: str) -> str:
    """Upload an exported folder as the model `name`; its address. The hub makes it private or public as the account
    has it."""
    import huggingface_hub

    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # of huggingface_hub, its HTTP library, or the system
        raise RunFailed(
            f"{folder} is written, but could not be pushed as {name} ({first_line(error)}); check the network, "
            f"the name and the token, then: hf upload {name} {folder}"
        ) from error
    return str(address)
