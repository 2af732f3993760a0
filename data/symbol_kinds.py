"""The kinds of the symbol world: their names, the habits of the topics that they belong to, and how each is drawn."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from clip_moe.data.drawing import choose, font_file

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEST_DIGITS = 5  # every fifth pen stroke is kept for the test split
# The first of each split has all characters; those that lack one are left out for it
FONTS = {
    "train": [
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSans-Oblique",
        "DejaVuSerif",
        "DejaVuSerif-Bold",
        "DejaVuSansMono",
    ],
    "test": ["DejaVuSans-BoldOblique", "DejaVuSerif-BoldItalic", "DejaVuSansMono-Bold", "STIXGeneral"],
}


@dataclass(frozen=True)
class Topic:
    """Kinds that occur together, and how pictures and web captions of them tend to look.

    Args:
        kinds: name -> character, the name after Unicode's; no character: handwritten.
        short: name -> what web captions may call it; words are shared between topics, as on the web.
        words: what web captions say of the topic.
        color, background, texture: most common in its pictures.
    """

    kinds: dict[str, str]
    short: dict[str, str]
    words: tuple[str, ...]
    color: str
    background: str
    texture: str


def _topic(names: str, characters: str, words: str, style: str, drop: str = "") -> Topic:
    """A topic of names between commas. `drop` are the words that short names leave out."""
    names = [name.strip() for name in names.split(",")]
    kinds = dict(zip(names, characters or [""] * len(names), strict=True))
    dropped = set(drop.split())
    short = {name: " ".join(word for word in name.split() if word not in dropped) or name for name in names}
    color, background, texture = style.split()
    return Topic(kinds, short, tuple(word.strip() for word in words.split(",")), color, background, texture)


TOPICS = {
    "letter": _topic(
        ", ".join(f"letter {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        "alphabet, initials, spelling, capital letters, logo",
        "black white plain",
        drop="letter",
    ),
    "greek letter": _topic(
        "alpha, beta, gamma, delta, epsilon, zeta, eta, theta, iota, kappa, lambda, mu, nu, xi, omicron, pi, rho, "
        "sigma, tau, upsilon, phi, chi, psi, omega",
        "αβγδεζηθικλμνξοπρστυφχψω",
        "greek, fraternity, formula, physics homework, ancient greece",
        "blue white striped",
    ),
    "hebrew letter": _topic(
        "alef, bet, gimel, dalet, he, vav, zayin, het, tet, yod, kaf, lamed, mem, nun, samekh, ayin, pe, tsadi, qof, "
        "resh, shin, tav",
        "אבגדהוזחטיכלמנסעפצקרשת",
        "hebrew, torah, scripture, calligraphy, synagogue",
        "brown yellow plain",
    ),
    "chess piece": _topic(
        "white chess king, white chess queen, white chess rook, white chess bishop, white chess knight, "
        "white chess pawn, black chess king, black chess queen, black chess rook, black chess bishop, "
        "black chess knight, black chess pawn",
        "♔♕♖♗♘♙♚♛♜♝♞♟",
        "chess, checkmate, chessboard, grandmaster, opening",
        "black gray checkered",
        drop="white black chess",
    ),
    "card suit": _topic(
        "black spade suit, white heart suit, white diamond suit, black club suit, white spade suit, black heart suit, "
        "black diamond suit, white club suit",
        "♠♡♢♣♤♥♦♧",
        "poker, card game, casino, deck of cards, bridge night",
        "red white dotted",
        drop="suit",
    ),
    "zodiac sign": _topic(
        "aries, taurus, gemini, cancer, leo, virgo, libra, scorpius, sagittarius, capricorn, aquarius, pisces",
        "♈♉♊♋♌♍♎♏♐♑♒♓",
        "horoscope, zodiac, birthday, astrology, star sign",
        "purple pink dotted",
    ),
    "planet": _topic(
        "sun disc, planet mercury, planet venus, planet earth, planet mars, planet jupiter, planet saturn, "
        "planet uranus, planet neptune, planet pluto, crescent moon",
        "☉☿♀♁♂♃♄♅♆♇☾",
        "astronomy, telescope, solar system, orbit, night sky",
        "blue gray dotted",
        drop="planet crescent disc",
    ),
    "weather": _topic(
        "sun with rays, cloud, umbrella, snowman, comet, lightning, umbrella with rain drops, snowflake, high voltage",
        "☀☁☂☃☄☇☔❄⚡",
        "weather, forecast, storm, winter, tomorrow",
        "blue turquoise striped",
        drop="with rays high drops",
    ),
    "musical note": _topic(
        "quarter note, eighth note, beamed eighth notes, beamed sixteenth notes, flat sign, natural sign, sharp sign",
        "♩♪♫♬♭♮♯",
        "music, melody, song, sheet music, piano",
        "black yellow striped",
        drop="beamed quarter eighth sixteenth sign",
    ),
    "arrow": _topic(
        "left arrow, up arrow, right arrow, down arrow, left right arrow, up down arrow, north west arrow, "
        "north east arrow, south east arrow, south west arrow",
        "←↑→↓↔↕↖↗↘↙",
        "direction, road sign, this way, navigation, exit",
        "green white striped",
    ),
    "die": _topic(
        "die face one, die face two, die face three, die face four, die face five, die face six",
        "⚀⚁⚂⚃⚄⚅",
        "dice, board game, gambling, lucky roll, throw",
        "red turquoise checkered",
        drop="die face",
    ),
    "currency": _topic(
        "dollar sign, cent sign, pound sign, yen sign, euro sign, won sign, sheqel sign, dong sign, peso sign, "
        "indian rupee sign, lira sign, hryvnia sign",
        "$¢£¥€₩₪₫₱₹₤₴",
        "money, exchange rate, bank, price, finance",
        "green orange plain",
        drop="sign indian",
    ),
    "trigram": _topic(
        "trigram for heaven, trigram for lake, trigram for fire, trigram for thunder, trigram for wind, "
        "trigram for water, trigram for mountain, trigram for earth",
        "☰☱☲☳☴☵☶☷",
        "i ching, feng shui, divination, yin and yang, taoism",
        "red orange dotted",
        drop="trigram for",
    ),
    "tool": _topic(
        "hammer and pick, anchor, crossed swords, staff of aesculapius, scales, alembic, gear, scissors, pencil, "
        "envelope, telephone, nib",
        "⚒⚓⚔⚕⚖⚗⚙✂✏✉☎✒",
        "icon, workshop, clip art, pictogram, equipment",
        "brown orange checkered",
    ),
    "digit": _topic(
        ", ".join(f"digit {name}" for name in DIGITS),
        "",
        "number, handwriting, phone number, postal code, arithmetic",
        "purple white checkered",
        drop="digit",
    ),
}
TOPIC_OF = {kind: name for name, topic in TOPICS.items() for kind in topic.kinds}
KINDS = list(TOPIC_OF)


def draw_symbol(kind: str, split: str, rng: np.random.Generator) -> PILImage.Image:
    """A symbol in one of its fonts, (64, 64), white on black."""
    character = TOPICS[TOPIC_OF[kind]].kinds[kind]
    if not character:
        return _stroke(kind.split()[-1], split, rng)
    return _printed(character, choose(rng, _fonts_of(split)[character]))


@cache
def _fonts_of(split: str) -> dict[str, list[str]]:
    """The files of the fonts that have each character."""
    from matplotlib.ft2font import FT2Font

    fonts = {path: FT2Font(path).get_charmap() for path in map(font_file, FONTS[split])}
    characters = [character for topic in TOPICS.values() for character in topic.kinds.values() if character]
    return {text: [path for path, drawn in fonts.items() if ord(text) in drawn] for text in characters}


@cache
def _printed(character: str, font: str) -> PILImage.Image:
    """A character as large as it fits into (64, 64) with a margin."""
    font = ImageFont.truetype(font, 96)
    left, top, right, bottom = font.getbbox(character)
    drawn = PILImage.new("L", (right - left, bottom - top))
    ImageDraw.Draw(drawn).text((-left, -top), character, 255, font)
    scale = 58 / max(drawn.size)
    drawn = drawn.resize([max(1, round(side * scale)) for side in drawn.size], PILImage.Resampling.BICUBIC)
    image = PILImage.new("L", (64, 64))
    image.paste(drawn, ((64 - drawn.width) // 2, (64 - drawn.height) // 2))
    return image


def _stroke(digit: str, split: str, rng: np.random.Generator) -> PILImage.Image:
    """A handwritten digit, (64, 64), white on black. No pen stroke is in both splits."""
    drawn = PILImage.fromarray(choose(rng, _digit_images(split)[digit]))
    image = PILImage.new("L", (64, 64))
    # A margin: many strokes touch the border of their 8 x 8 pixels and would be cut when they are turned.
    image.paste(drawn.resize((54, 54), PILImage.Resampling.BICUBIC), (5, 5))
    return image


@cache
def _digit_images(split: str) -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    is_test = np.arange(len(images)) % TEST_DIGITS == 0
    chosen = is_test if split == "test" else ~is_test
    images = (images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return {name: images[chosen & (labels == number)] for number, name in enumerate(DIGITS)}
