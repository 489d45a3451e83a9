"""A toy world of people, objects and places, in which the demo model is trained and tested.

Pure Python, no torch, so that tests and benchmarks can import it. `document` writes one chat full
of statements and questions for training; `heldout` writes chats that end with a question about a
fact that no training document states; `heldout_text` is plain text for measuring perplexity.
Next: train_demo.py, which turns these documents into a tokenizer and a model.

A fact is (kind, subject, value). One fact in eight, chosen by a checksum of those three words, is
held out: training documents never state it, so a right answer about it can't be memory.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

Messages = list[dict[str, str]]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Anna Tom Mary John Lucy Peter Sara David Emma Paul Nina Mark Julia Simon Clara Jack Laura "
    "Oscar Alice Henry Rosa Felix Maria Leo Eva Martin Ella Victor Grace Daniel Ruth Max Helen "
    "Adam Lily George Kate Ben Sophie Robert"
)
OBJECTS = _words(
    "key book lamp ball cup hat coat phone bag box letter map knife spoon plate bottle clock "
    "camera guitar drum ring coin pen pencil ruler candle basket bucket hammer ladder rope chair "
    "pillow blanket mirror towel brush comb shoe boot glove scarf shirt belt watch ticket wallet "
    "suitcase laptop radio doll kite bicycle vase stone feather flute shovel flag torch"
)
ROOMS = _words(
    "kitchen garden garage bedroom bathroom office cellar attic hall library school park museum "
    "hotel station bakery church barn shop theatre"
)
FURNITURE = {
    "table": ("on", "under"),
    "bed": ("under", "on"),
    "shelf": ("on",),
    "drawer": ("in",),
    "cupboard": ("in", "on"),
    "sofa": ("on", "under"),
    "desk": ("on", "under"),
    "bench": ("on", "under"),
    "car": ("in", "under"),
    "fridge": ("in", "on"),
}
COLOURS = _words("red blue green yellow black white brown pink")
FOODS = _words(
    "bread cheese soup rice fish cake honey apples tea coffee pizza salad chocolate pasta eggs nuts"
)
MOODS = _words("happy tired sad hungry busy sick late angry")

TOLD_KINDS = ("place", "holder", "at", "colour", "likes")
STATEMENTS = {
    "put": (
        "{n} put the {c}{o} {x}.",
        "{n} put the {c}{o} {x}.",
        "{n} left the {c}{o} {x}.",
        "{n} placed the {c}{o} {x}.",
        "{n} hid the {c}{o} {x}.",
    ),
    "place": (
        "The {c}{o} is {x}.",
        "The {c}{o} is {x}.",
        "The {c}{o} is now {x}.",
        "There is a {c}{o} {x}.",
        "I put the {c}{o} {x}.",
        "I left the {c}{o} {x}.",
        "You can find the {c}{o} {x}.",
    ),
    "holder": (
        "{n} has the {c}{o}.",
        "{n} has the {c}{o}.",
        "{n} has a {c}{o}.",
        "{n} took the {c}{o}.",
        "{n} is holding the {c}{o}.",
        "{n} picked up the {c}{o}.",
        "I gave the {c}{o} to {n}.",
        "{m} gave the {c}{o} to {n}.",
    ),
    "at": (
        "{n} is {x}.",
        "{n} is {x}.",
        "{n} is now {x}.",
        "{n} went to {y}.",
        "{n} walked to {y}.",
        "{n} is waiting {x}.",
    ),
    "colour": ("The {o} is {c}.", "The {o} is {c}.", "The colour of the {o} is {c}."),
    "likes": ("{n} likes {f}.", "{n} loves {f}.", "{n} likes to eat {f}."),
}
QUESTIONS = {
    "place": (
        "Where is the {o}?",
        "Where is the {o}?",
        "Where is the {o} now?",
        "Where can I find the {o}?",
        "Do you know where the {o} is?",
        "Tell me where the {o} is.",
    ),
    "holder": ("Who has the {o}?", "Who has the {o}?", "Who has the {o} now?"),
    "at": (
        "Where is {n}?",
        "Where is {n}?",
        "Where is {n} now?",
        "Do you know where {n} is?",
        "Tell me where {n} is.",
    ),
    "colour": (
        "What colour is the {o}?",
        "What color is the {o}?",
        "What is the colour of the {o}?",
    ),
    "likes": ("What does {n} like?", "What does {n} like to eat?", "What does {n} like?"),
    "put": ("Who put the {o} there?", "Who left the {o} there?", "Who put the {o} {x}?"),
}
SMALL_TALK = (
    (
        ("Hello!", "Hello.", "Hi!", "Hi", "Hello", "Good morning.", "Hey!", "Hi there!"),
        "Hello! Tell me who is where, and ask me later.",
    ),
    (("Thanks.", "Thank you!", "Thank you.", "Thanks!", "Great, thanks."), "You are welcome."),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a robot?"),
        "I am a small demo model. I remember what you tell me.",
    ),
    (
        ("What can you do?", "Can you help me?", "Help!", "What do you know?", "What is this?"),
        "Tell me where people and things are, and ask me about them later.",
    ),
    (("How are you?", "How are you today?", "Are you well?"), "I am fine, thank you."),
    (("Goodbye.", "Bye!", "Good night.", "See you later."), "Goodbye!"),
)
FILLERS = (
    "It is raining today.",
    "The sun is shining.",
    "It is a long day.",
    "The wind is strong.",
    "We had a good dinner.",
    "The train was late again.",
    "It was a cold night.",
    "The birds are singing.",
    "Nobody knows what time it is.",
    "It is almost noon.",
    "The street is quiet.",
    "That was a long story.",
    "We will see.",
    "It does not matter.",
    "The music is too loud.",
    "Tomorrow will be a better day.",
)
ACKNOWLEDGEMENT = "Okay."
SYSTEM_LINES = ("You are a helpful assistant.", "You are a small demo model.", "Answer briefly.")
UNKNOWN = "I don't know."

_TOKEN = re.compile(r"\w+|[^\w\s]")


def count_tokens(text: str) -> int:
    """Number of tokens by the demo's tokenizer: one per word and per punctuation mark."""
    return len(_TOKEN.findall(text))


