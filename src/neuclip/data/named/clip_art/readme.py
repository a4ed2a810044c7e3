"""README.md of the built sets: what they are, what is in them, and what their licences ask."""

from __future__ import annotations

from collections.abc import Mapping

from neuclip.data.named.clip_art.picture import SIDE

WHAT = {
    "tuxpaint": """\
The stamps of Tux Paint: photographic cut-outs and drawings with an English sentence each (`A toucan.`). A test set for
models that were trained on other pictures, not training data. Stamps that Tux Paint mirrors by a second file are here
once. About a quarter lies under `symbols/` (letters, coins, digits): leave it out by the JSON's `category` to test
on things only. Some stamps are small, down to 20 pixels.

Translations are in each sample's JSON under `caption_de`, `caption_fr` and so on. Not every stamp has every language:
`neuclip data convert tuxpaint tuxpaint-de --data.caption_key caption_de` writes a test set of those that have German.
""",
    "pysiogame": """\
The Art4Apps cartoons of pysioGame, one thing or action each, with its word. A test set for models that were trained on
other pictures, not training data. In some a coloured arrow points at what is meant.
""",
    "openclipart": """\
Drawings of the Open Clip Art Library by some 500 people. A caption is the drawing's name, from its title or from its
file name without author and number, and up to three of its tags: `haiti, flag, america`. Titles are in the language of
their author, mostly English, else Italian and French. The JSON holds name, tags, folder and author.

`test` is about 15 % of the groups, chosen by a hash of file names. A group is what looks alike in grey, and the
drawings of one name by one author: so a test picture is not one of train in another colour. Other authors' drawings
of the same thing may be in train. Tux Paint took stamps from this library (71 of them have a near twin here, with the
packages of Debian 12): do not test on `tuxpaint` what was trained on this.
""",
}
LICENCE = {
    "tuxpaint": """\
debian/copyright of the package: 2002-2022 by Bill Kendrick, GPL-2 "or (at your option) any later version", all files.
Whoever passes pictures on must do so under the GPL and say where their source is (the package). Built on your machine
from the package; neuclip ships none of it.
""",
    "pysiogame": """\
debian/copyright of the package does not name the folder of these pictures (its `Files: *` is GPL-3 or later). The
package's CREDITS does: "Art4Apps is a database of images and audio files of words created by Smart4Kids under a
Creative Commons License (CC BY-SA)", www.art4apps.org, without a version of that licence. Name Art4Apps and Smart4Kids
and keep the licence if you pass pictures on, and check at the source before you publish any.
""",
    "openclipart": """\
debian/copyright of the package: Creative Commons public domain dedication or certification, for all files. Drawings
whose own metadata name another licence are left out. Nothing is asked of those who pass pictures on; flags, coats of
arms and logos may be protected by other laws than copyright.
""",
}


def readme(
    name: str,
    package: str,
    version: str,
    pairs: Mapping[str, int],
    captions: Mapping[str, int],
    left_out: Mapping[str, int],
) -> str:
    """The whole text; no date in it, so that two builds give the same."""
    parts = "".join(f"| {part} | {count:,} | {captions[part]:,} |\n" for part, count in pairs.items())
    reasons = "".join(f"| {reason} | {count:,} |\n" for reason, count in left_out.items() if count)
    return f"""\
# {name}

Made by `neuclip data prepare {name}` from Debian's package {package} {version}.

{WHAT[name]}
Pictures are RGB, in the middle of a white square of at most {SIDE} pixels, which is what the usual CLIP models look at.
SVG is drawn at that size without its empty margins, larger pictures are scaled down, smaller ones are not enlarged.
Squares, because the transforms of CLIP cut what sticks out of one.

| part | pairs | different captions |
| --- | --- | --- |
{parts}
| left out | pictures |
| --- | --- |
{reasons}
## Licence

{LICENCE[name]}"""
