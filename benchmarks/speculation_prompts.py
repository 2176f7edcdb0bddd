"""What speculation.py asks the model: chats in which it quotes or edits a text, fills in a form, or talks.

The default model has 135 million parameters and follows instructions poorly, so a chat that quotes or edits shows two
earlier turns of the same kind. Each round has a text of its own: the suffix drafter remembers recent answers. Owns the
texts; knows no engine.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

Chat = list[dict[str, str]]


class Task(NamedTuple):
    """One request: its chat, its temperature, and the schema that its answer follows."""

    chat: Chat
    temperature: float = 0.0
    schema: dict[str, Any] | None = None


TEXTS = (
    "Martha opened the bakery at five in the morning. The first loaves were rye, then came the rolls with poppy seeds. "
    "By seven o'clock Martha had sold most of the bread, and only two cakes were left in the window. A boy from the "
    "school bought the smaller one and paid with a jar of coins. Martha counted them twice and smiled.",
    "The lighthouse on Gull Rock was built in 1871. Its keeper, Edwin, climbed the stairs four times every night to "
    "wind the clock that turned the lamp. In the winter of the great storm Edwin stayed awake for three days. When the "
    "ships came home at last, the whole village carried Edwin down to the harbour and gave him a new coat.",
    "Our library lends books, maps and old records. Clara sorts the maps on Tuesdays, because the reading room is "
    "empty then. Last week Clara found a letter inside an atlas from 1902. It was written in green ink and asked for "
    "the way to the river. Clara has put it into a glass case beside the door, where everyone can read it.",
    "To repair the old radio, Victor first removed the back panel and cleaned the dust from the coils. One wire had "
    "broken near the speaker. Victor soldered it with great care and waited until the metal was cold. Then he turned "
    "the dial slowly, and a dance band from far away began to play. Victor sat down on the floor and listened.",
    "The garden behind the museum has forty kinds of roses. Helen waters them before sunrise, when the air is still "
    "cool. In June the visitors may walk between the beds and smell the flowers. Helen answers their questions and "
    "sells small plants at the gate. The white rose by the wall was planted by Helen herself.",
    "On the last day of the trip, Oscar wanted to see the mountain lake. The path was steep and full of loose stones. "
    "After two hours Oscar reached a wooden hut, where an old man sold tea and honey. The lake lay behind it, dark "
    "blue and perfectly calm. Oscar took one photograph and then put the camera away.",
    "The night train leaves the capital at ten and arrives at the coast before breakfast. Irene has been its conductor "
    "for nine years. She knows which passengers snore and which of them forget their bags. One winter Irene found a "
    "violin in an empty compartment. Nobody came for it, so Irene learned to play.",
    "Every autumn the school puts on a play in the old barn. This year Hugo paints the scenery: a forest, a castle and "
    "a wide green sea. The paint must dry for two days before the actors may stand near it. Hugo keeps the brushes in "
    "warm water and covers the sea with a sheet. On the first evening the children cheered for Hugo.",
    "A small clinic stands at the end of the valley road. Doctor Nadia visits the farms on horseback when the snow is "
    "deep. She carries bandages, salt and a thermometer in a leather bag. In February Nadia rode for six hours to help "
    "a shepherd with a broken arm. The shepherd sent Nadia a round cheese in the spring.",
    "The bridge over the canal is closed until Friday. Simon and two other workers are replacing the wooden planks, "
    "which had become soft after the flood. Each plank is cut, oiled and fixed with eight long screws. Simon checks "
    "every screw by hand. When the bridge opens again, Simon will be the first to cross it on his bicycle.",
    "In the workshop on Mill Street, Paula builds clocks out of pear wood. A large one takes her eleven weeks. The "
    "wheels are cut with a thin saw and polished with chalk. Paula never uses glue, because glue grows old faster than "
    "wood. A clock by Paula hangs in the town hall and has not been late since it was made.",
    "The football club has a new coach. Walter used to drive the bus of the team, and he knows every player since "
    "childhood. He makes them run along the river twice a week. After the third game Walter changed the goalkeeper, "
    "and the club won for the first time in a year. The newspaper printed a picture of Walter on its first page.",
)
NAMES = ("Rosa", "Felix", "Anna", "Peter", "Laura", "Bruno", "Julia", "Frank", "Emma", "Louis", "Sarah", "David")
PEOPLE = ("Martha", "Edwin", "Clara", "Victor", "Helen", "Oscar", "Irene", "Hugo", "Nadia", "Simon", "Paula", "Walter")

QUESTIONS = (
    "What should I cook for six friends who do not eat meat?",
    "Why is the sky red in the evening?",
    "How can I learn to play the piano as an adult?",
    "Tell me a short story about a fox and a bicycle.",
    "What is the difference between a lake and a pond?",
    "How do I write a polite letter to my landlord?",
    "Which exercises help against a stiff neck?",
    "Explain to a child how a refrigerator works.",
    "What can I see in Vienna in two days?",
    "Give me three ideas for a birthday present for my father.",
    "How did people tell the time before there were clocks?",
    "Is it better to rent or to buy a home?",
    "Why do cats purr?",
    "How do I keep tomatoes healthy on a balcony?",
    "What makes a good teacher?",
    "Describe a quiet morning at the sea.",
    "How does a vaccine work?",
    "What should I pack for a week in the mountains?",
    "Why do leaves change their colour in autumn?",
    "How can a small shop find more customers?",
    "What is inflation, in simple words?",
    "Write a poem about an old umbrella.",
    "How do I prepare for a job interview?",
    "Why is sleep important?",
    "What are the planets of the solar system like?",
    "How do bees make honey?",
    "What is a good way to save money each month?",
    "Tell me about the history of bread.",
    "How do I calm a dog that is afraid of thunder?",
    "What does an architect do all day?",
    "Why do we have leap years?",
    "How can I read more books?",
)

FORM = {
    "type": "object",
    "properties": {
        "customer_first_and_last_name": {"type": "string", "maxLength": 24},
        "delivery_address_street_and_number": {"type": "string", "maxLength": 24},
        "delivery_address_city": {"type": "string", "maxLength": 16},
        "number_of_items_in_this_order": {"type": "integer", "minimum": 1, "maximum": 99},
        "customer_wants_gift_wrapping": {"type": "boolean"},
        "preferred_delivery_time_of_day": {"enum": ["morning", "afternoon", "evening"]},
        "additional_instructions_for_the_driver": {"type": "string", "maxLength": 40},
        "customer_agrees_to_terms_and_conditions": {"type": "boolean"},
    },
    "additionalProperties": False,
}
FORM["required"] = list(FORM["properties"])  # type: ignore[call-overload]
STREETS = ("Mill Street", "Harbour Road", "Castle Lane", "Station Square", "Garden Row", "River Walk")
CITIES = ("Leeds", "Bristol", "Dover", "York", "Exeter", "Derby", "Oxford", "Bath")


def turns(asked: str, answered: str) -> Chat:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def shown(number: int, ask: Callable[[int], tuple[str, str]]) -> Chat:
    """Two turns that show what is wanted, and the request of this round."""
    count = len(TEXTS)
    chat = [turn for back in (2, 1) for turn in turns(*ask((number - back) % count))]
    return [*chat, {"role": "user", "content": ask(number % count)[0]}]


def quoting(place: int) -> tuple[str, str]:
    return f"Repeat this text word for word:\n\n{TEXTS[place]}", TEXTS[place]


def changing(place: int) -> tuple[str, str]:
    """A settings file, and two of its lines to be changed."""
    source = random.Random(100 + place)
    town = CITIES[place % len(CITIES)].lower()
    values = {
        "host": f'"{town}.example.org"',
        "port": str(source.randint(3000, 9000)),
        "workers": str(source.randint(2, 9)),
        "timeout_seconds": str(source.randint(10, 90)),
        "log_level": source.choice(('"info"', '"debug"', '"warning"')),
        "log_file": f'"/var/log/{town}/server.log"',
        "max_connections": str(source.randint(100, 900)),
        "cache_folder": f'"/var/cache/{town}"',
        "cache_size_megabytes": str(source.randint(64, 512)),
        "compress_responses": source.choice(("true", "false")),
        "administrator": f'"{PEOPLE[place].lower()}@{town}.example.org"',
    }
    after = values | {"port": "8080", "log_level": '"error"'}
    old, new = ("\n".join(f"{key} = {value}" for key, value in each.items()) for each in (values, after))
    return f'Set port to 8080 and log_level to "error" in this file, and write the whole file:\n\n{old}', new


def quote(number: int) -> Task:
    return Task(shown(number, quoting))


def quote_sampled(number: int) -> Task:
    return Task(shown(number, quoting), temperature=0.7)


def edit(number: int) -> Task:
    return Task(shown(number, changing))


def edit_sampled(number: int) -> Task:
    return Task(shown(number, changing), temperature=0.7)


def form(number: int) -> Task:
    """An order in words, to be filled in as JSON."""
    source = random.Random(number)
    name = f"{NAMES[number % len(NAMES)]} {source.choice(('Baker', 'Hill', 'Turner', 'Marsh', 'Wood', 'Price'))}"
    order = (
        f"{name} of {source.randint(1, 99)} {source.choice(STREETS)} in {source.choice(CITIES)} orders "
        f"{source.randint(2, 20)} candles. Please deliver them in the {source.choice(('morning', 'evening'))}"
        f"{source.choice((', gift-wrapped', ''))}. The driver should ring twice."
    )
    keys = ", ".join(FORM["properties"])  # type: ignore[arg-type]
    return Task(
        [{"role": "user", "content": f"Write this order as JSON with the keys {keys}.\n\n{order}"}], schema=FORM
    )


def talk(number: int) -> Task:
    return Task([{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}])


def talk_sampled(number: int) -> Task:
    return Task([{"role": "user", "content": QUESTIONS[(number + 16) % len(QUESTIONS)]}], temperature=0.7)


# name → (how one of its requests is made, the speed that speculation is to reach, as a ratio to none)
WORKLOADS: dict[str, tuple[Callable[[int], Task], float]] = {
    "quote": (quote, 2.0),
    "quote at 0.7": (quote_sampled, 1.5),
    "edit": (edit, 2.0),
    "edit at 0.7": (edit_sampled, 1.5),
    "JSON form": (form, 1.5),
    "open chat": (talk, 1.0),
    "open chat at 0.7": (talk_sampled, 1.0),
}

if __name__ == "__main__":
    for name, (make, _) in WORKLOADS.items():
        print(f"---- {name}\n{json.dumps(make(0).chat, indent=1)}")