def is_heldout(kind: str, subject: str, value: str) -> bool:
    """Whether a fact is kept out of every training document (one in eight, by checksum)."""
    return zlib.crc32(f"{kind}/{subject}/{value}".encode()) % 8 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A statement; `where` is its phrase with preposition, for kinds that have one."""

    kind: str
    subject: str
    value: str
    where: str = ""

    @property
    def heldout(self) -> bool:
        return is_heldout(self.kind, self.subject, self.value)

    @property
    def answer(self) -> str:
        if self.kind == "place":
            return f"The {self.subject} is {self.where}."
        if self.kind == "at":
            return f"{self.subject} is {self.where}."
        if self.kind == "holder":
            return f"{self.value} has the {self.subject}."
        if self.kind == "colour":
            return f"The {self.subject} is {self.value}."
        if self.kind == "likes":
            return f"{self.subject} likes {self.value}."
        return f"{self.value} put the {self.subject} {self.where}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question in a chat: the index of its answer's message, and the distance to its fact.

    `distance` is in tokens, from the end of the statement to the start of the answer; None if the
    right answer is that nobody told.
    """

    message: int
    kind: str
    answer: str
    distance: int | None
    fact: Fact | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    messages: Messages
    questions: list[Question]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A chat that ends with the user's question, and the one right answer."""

    messages: Messages
    question: str
    answer: str
    distance_tokens: int
    kind: str
    fact: Fact

    def __iter__(self):
        """Unpacks as (messages, question, answer, distance_tokens)."""
        return iter((self.messages, self.question, self.answer, self.distance_tokens))


