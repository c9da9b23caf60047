"""Generated reviews of films and laptops whose label only the order of the words tells.

A review has one verdict. These rules, which `label_of` applies, find it in the text:

1. Adjectives and verbs of opinion (good, dull, loved, hated) have a polarity; intensifiers (truly) do not change it.
2. A negator (not, never, hardly, nothing, far from, by no means) earlier in the clause turns it: "not very good" is
   negative, "I never found the plot dull" positive. Clauses end at a comma.
3. What is conceded does not count: all before "but" and "yet", and the clause that "although" begins.
4. What others think does not count ("my brother loved it", "the trailer promised a great film"), nor do words for
   characters of the story ("a terrible king") and for other devices ("it replaced a clumsy typewriter").
5. The opinions that are left agree, and there is at least one.

The same words serve both labels, so counting them helps little: affirmed opinions are a few more than negated ones.
"""

import random
import re
from typing import TypeVar

CLASS_NAMES = ["negative", "positive"]
MIN_WORDS, MAX_WORDS = 5, 40

Grammar = dict[str, list[list[str]]]
T = TypeVar("T")

# A symbol (upper case) becomes one of its alternatives, a number before one says how often it counts. They are written
# for a positive verdict; `_MIRROR` turns them into those for a negative one.
_VERDICTS = """
LIKING = 16 PRAISE | 2 PRAISE , and PRAISE | 3 it BE a VERY GOOD THING | it BE NO a TRULY BAD THING
       | 2 BLAME , but PRAISE | FOES , but PRAISE | BLAME , yet PRAISE | FOES , yet PRAISE
       | although BLAME , PRAISE | although FOES , PRAISE | PRAISE , although BLAME | PRAISE , although FOES
PRAISE = 5 FACT | I found the ASPECT VERY GOOD | 2 I LOVE the ASPECT | 2 I LOVED the ASPECT
       | I never found the ASPECT TRULY BAD | I did not HATE the ASPECT
FACT   = 5 the ASPECT BE VERY GOOD | the ASPECT seemed VERY GOOD
       | 2 the ASPECT BE NOT BAD | nothing about the ASPECT BE TRULY BAD
FANS   = my PERSON LOVED it | my PERSON said that FACT | most PEOPLE find the ASPECT VERY GOOD
       | the WITNESS promised a VERY GOOD THING | my PERSON never HATED it | my PERSON did not HATE the ASPECT
"""
_MIRROR = dict(
    GOOD="BAD",
    LOVE="HATE",
    LOVED="HATED",
    LIKING="DISLIKING",
    PRAISE="BLAME",
    FACT="FAULT",
    FANS="FOES",
)
_MIRROR |= {bad: good for good, bad in _MIRROR.items()}

_SHARED = """
VERY   = | | | really | truly | quite | rather
TRULY  = | | really | truly
NO     = not | never | hardly | far from | by no means
NOT    = NO | NO | not very | not really | not particularly
LOVE   = love | like | enjoy
LOVED  = loved | liked | enjoyed
HATE   = hate | dislike | loathe
HATED  = hated | disliked | loathed
PERSON = brother | sister | neighbour | colleague | friend | uncle
ASIDE  = SCENE | SCENE | NEUTRAL | NEUTRAL | FANS | FOES
       | most PEOPLE LOVED it , but my PERSON HATED it | most PEOPLE HATED it , but my PERSON LOVED it
WHEN   = on Sunday | last week | in March | two days ago | after work
"""
_FILM = """
THING  = film | movie | comedy | thriller
ASPECT = plot | ending | acting | music | script | dialogue | cast | humour | story | film
GOOD   = good | great | wonderful | brilliant | charming | clever | funny | moving
BAD    = bad | terrible | dreadful | poor | weak | dull | boring | silly
WITNESS = trailer | poster | title | preview
PEOPLE = critics | viewers | reviewers | students
TRAIT  = great | wonderful | brilliant | charming | clever | funny | bad | terrible | dreadful | weak | dull | silly
HERO   = king | teacher | detective | singer
RIVAL  = queen | thief | lawyer | sailor
SCENE  = it follows a TRAIT HERO and a TRAIT RIVAL | a TRAIT HERO hunts a TRAIT RIVAL
       | the TRAIT HERO LOVED the TRAIT RIVAL | the TRAIT HERO HATED the TRAIT RIVAL
NEUTRAL = I saw it WHEN | I saw it WHEN with my PERSON | I had never heard of the director | I did not know the director
        | it BE not a long THING | there BE no sequel to it | the THING runs for two hours
"""
_LAPTOP = """
THING  = laptop | computer | machine | device
ASPECT = screen | battery | sound | design | keyboard | software | camera | case | manual | laptop
GOOD   = good | great | wonderful | brilliant | clever | solid | pleasant | reliable
BAD    = bad | terrible | dreadful | poor | weak | clumsy | flimsy | useless
WITNESS = advert | shop | seller | box
PEOPLE = testers | buyers | reviewers | students
TRAIT  = good | great | wonderful | clever | solid | reliable | bad | terrible | poor | clumsy | flimsy | useless
HERO   = phone | tablet | printer | camcorder
RIVAL  = typewriter | radio | recorder | calculator
SCENE  = it replaced a TRAIT HERO and a TRAIT RIVAL | I also own a TRAIT HERO | it stands beside a TRAIT RIVAL
       | my PERSON gave me a TRAIT HERO with it
NEUTRAL = I bought it WHEN | I bought it WHEN with my PERSON | I had never heard of the brand | I did not know the brand
        | it BE not a large THING | there BE no cable with it | the THING came in two boxes
"""
# The sentences of a review; LIKING carries the verdict.
_LAYOUTS = """
4 LIKING | 3 LIKING LIKING | LIKING ASIDE | ASIDE LIKING | LIKING ASIDE LIKING | ASIDE LIKING ASIDE
       | LIKING LIKING ASIDE | ASIDE LIKING LIKING
"""
_ONCE = {
    "ASPECT",
    "PERSON",
    "PEOPLE",
    "WITNESS",
    "GOOD",
    "BAD",
    "TRAIT",
}  # no word of these twice in a review


