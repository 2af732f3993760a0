"""The world of molecules: structural formulas and the names of what they show.

The package `chemicals` has the molecules and their names, and `rdkit` draws them: `pip install chemicals rdkit`.
A kind is a molecule. A name that two molecules have belongs to neither, and a number in a catalog is no name.

`web` captions are the first name that the package tells, which is the common one of five in six molecules; `detailed`
ones are any of its names, drawn anew for each caption. Everything follows from the arguments of `World.load` and from
the versions of both packages, to the bit.
"""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distribution

import numpy as np
from PIL import Image as PILImage

from clip_moe.data.drawing import add_noise, choose
from clip_moe.data.world import World, require_packages
from clip_moe.engine.provenance import installed_versions
from lab.worlds import some_kinds

PACKAGES = ("chemicals", "rdkit")  # the molecules, and what draws them
TABLES = [f"chemicals/Identifiers/chemical identifiers pubchem {size}.tsv" for size in ("small", "large")]
MOST_ATOMS, LONGEST_NAME = 40, 64  # besides hydrogen; letters
# How pictures of a molecule differ
LARGEST_TURN, TINT = 12, 5  # degrees; of 255

# "einecs 293-816-3", "ac1o5cjk" and "stk366316", but not "butan-2-ol"
_CATALOG = re.compile(r"[a-z]{1,9}([-_ ][a-z]{1,3})?[-_ ]?\d\w*([:-]\d+)*")
_WORD = re.compile("[a-z]{4}|^[a-z]+$")


@dataclass(frozen=True)
class Molecule:
    """Its structure as SMILES, and its names."""

    smiles: str
    names: tuple[str, ...]


def draw(kind: int, split: str, rng: np.random.Generator, image_size: int) -> tuple[np.ndarray, dict[str, str]]:
    """A picture of a molecule and its attributes. Both splits show the same molecules."""
    drawn = molecule(kind)
    return render(drawn.smiles, rng, image_size), {"kind": drawn.names[0], "smiles": drawn.smiles}


def caption(kind: int, style: str, rng: np.random.Generator) -> str:
    """A molecule's first name, or any of its names."""
    names = molecule(kind).names
    return choose(rng, {"web": names[:1], "detailed": names}[style])


def molecule(kind: int) -> Molecule:
    """A molecule by its number."""
    return _molecules()[kind]


def render(smiles: str, rng: np.random.Generator, image_size: int) -> np.ndarray:
    """A picture of a molecule, (image_size, image_size, 3) uint8: turned, moved by whole pixels, tinted, noisy."""
    side = image_size - image_size // 8
    y, x = rng.integers(image_size - side + 1, size=2)
    image = np.full((image_size, image_size, 3), 255, np.float32)
    image[y : y + side, x : x + side] = _formula(smiles, side, rng.uniform(-LARGEST_TURN, LARGEST_TURN))
    return add_noise(image - np.abs(rng.normal(0, TINT, 3)), rng)


def _formula(smiles: str, side: int, turn: float) -> np.ndarray:
    """A structural formula, (side, side, 3) uint8, turned by degrees."""
    from rdkit import Chem, rdBase
    from rdkit.Chem.Draw.rdMolDraw2D import MolDraw2DCairo

    scale = 2 if side < 48 else 1  # small letters are legible at twice the size
    canvas = MolDraw2DCairo(side * scale, side * scale)
    options = canvas.drawOptions()
    options.rotate, options.padding, options.fixedBondLength = turn, 0.03, side * scale / 4
    options.bondLineWidth, options.scaleBondWidth = scale, False
    options.minFontSize = options.maxFontSize = -1  # letters as large as the bonds ask for
    options.baseFontSize = 0.8
    with rdBase.BlockLogs():
        # What has an unusual valence is drawn as it is written
        canvas.DrawMolecule(Chem.MolFromSmiles(smiles) or Chem.MolFromSmiles(smiles, sanitize=False))
    canvas.FinishDrawing()
    image = PILImage.open(io.BytesIO(canvas.GetDrawingText())).convert("RGB")
    return np.asarray(image.resize((side, side), PILImage.Resampling.BOX))


@cache
def _molecules() -> list[Molecule]:
    """All, in a random order that depends on their structures alone."""
    require_packages("molecules", PACKAGES, f"pip install {' '.join(PACKAGES)}")
    lines = []
    for table in TABLES:
        lines += distribution("chemicals").locate_file(table).read_text(encoding="utf-8").splitlines()
    # A number, CAS's one, formula, weight, SMILES, InChI, its hash, IUPAC's name, the common name and others
    rows = {row[6]: row for row in (line.split("\t") for line in lines) if _atoms(row[2]) <= MOST_ATOMS}
    rows = [rows[key] for key in sorted(rows, key=lambda key: hashlib.sha256(key.encode()).digest())]
    names = [_names([*row[8:], row[7]]) for row in rows]
    times = Counter(letters for own_names in names for letters in own_names)
    unique = [[name for letters, name in own_names.items() if times[letters] == 1] for own_names in names]
    return [Molecule(row[4], tuple(own_names)) for row, own_names in zip(rows, unique, strict=True) if own_names]


def _atoms(formula: str) -> int:
    """The atoms of a formula such as C7H9N5, without hydrogen."""
    return sum(int(number or 1) for element, number in re.findall(r"([A-Z][a-z]?)(\d*)", formula) if element != "H")


def _names(texts: Iterable[str]) -> dict[str, str]:
    """Letters -> name, for texts that are names. A tokenizer, too, reads "2, 5-xylidine" and "2,5-xylidine" alike."""
    names = {}
    for text in texts:
        if len(text) <= LONGEST_NAME and _WORD.search(text) and not _CATALOG.fullmatch(text):
            names.setdefault(text.replace(" ", ""), text)
    return names


MOLECULES = World(
    name="molecules",
    kind_set=lambda name: some_kinds("molecules", name, len(_molecules())),
    draw=draw,
    caption=caption,
    attributes=("kind", "smiles"),
    texts=lambda: [drawn.names[0] for drawn in _molecules()],
    vocabulary=2000,
    caption_styles=("web", "detailed"),
    image_size=64,
    versions=partial(installed_versions, PACKAGES),
    tested_as="with its first name",
)