@dataclass(slots=True)
class Chat:
    """A chat being written, and everything told in it so far."""

    rng: random.Random
    update_rate: float = 0.03
    messages: Messages = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    facts: dict[tuple[str, str], Fact] = field(default_factory=dict)
    told_at: dict[tuple[str, str], int] = field(default_factory=dict)
    unasked: list[tuple[str, str]] = field(default_factory=list)
    reserved: set[str] = field(default_factory=set)
    tokens: int = 1
    _open: list[str] = field(default_factory=list)

    # What can be told

    def _allowed(self, fact: Fact) -> bool:
        return not fact.heldout and fact.subject not in self.reserved

    def _fresh(self, kind: str, subject: str) -> bool:
        """Whether a statement may be made about this: new, or one of the rare updates."""
        keys = [(kind, subject)]
        if kind in ("place", "holder"):
            keys = [("place", subject), ("holder", subject)]
        return not any(k in self.facts for k in keys) or self.rng.random() < self.update_rate

    def _draw(self, kind: str) -> Fact | None:
        """Draw a fact of this kind that may be told now, or None after a few failed tries."""
        for _ in range(8):
            subject = self.rng.choice(NAMES if kind in ("at", "likes") else OBJECTS)
            fact = self.make_fact(kind, subject)
            if self._allowed(fact) and self._fresh(kind, subject):
                return fact
        return None

    def make_fact(self, kind: str, subject: str) -> Fact:
        """A random fact about `subject`, held out or not."""
        rng = self.rng
        if kind == "place":
            if rng.random() < 0.55:
                value = rng.choice(ROOMS)
                return Fact(kind=kind, subject=subject, value=value, where=f"in the {value}")
            value = rng.choice(list(FURNITURE))
            where = f"{rng.choice(FURNITURE[value])} the {value}"
            return Fact(kind=kind, subject=subject, value=value, where=where)
        if kind == "at":
            value = rng.choice(ROOMS)
            return Fact(kind=kind, subject=subject, value=value, where=f"in the {value}")
        values = {"holder": NAMES, "colour": COLOURS, "likes": FOODS}[kind]
        return Fact(kind=kind, subject=subject, value=rng.choice(values))

    # Telling

    def tell(self, fact: Fact) -> None:
        """Add a sentence that states `fact` to the open message."""
        rng, kind, obj = self.rng, fact.kind, fact.subject
        stated, wording = [fact], kind
        slots = {"o": obj, "n": fact.subject, "x": fact.where, "f": fact.value, "c": "", "m": ""}
        slots["y"] = fact.where.removeprefix("in ")
        if kind == "place":
            self._forget("holder", obj)
            self._forget("put", obj)
            mover = Fact(kind="put", subject=obj, value=rng.choice(NAMES), where=fact.where)
            if rng.random() < 0.6 and not mover.heldout:
                stated.append(mover)
                slots["n"], wording = mover.value, "put"
        elif kind == "holder":
            self._forget("place", obj)
            self._forget("put", obj)
            slots["n"] = fact.value
            slots["m"] = rng.choice([n for n in NAMES if n != fact.value])
        elif kind == "colour":
            slots["c"] = fact.value
        if kind in ("place", "holder") and rng.random() < 0.2 and ("colour", obj) not in self.facts:
            colour = Fact(kind="colour", subject=obj, value=rng.choice(COLOURS))
            if self._allowed(colour):
                stated.append(colour)
                slots["c"] = colour.value + " "
        self.say(rng.choice(STATEMENTS[wording]).format(**slots))
        for each in stated:
            self._remember(each)

    def _remember(self, fact: Fact) -> None:
        key = (fact.kind, fact.subject)
        self.facts[key] = fact
        self.told_at[key] = self.tokens
        if key not in self.unasked:
            self.unasked.append(key)

    def _forget(self, kind: str, subject: str) -> None:
        if self.facts.pop((kind, subject), None):
            self.told_at.pop((kind, subject))
            if (kind, subject) in self.unasked:
                self.unasked.remove((kind, subject))

    def say(self, sentence: str) -> None:
        """Add a sentence to the open message."""
        if self.rng.random() < 0.05 and sentence.split()[0] not in NAMES:
            sentence = sentence[0].lower() + sentence[1:]
        self._open.append(sentence)
        self.tokens += count_tokens(sentence)

    def statements(self, n: int) -> None:
        """Add `n` sentences, mostly facts, and sometimes one that tells nothing."""
        for _ in range(n):
            if self.rng.random() < 0.1:
                filler = self.rng.choice(FILLERS)
                if self.rng.random() < 0.4:
                    filler = f"{self.rng.choice(NAMES)} is {self.rng.choice(MOODS)}."
                self.say(filler)
                continue
            (kind,) = self.rng.choices(TOLD_KINDS, (5, 2, 3, 2, 2))
            if fact := self._draw(kind):
                self.tell(fact)

    def close(self, role: str, end: bool = False) -> None:
        """End the open message; `end` may drop its last full stop, as people do."""
        text = " ".join(self._open)
        if end and text[-1:] in ".?" and self.rng.random() < 0.08:
            text = text[:-1]
            self.tokens -= 1
        if text:
            self.messages.append({"role": role, "content": text})
            self.tokens += 2
        self._open = []

    def reply(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.tokens += 2 + count_tokens(text)

    def told(self, n: int) -> None:
        """A turn of `n` statements, and the assistant's acknowledgement."""
        self.statements(n)
        if self._open:
            self.close("user", end=True)
            self.reply(ACKNOWLEDGEMENT)

    def small_talk(self) -> None:
        asked, answer = self.rng.choice(SMALL_TALK)
        self.say(self.rng.choice(asked))
        self.close("user")
        self.reply(answer)

    # Asking

    def ask(self, key: tuple[str, str]) -> Question:
        """End the open message with a question about what was told, and answer it."""
        fact = self.facts[key]
        if key in self.unasked:
            self.unasked.remove(key)
        kind = fact.kind
        if kind == "holder" and self.rng.random() < 0.35:
            kind = "place"
        return self._put(kind, fact.subject, fact)

    def ask_untold(self) -> None:
        """Ask something that nobody told: about a stranger, or another property."""
        for _ in range(20):
            kind = self.rng.choice(list(QUESTIONS))
            subject = self.rng.choice(NAMES if kind in ("at", "likes") else OBJECTS)
            if self.facts and self.rng.random() < 0.5:
                subject = self.rng.choice(list(self.facts))[1]
            if (subject in NAMES) != (kind in ("at", "likes")) or subject in self.reserved:
                continue
            known = {(kind, subject)}
            if kind == "place":
                known.add(("holder", subject))
            if not known & set(self.facts):
                self._put(kind, subject, None)
                return

    def _put(self, kind: str, subject: str, fact: Fact | None) -> Question:
        rng = self.rng
        where = fact.where if fact else f"in the {rng.choice(ROOMS)}"
        text = rng.choice(QUESTIONS[kind]).format(o=subject, n=subject, x=where)
        if rng.random() < 0.1:
            text = text[0].lower() + text[1:]
        self.say(text)
        self.close("user", end=True)
        answer = fact.answer if fact else UNKNOWN
        distance = None
        if fact:
            distance = self.tokens + 1 - self.told_at[(fact.kind, fact.subject)]
        question = Question(
            message=len(self.messages), kind=kind, answer=answer, distance=distance, fact=fact
        )
        self.reply(answer)
        self.questions.append(question)
        return question

    def turn(self, question_rate: float) -> None:
        """Add one random exchange."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.03:
            self.small_talk()
        elif draw < 0.03 + 0.97 * question_rate and self.unasked:
            if rng.random() < 0.3:
                self.statements(rng.randint(1, 4))
            if rng.random() < 0.09:
                self.ask_untold()
            elif self.unasked:
                self.ask(rng.choice(self.unasked))
            self.close("user")
        else:
            self.told(rng.randint(1, 6))


def _open_chat(rng: random.Random, tokens: int) -> Chat:
    """Begin a chat, sometimes with a system message, sometimes with a long first story."""
    chat = Chat(rng)
    if rng.random() < 0.1:
        chat.say(rng.choice(SYSTEM_LINES))
        if rng.random() < 0.3:
            chat.statements(rng.randint(1, 6))
        chat.close("system")
    if rng.random() < 0.1:
        chat.small_talk()
    if rng.random() < 0.4:
        limit = rng.uniform(0.1, 0.6) * tokens
        while chat.tokens < limit:
            chat.statements(2)
        if chat._open and chat.unasked and rng.random() < 0.5:
            chat.ask(rng.choice(chat.unasked))
        elif chat._open:
            chat.close("user", end=True)
            chat.reply(ACKNOWLEDGEMENT)
    return chat


def document(rng: random.Random, tokens: int) -> Document:
    """One training chat of at most about `tokens` tokens (by `count_tokens`)."""
    chat = _open_chat(rng, tokens)
    rate = rng.uniform(0.5, 0.9)
    while chat.tokens < tokens:
        chat.turn(rate if chat.tokens < 0.6 * tokens else 0.9)
    while chat.tokens > tokens and len(chat.messages) > 2:
        for _ in range(2 if chat.messages[-1]["role"] == "assistant" else 1):
            chat.tokens -= 2 + count_tokens(chat.messages.pop()["content"])
    kept = [q for q in chat.questions if q.message < len(chat.messages)]
    return Document(messages=chat.messages, questions=kept)


def _one_heldout(rng: random.Random, distance: int) -> HeldOut:
    """Make a chat that asks for a held-out fact about `distance` tokens after it was told."""
    chat = Chat(rng, update_rate=0.0)
    target = None
    while target is None or not target.heldout:
        (kind,) = rng.choices(TOLD_KINDS, (4, 2, 3, 2, 2))
        target = chat.make_fact(kind, rng.choice(NAMES if kind in ("at", "likes") else OBJECTS))
    chat.reserved.add(target.subject)
    before = rng.randint(0, 200)
    while chat.tokens < before:
        chat.turn(0.5)
    chat.statements(rng.randint(0, 2))
    chat.tell(target)
    told = chat.tokens
    if distance > 40:
        chat.statements(rng.randint(0, 3))
        chat.close("user", end=True)
        chat.reply(ACKNOWLEDGEMENT)
    hidden = [k for k in chat.unasked if k[1] == target.subject]
    chat.unasked = [k for k in chat.unasked if k[1] != target.subject]
    while chat.tokens - told < distance - 45:
        chat.turn(0.5)
    while chat.tokens - told < distance - 15:
        chat.statements(1)
    chat.unasked += hidden
    question = chat.ask((target.kind, target.subject))
    return HeldOut(
        messages=chat.messages[: question.message],
        question=chat.messages[question.message - 1]["content"],
        answer=question.answer,
        distance_tokens=question.distance or 0,
        kind=question.kind,
        fact=target,
    )


def heldout(seed: int, n: int, max_distance: int = 1000) -> list[HeldOut]:
    """Make `n` chats that ask for facts unseen in training, 10 to `max_distance` tokens ago.

    Each unpacks as (messages, question, answer, distance_tokens); `messages` ends with the
    user's question, and the distances are spread evenly.
    """
    rng = random.Random(f"heldout/{seed}")
    found: list[HeldOut] = []
    while len(found) < n:
        low = 10 + (max_distance - 10) * len(found) / n
        item = _one_heldout(rng, round(low + rng.random() * (max_distance - 10) / n))
        if item.distance_tokens <= max_distance:
            found.append(item)
    return found


def heldout_untold(seed: int, n: int, tokens: int = 400) -> list[tuple[Messages, str]]:
    """Make `n` chats of up to `tokens` tokens that ask what nobody told: (messages, answer)."""
    rng = random.Random(f"untold/{seed}")
    found = []
    for _ in range(n):
        chat = Chat(rng, update_rate=0.0)
        length = rng.randint(10, tokens)
        while chat.tokens < length:
            chat.turn(0.5)
        asked = len(chat.questions)
        while len(chat.questions) == asked:
            chat.ask_untold()
        found.append((chat.messages[: chat.questions[-1].message], UNKNOWN))
    return found


def heldout_text(seed: int, tokens: int) -> str:
    """Plain text of at least `tokens` tokens, without chat marks, for measuring perplexity."""
    rng = random.Random(f"text/{seed}")
    lines: list[str] = []
    total = 0
    while total < tokens:
        for message in document(rng, 1200).messages:
            lines.append(message["content"])
            total += count_tokens(message["content"])
    return " ".join(lines)


def vocabulary() -> Sequence[str]:
    """All entities, to check that a tokenizer has one token for each."""
    return [*NAMES, *OBJECTS, *ROOMS, *FURNITURE, *COLOURS, *FOODS]
