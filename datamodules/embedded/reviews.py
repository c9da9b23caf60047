"""Generated reviews of films and laptops whose label only the order of the words tells.

A review has one verdict. These rules find it in the text (a test applies them):

1. Adjectives and verbs of opinion (good, dull, loved, hated) have a polarity; intensifiers (truly)
   do not change it.
2. A negator (not, never, hardly, nothing, far from, by no means) earlier in the clause turns it:
   "not very good" is negative, "I never found the plot dull" positive. Clauses end at a comma.
3. What is conceded does not count: all before "but" and "yet", and the clause that "although"
   begins.
4. What others think does not count ("my brother loved it", "the trailer promised a great film"),
   nor do words for characters of the story ("a terrible king") and for other devices ("it replaced
   a clumsy typewriter").
5. The opinions that are left agree, and there is at least one.

The same words serve both labels, so counting them helps little: affirmed opinions are a few more
than negated ones.
"""

import random
import re
from typing import TypeVar

MIN_WORDS = 5
MAX_WORDS = 40

Grammar = dict[str, list[list[str]]]
T = TypeVar("T")

# A symbol (upper case) expands to one of its alternatives; the number before one is its weight.
# They are written for a positive verdict; `_MIRROR` turns them into those for a negative one.
_VERDICTS = """
LIKING = 16 PRAISE | 2 PRAISE , and PRAISE | 3 it BE a VERY GOOD THING | it BE NO a TRULY BAD THING
       | 2 BLAME , but PRAISE | FOES , but PRAISE | BLAME , yet PRAISE | FOES , yet PRAISE
       | although BLAME , PRAISE | although FOES , PRAISE | PRAISE , although BLAME
       | PRAISE , although FOES
PRAISE = 5 FACT | I found the ASPECT VERY GOOD | 2 I LOVE the ASPECT | 2 I LOVED the ASPECT
       | I never found the ASPECT TRULY BAD | I did not HATE the ASPECT
FACT   = 5 the ASPECT BE VERY GOOD | the ASPECT seemed VERY GOOD
       | 2 the ASPECT BE NOT BAD | nothing about the ASPECT BE TRULY BAD
FANS   = my PERSON LOVED it | my PERSON said that FACT | most PEOPLE find the ASPECT VERY GOOD
       | the WITNESS promised a VERY GOOD THING | my PERSON never HATED it
       | my PERSON did not HATE the ASPECT
"""
_PAIRS = "GOOD-BAD LOVE-HATE LOVED-HATED LIKING-DISLIKING PRAISE-BLAME FACT-FAULT FANS-FOES"
_MIRROR = dict(pair.split("-") for pair in _PAIRS.split())
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
       | most PEOPLE LOVED it , but my PERSON HATED it
       | most PEOPLE HATED it , but my PERSON LOVED it
WHEN   = on Sunday | last week | in March | two days ago | after work
"""
_FILM = """
THING  = film | movie | comedy | thriller
ASPECT = plot | ending | acting | music | script | dialogue | cast | humour | story | film
GOOD   = good | great | wonderful | brilliant | charming | clever | funny | moving
BAD    = bad | terrible | dreadful | poor | weak | dull | boring | silly
WITNESS = trailer | poster | title | preview
PEOPLE = critics | viewers | reviewers | students
TRAIT  = great | wonderful | brilliant | charming | clever | funny | bad | terrible | dreadful
       | weak | dull | silly
HERO   = king | teacher | detective | singer
RIVAL  = queen | thief | lawyer | sailor
SCENE  = it follows a TRAIT HERO and a TRAIT RIVAL | a TRAIT HERO hunts a TRAIT RIVAL
       | the TRAIT HERO LOVED the TRAIT RIVAL | the TRAIT HERO HATED the TRAIT RIVAL
NEUTRAL = I saw it WHEN | I saw it WHEN with my PERSON | I had never heard of the director
       | I did not know the director
        | it BE not a long THING | there BE no sequel to it | the THING runs for two hours
"""
_LAPTOP = """
THING  = laptop | computer | machine | device
ASPECT = screen | battery | sound | design | keyboard | software | camera | case | manual | laptop
GOOD   = good | great | wonderful | brilliant | clever | solid | pleasant | reliable
BAD    = bad | terrible | dreadful | poor | weak | clumsy | flimsy | useless
WITNESS = advert | shop | seller | box
PEOPLE = testers | buyers | reviewers | students
TRAIT  = good | great | wonderful | clever | solid | reliable | bad | terrible | poor | clumsy
       | flimsy | useless