def _alternatives(text: str) -> list[list[str]]:
    """Lists of words; an alternative that a number leads is there as many times."""
    found = []
    for words in (alternative.split() for alternative in text.split("|")):
        times = int(words.pop(0)) if words and words[0].isdigit() else 1
        found += [words] * times
    return found


def _mirrored(words: list[str]) -> list[str]:
    return [_MIRROR.get(word, word) for word in words]


def _rules(text: str) -> Grammar:
    pairs = (rule.split("=") for rule in re.split(r"\n(?=\S)", text.strip()))
    return {symbol.strip(): _alternatives(alternatives) for symbol, alternatives in pairs}


def _grammar(subject: str, tense: str) -> Grammar:
    verdicts = _rules(_VERDICTS)
    mirrored = {
        _MIRROR[symbol]: [_mirrored(words) for words in verdicts[symbol]] for symbol in verdicts
    }
    return {**verdicts, **mirrored, **_rules(_SHARED), **_rules(subject), "BE": [[tense]]}


LAYOUTS = _alternatives(_LAYOUTS)
GRAMMARS = [_grammar(subject, tense) for subject in (_FILM, _LAPTOP) for tense in ("is", "was")]


def _vocabulary(*symbols: str) -> frozenset[str]:
    return frozenset(
        word
        for rules in GRAMMARS
        for symbol in symbols
        for words in rules[symbol]
        for word in words
    )


_POSITIVE, _NEGATIVE = _vocabulary("GOOD", "LOVE", "LOVED"), _vocabulary("BAD", "HATE", "HATED")
_OTHERS = _vocabulary("PERSON", "PEOPLE", "WITNESS", "HERO", "RIVAL")
_NEGATORS = {"not", "never", "hardly", "nothing", "far", "no"}


def generate(
    seed: int = 0, train: int = 8000, val: int = 1000, test: int = 1000
) -> dict[str, tuple[list[str], list[int]]]:
    """Writes reviews of 5 to 40 words, no two alike, half of each label (one more positive where a size is odd).

    Args:
        seed: Of all that is drawn; the same seed gives the same reviews on every machine.
        train: Number of training reviews.
        val: Number of validation reviews.
        test: Number of test reviews.

    Returns:
        "train", "val" and "test": texts, and their labels as places in `CLASS_NAMES`.
    """
    draw = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, tuple[list[str], list[int]]] = {}
    for split, size in (("train", train), ("val", val), ("test", test)):
        labels = [1 - i % 2 for i in range(size)]
        draw.shuffle(labels)
        splits[split] = [_unseen(draw, label, seen) for label in labels], labels
    return splits


def _unseen(draw: random.Random, label: int, seen: set[str]) -> str:
    while True:
        text = _review(draw, label)
        if text not in seen and MIN_WORDS <= text.count(" ") + 1 <= MAX_WORDS:
            seen.add(text)
            return text


def _review(draw: random.Random, label: int) -> str:
    grammar, layout, used = _pick(draw, GRAMMARS), _pick(draw, LAYOUTS), set[str]()
    sentences = [
        " ".join(_expand(draw, grammar, symbol, used))
        for symbol in (layout if label else _mirrored(layout))
    ]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences).replace(" ,", ",")


def _expand(draw: random.Random, grammar: Grammar, symbol: str, used: set[str]) -> list[str]:
    """The words that a symbol becomes."""
    words: list[str] = []
    alternative = _pick(draw, grammar[symbol])
    if symbol in _ONCE:
        while alternative[0] in used:
            alternative = _pick(draw, grammar[symbol])
        used.add(alternative[0])
    for word in alternative:
        words += _expand(draw, grammar, word, used) if word in grammar else [word]
    return words


def _pick(draw: random.Random, options: list[T]) -> T:
    return options[int(draw.random() * len(options))]


def label_of(text: str) -> int:
    """The place in `CLASS_NAMES` that the rules above give a review, from its text alone.

    Raises:
        ValueError: The text holds no opinion that counts, or opinions that disagree.
    """
    found = {
        label
        for sentence in text.lower().split(".")
        for label in _opinions(re.findall(r"\w+|,", sentence))
    }
    if len(found) != 1:
        raise ValueError(
            f"{'Opinions disagree' if found else 'There is no opinion that counts'} in {text!r}."
        )
    return found.pop()


def _opinions(words: list[str]) -> list[int]:
    """The labels of the opinions in a sentence that count."""
    for contrast in ("but", "yet"):
        if contrast in words:
            words = words[words.index(contrast) + 1 :]
    if "although" in words:
        start = words.index("although")
        words = words[:start] or words[words.index(",") + 1 :]
    if not _OTHERS.isdisjoint(words):
        return []
    labels, negated = [], False
    for word in words:
        negated = word != "," and negated ^ (word in _NEGATORS)
        if word in _POSITIVE | _NEGATIVE:
            labels.append(int((word in _POSITIVE) ^ negated))
    return labels
