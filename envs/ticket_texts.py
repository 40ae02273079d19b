"""Support tickets of three intents: sentence patterns times what people fill in, thousands of distinct tickets.

Every ticket starts with its subject, one word for the intent, as the form of a ticket system has it; the patterns
differ in wording and length. No text names a queue.
"""

import random
from collections.abc import Mapping, Sequence
from string import Formatter

INTENTS = ("payment", "delivery", "access")

_ITEMS = (
    "the headphones",
    "a desk lamp",
    "the running shoes",
    "a coffee grinder",
    "two books",
    "a winter jacket",
    "a keyboard",
)
_WHEN = ("yesterday", "on Monday", "last week", "this morning", "two days ago", "on the 3rd", "at the weekend")
_AMOUNTS = ("12.50", "29 euros", "$80", "45 pounds", "$19.99", "130 euros", "$240")

_FILLERS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "payment": {
        "amount": _AMOUNTS,
        "when": _WHEN,
        "item": _ITEMS,
        "card": ("my credit card", "my debit card", "my bank account", "my PayPal account", "our company card"),
        "plan": ("the yearly plan", "the trial", "my subscription", "the family plan", "the basic plan"),
        "paper": ("an invoice", "a receipt", "a tax invoice", "a corrected bill", "a payment confirmation"),
    },
    "delivery": {
        "when": _WHEN,
        "item": _ITEMS,
        "thing": ("parcel", "package", "order", "shipment", "box"),
        "place": ("my neighbour", "the wrong house", "our old address", "a locker across town", "the reception desk"),
        "stuck": ("in transit", "at the depot", "at customs", "out for delivery", "at the sorting centre"),
        "damage": ("crushed", "soaked", "torn open", "half empty", "broken at one corner"),
    },
    "access": {
        "when": _WHEN,
        "device": ("my phone", "my laptop", "the tablet", "my work computer", "the app", "the website"),
        "secret": ("password", "PIN", "passphrase", "login code", "recovery code"),
        "message": ("invalid user", "wrong password", "too many attempts", "session expired", "access denied"),
        "person": ("my colleague", "our new trainee", "my wife", "my business partner", "the new manager"),
        "mail": ("the reset email", "the verification email", "the text with the code", "the activation link"),
    },
}