HERO   = phone | tablet | printer | camcorder
RIVAL  = typewriter | radio | recorder | calculator
SCENE  = it replaced a TRAIT HERO and a TRAIT RIVAL | I also own a TRAIT HERO
       | it stands beside a TRAIT RIVAL
       | my PERSON gave me a TRAIT HERO with it
NEUTRAL = I bought it WHEN | I bought it WHEN with my PERSON | I had never heard of the brand
       | I did not know the brand
        | it BE not a large THING | there BE no cable with it | the THING came in two boxes
"""
# The sentences of a review; LIKING carries the verdict.
_LAYOUTS = """
4 LIKING | 3 LIKING LIKING | LIKING ASIDE | ASIDE LIKING | LIKING ASIDE LIKING | ASIDE LIKING ASIDE
       | LIKING LIKING ASIDE | ASIDE LIKING LIKING
"""
# No word of these occurs twice in a review.
_ONCE = {"ASPECT", "PERSON", "PEOPLE", "WITNESS", "GOOD", "BAD", "TRAIT"}


def _alternatives(text: str) -> list[list[str]]:
    """Lists of words; an alternative with a number before it is repeated as many times."""
    alternatives = []
    for alternative in text.split("|"):
        words = alternative.split()
        times = int(words.pop(0)) if words and words[0].isdigit() else 1
        alternatives += [words] * times
    return alternatives


def _mirrored(words: list[str]) -> list[str]:
    return [_MIRROR.get(word, word) for word in words]


def _rules(text: str) -> Grammar:
    rules = (rule.split("=") for rule in re.split(r"\n(?=\S)", text.strip()))
    return {symbol.strip(): _alternatives(alternatives) for symbol, alternatives in rules}


def _grammar(subject: str, tense: str) -> Grammar:
    verdicts = _rules(_VERDICTS)
    mirrored = {
        _MIRROR[symbol]: [_mirrored(words) for words in verdicts[symbol]] for symbol in verdicts
    }
    return {**verdicts, **mirrored, **_rules(_SHARED), **_rules(subject), "BE": [[tense]]}


LAYOUTS = _alternatives(_LAYOUTS)
GRAMMARS = [_grammar(subject, tense) for subject in (_FILM, _LAPTOP) for tense in ("is", "was")]


def generate(
    seed: int = 0, train: int = 8000, val: int = 1000, test: int = 1000
) -> dict[str, tuple[list[str], list[int]]]:
    """Generates splits of reviews, and their labels: 0 is negative, 1 is positive.

    Reviews have 5 to 40 words; no two are equal, and half of each split are positive (one more if
    its size is odd). The same seed gives the same reviews on every machine.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, tuple[list[str], list[int]]] = {}
    for split, size in (("train", train), ("val", val), ("test", test)):
        labels = [1 - i % 2 for i in range(size)]
        rng.shuffle(labels)
        splits[split] = [_unseen_review(rng, label, seen) for label in labels], labels
    return splits


def _unseen_review(rng: random.Random, label: int, seen: set[str]) -> str:
    while True:
        text = _review(rng, label)
        if text not in seen and MIN_WORDS <= text.count(" ") + 1 <= MAX_WORDS:
            seen.add(text)
            return text


def _review(rng: random.Random, label: int) -> str:
    grammar = _choose(rng, GRAMMARS)
    layout = _choose(rng, LAYOUTS)
    used: set[str] = set()
    symbols = layout if label else _mirrored(layout)
    sentences = [" ".join(_expand(rng, grammar, symbol, used)) for symbol in symbols]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences).replace(" ,", ",")


def _expand(rng: random.Random, grammar: Grammar, symbol: str, used: set[str]) -> list[str]:
    """The words that a symbol expands to."""
    words: list[str] = []
    alternative = _choose(rng, grammar[symbol])
    if symbol in _ONCE:
        while alternative[0] in used:
            alternative = _choose(rng, grammar[symbol])
        used.add(alternative[0])
    for word in alternative:
        words += _expand(rng, grammar, word, used) if word in grammar else [word]
    return words


def _choose(rng: random.Random, options: list[T]) -> T:
    return options[int(rng.random() * len(options))]
