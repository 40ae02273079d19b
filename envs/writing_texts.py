"""Styles of a written line with the words that mark them, example lines, and topics. All of it is plain English."""

from collections.abc import Mapping, Sequence


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MARKERS: Mapping[str, frozenset[str]] = {
    "amazed": frozenset(
        _words(
            "amazed amazing awesome brilliant champion fantastic huge impressive incredible magic magical "
            "magnificent marvelous miracle spectacular stunning superb unbelievable whoa wonder wonderful wonders "
            "woohoo wow"
        )
    ),
    "cute": frozenset(
        _words(
            "adorable aw aww awww bunny cozy cuddle cuddles cuddly cute darling fluffy friend friends fuzzy hug "
            "hugs kiss kisses little lovely paws snuggle snuggly sweet teddy tiny yay"
        )
    ),
    "grumpy": frozenset(
        _words(
            "annoyed annoying annoys argh awful bah bored boring complain disgusting dreadful dull grumpy hate "
            "hates hmph horrible mess nasty nobody rotten rude ruined smells stinks stupid terrible ugh ugly "
            "useless worse worst"
        )
    ),
    "ghost": frozenset(
        _words(
            "blood bloody bones bony boo coffin creepy curse cursed dark darkness dead death eerie evil fear "
            "ghost ghosts grave haunted haunts howls midnight monster monsters scary scream screams shadow "
            "shadows skull spirit spooky vampire witch witches zombie"
        )
    ),
}
"""Style -> words that speak for it. No word speaks for two."""

LINES: Mapping[str, Sequence[str]] = {
    "amazed": (
        "Wow, the {topic} is a huge success!",
        "Wow, the {topic} can do a magic trick!",
        "Wow, the {topic} shines with incredible light!",
        "Wow, the {topic} was the wonder of our town!",
    ),
    "cute": (
        "Aww, the {topic} has tiny pink ears!",
        "Aww, the {topic} gave me a big hug!",
        "Aww, the {topic} is a sweet old friend!",
        "Aww, the {topic} wears a cozy red bow!",
    ),
    "grumpy": (
        "Ugh, the {topic} is boring once again!",
        "Ugh, the {topic} made an awful mess!",
        "Ugh, the {topic} stinks like a wet boot!",
        "Ugh, the {topic} was ruined by the mail!",
    ),
    "ghost": (
        "Boo, the {topic} hides in a dark cellar!",
        "Boo, the {topic} put a curse on you!",
        "Boo, the {topic} has blood on its hands!",
        "Boo, the {topic} screams from an open grave!",
    ),
}
"""Style -> lines that show it; each satisfies the judge about any topic."""

FUNCTION_WORDS = frozenset(
    _words(
        "a about all am an and are as at be but by can for from had has have he her his i in into is it its me my "
        "no not of on or our she so than that the their them they this to was we were when will with you your"
    )
)

TOPICS = _words(
    "apple attic bakery balloon banjo basket bell bench bicycle biscuit bottle bread bridge broom bucket butter "
    "button cabin cactus camel candle carpet castle cat ceiling cello chair cheese cherry chimney clock cloud "
    "coat coffee comet cookie cottage cow cradle cricket curtain daisy desert desk donkey door dragon drum duck "
    "dust eagle engine fairy farm feather fence fiddle fire fish flute fog forest fork fox frog frost garden "
    "garlic gate giant giraffe glacier glove goat goose grass guitar hammer harbour harp hedgehog hill honey "
    "horse ice island ivy jacket jam jungle kettle key kite kitchen ladder lake lamp lantern lemon letter library "
    "lighthouse lion lizard market marble meadow melon mill mirror mitten monkey moon mountain mouse mushroom "
    "needle nest ocean office olive onion orange orchard oven owl paint palace pancake panda parrot peach pear "
    "pebble pencil penguin pepper piano picnic pigeon planet plum pond pony potato puddle pumpkin puppet puppy "
    "rabbit radio rain rainbow raven ribbon river road roof rope rose sailor salt sandwich scarf school sheep "
    "shop sink snail snow soap sock soup spider spoon spring squirrel stable statue stone stove street suitcase "
    "sunset swamp swan table tailor tea teapot thunder ticket tiger toast tomato tortoise tower train tram tree "
    "trumpet tulip tunnel turnip umbrella valley village violin volcano wagon wall walnut waterfall well whale "
    "wheel whistle willow wind window winter wizard wolf wood zebra"
)
"""Singular nouns; none is a marker, a function word or part of a line."""