_PATTERNS: Mapping[str, Sequence[str]] = {
    "payment": (
        "You took {amount} from {card} twice.",
        "I was charged {amount} {when} and do not know what for.",
        "When will I get my {amount} back for {item}?",
        "I returned {item} {when} but the refund has not shown up.",
        "Please send me {paper} for {item}.",
        "I need {paper} for what I paid {when}.",
        "The price on my statement is {amount}, that is more than I agreed to pay.",
        "My payment of {amount} was declined although {card} is fine.",
        "Why does {plan} cost {amount} more than before?",
        "I cancelled {plan} {when} and you still billed {card}.",
        "A discount was promised for {item}, yet I paid the full {amount}.",
        "There is a fee of {amount} on my bill that nobody mentioned.",
        "Can I pay for {item} in instalments instead of {amount} at once?",
        "I would like my money back for {item}.",
        "The checkout charged {card} but then said the payment failed.",
        "Could you change the billing from {card} to a bank transfer?",
        "My bank shows two payments of {amount} {when}.",
        "The VAT number is missing on {paper} you sent {when}.",
        "How do I get a refund of {amount} to {card}?",
        "{plan} renewed {when} without asking and {amount} is gone.",
        "Your invoice says {amount} is overdue, but I paid it {when}.",
        "I used a voucher for {item} and it was not taken off the total.",
        "Which payment methods do you take? {card} is refused.",
        "I was billed {amount} for {item} that I never bought.",
    ),
    "delivery": (
        "My {thing} with {item} has not arrived yet.",
        "The tracking has said the {thing} is {stuck} since it left {when}.",
        "Where is the {thing} I ordered {when}?",
        "The courier left my {thing} with {place}.",
        "The {thing} came {when} and it was {damage}.",
        "I got {item} that I did not order, somebody mixed up the boxes.",
        "Can you ship {item} to a different address?",
        "Nobody rang, but the driver says he tried to deliver the {thing} {when}.",
        "My {thing} came without {item}, the rest is there.",
        "How long does shipping of {item} take?",
        "The carrier sent my {thing} to {place}.",
        "It says delivered {when}, but there is no {thing} at my door.",
        "Please hold the {thing} until I am back from holiday.",
        "I moved {when}, can the {thing} still be redirected?",
        "The courier lost {item}, what now?",
        "My {thing} has been {stuck} for nine days.",
        "Could {item} be delivered in the evening? I work all day.",
        "The driver threw the {thing} over the fence and {item} arrived {damage}.",
        "I was home {when} and still found a card saying I missed the {thing}.",
        "Do you ship {item} abroad, and how fast?",
        "The tracking number for {item} does not exist at the carrier.",
        "When will the {thing} that is {stuck} reach me?",
        "The estimated arrival of {item} has moved again, it should have come {when}.",
        "My {thing} was dropped at {place} and they will not hand it over.",
    ),
    "access": (
        "I forgot my {secret} and cannot get in.",
        "The login page on {device} only says {message}.",
        "My account has been locked since I mistyped the {secret} {when}.",
        "I never receive {mail}.",
        "How do I reset my {secret}?",
        "I cannot sign in on {device} any more.",
        "Since I got a new phone the {secret} is not accepted.",
        "{mail} arrives, but it leads to an error: {message}.",
        "Somebody logged in to my account {when}, please lock it.",
        "Please give {person} a login of their own.",
        "I want to change the email address that I sign in with.",
        "Every time I log in on {device} I am thrown out again after a minute.",
        "The {secret} worked {when}, today it says {message}.",
        "Two-factor sign-in keeps asking for a code, and {mail} does not come.",
        "{device} signs me out and then shows {message}.",
        "My user name is not recognised on {device}.",
        "I am locked out, the security question does not accept my answer.",
        "Can you unlock the account of {person}? It says {message}.",
        "I set a new {secret} {when} and {device} still wants the old one.",
        "How can I turn off two-factor login on {device}?",
        "My profile was disabled {when}, I cannot log in at all.",
        "{person} left, please remove their access to our account.",
        "Is there a way to sign in without the {secret}?",
        "I typed the {secret} correctly on {device}, yet it says {message}.",
    ),
}

_OPENERS = ("", "", "", "Hello. ", "Hi there. ", "Good morning. ", "Hi team. ", "Dear support. ", "Hey. ")
_CLOSERS = ("", "", "", " Please help.", " Thanks.", " What should I do?", " Can you check?", " It is urgent.")


def draw_tickets(intent: str, count: int, rng: random.Random) -> list[str]:
    """`count` tickets of one intent, no two with the same body; the patterns take turns in random order.

    Raises ValueError where the patterns do not yield that many.
    """
    seen: set[str] = set()
    tickets: list[str] = []
    for _ in range(count):  # rounds over all patterns; far fewer are needed unless the patterns are nearly used up
        for pattern in rng.sample(_PATTERNS[intent], len(_PATTERNS[intent])):
            body = _fill(pattern, _FILLERS[intent], rng)
            if body in seen:
                continue
            seen.add(body)
            tickets.append(f"{intent.capitalize()}: {rng.choice(_OPENERS)}{body}{rng.choice(_CLOSERS)}")
            if len(tickets) == count:
                return tickets
    raise ValueError(f"the patterns do not yield {count} different {intent} tickets; ask for fewer")


def _fill(pattern: str, fillers: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    names = {name for _, name, _, _ in Formatter().parse(pattern) if name}
    body = pattern.format(**{name: rng.choice(fillers[name]) for name in sorted(names)})
    return body[0].upper() + body[1:]
