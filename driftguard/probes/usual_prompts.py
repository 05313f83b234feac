"""The canary prompts of a server for which nobody chose any: short ones of many kinds, and long ones.

No two begin alike, so that none finds another's beginning in the prefix cache. They hold no user's text. A
server's own traffic is spoken for better by prompts of its own kind and length (`driftguard probe init`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from driftguard.probes.answers import ProbeRefused
from driftguard.probes.prompts import MINIMUM_PROMPTS, Prompt, prompt_of
from driftguard.probes.server import ProbedServer
from driftguard.records import DEFAULT_SEGMENT

_SHORT: Final = (
    "Write a Python function that returns the n largest numbers of a list, without sorting all of it.",
    "Explain to a new colleague what a database index is, and when it makes a query slower.",
    "Translate into German: The delivery will arrive on Thursday, and the invoice is in the parcel.",
    'Give three European capitals with their rivers as a JSON list of {"city", "river"}.',
    "Why does a kettle sing shortly before the water boils?",
    "Schreibe eine freundliche Antwort an einen Kunden, dessen Rechnung zweimal verschickt wurde.",
    "A train leaves at 9:40 and drives 210 km at 84 km/h. When does it arrive? Show each step.",
    "SELECT the ten customers with the largest sum of orders in 2024; write the SQL for PostgreSQL.",
    "Tell the beginning of a story about a lighthouse keeper who finds a letter in a bottle.",
    "Résume en deux phrases pourquoi les feuilles des arbres changent de couleur en automne.",
    "List the usual steps to find out why a web page loads slowly, from the most to the least likely.",
    "Correct the grammar and keep the tone: Me and him was going to the market when it start raining.",
)
_PARAGRAPHS: Final = (
    (
        "The harbour of the town was built in 1842, when the railway reached the coast and coal could be "
        "loaded without carts. For sixty years it held between thirty and fifty ships on a working day. "
        "The two stone piers, each four hundred metres long, were paid for by a duty of two pence on "
        "every ton, and the light at the end of the northern one burned oil until 1911. After the war the "
        "coal trade ended, and the basin slowly filled with sand; today it is dredged twice a year for "
        "yachts and for the ferry to the islands."
    ),
    (
        "A heat pump moves heat instead of making it. A liquid evaporates at low pressure in a coil "
        "outside, and takes heat from air that may be colder than the room; a compressor raises its "
        "pressure, so that it condenses at a higher temperature in a coil inside and gives the heat away. "
        "For each unit of electricity three or four units of heat arrive, as long as the difference "
        "between both temperatures is small. This is why floors with wide pipes, which need water of only "
        "thirty-five degrees, suit it better than radiators."
    ),
    (
        "Minutes of the meeting of 12 March. Present were the heads of purchasing, production and sales. "
        "Purchasing reported that two of five suppliers of aluminium profiles will raise their prices by "
        "six per cent in May, and proposed to order the quantity of the third quarter now. Production has "
        "room for forty pallets, not for the sixty that this would need. Sales expects fewer orders in "
        "August. It was decided to order forty pallets at once, and to ask the other three suppliers for "
        "offers before the end of the month."
    ),
    (
        "Bees find their way back by the sun, and by landmarks that they learn in short flights around "
        "the hive. A scout that found flowers dances on the comb: the angle of her run against the "
        "vertical is that between the sun and the flowers, and the time that she wags tells how far they "
        "are. Others follow her in the dark with their antennae. When clouds hide the sun, the pattern of "
        "polarised light in a patch of blue is enough. A colony of thirty thousand visits several million "
        "flowers on a warm day in May."
    ),
    (
        "The library gives each process a queue of its own and lets idle ones take work from the far end "
        "of another queue. A task that waits for a result does not block its thread; it is put aside with "
        "what it still has to do, and continues on whichever thread is free. Errors travel to whoever "
        "waits for the result, with the places in the source that they passed. Cancelling a group cancels "
        "every task in it, at the next point at which the task waits. Timeouts are cancellations by the "
        "clock, and nothing else."
    ),
    (
        "Bread needs flour, water, salt and time. Wheat flour of which the bran was sifted out takes "
        "about two thirds of its weight in water; whole flour takes more, and is given an hour to swell. "
        "Yeast makes a dough rise in two hours at the warmth of a kitchen, or in a night in the "
        "refrigerator, where it gains in taste. A dough that was folded a few times holds its gas better "
        "than one that was kneaded and left alone. It is baked when its crust sounds hollow, at a "
        "temperature inside of ninety-six degrees."
    ),
)
_QUESTIONS: Final = (
    "Summarise each of the texts above in one sentence.",
    "Which of the texts above hold numbers? List the numbers with what they count.",
    "Write five questions that a reader of the texts above should be able to answer.",
    "Rewrite the first of the texts above for children of ten years.",
)


def texts() -> list[str]:
    """The long ones begin with another paragraph each."""
    turned = [(*_PARAGRAPHS[start:], *_PARAGRAPHS[:start]) for start in range(len(_QUESTIONS))]
    long = ["\n\n".join((*turn, question)) for turn, question in zip(turned, _QUESTIONS, strict=True)]
    return [*_SHORT, *long]


def usual_set(server: ProbedServer, may_go_on: Callable[[], bool]) -> list[Prompt] | None:
    """As conversations where the server answers those, as its users' are; else as texts to go on with.
    Without those that it refuses, such as too long ones.

    `may_go_on`: called after each answer, where a pause belongs; None where it says no. Raises ProbeFailed,
    also where too few are left.
    """
    first, *more = texts()
    form = _conversation
    if _refusal(server, form(first)) is not None:
        form = _text
        if (refusal := _refusal(server, form(first))) is not None:
            raise refusal
    taken = [form(first)]
    for text in more:
        if not may_go_on():
            return None
        refusal = _refusal(server, prompt := form(text))
        if refusal is None:
            taken.append(prompt)
        elif len(taken) + len(more) - more.index(text) <= MINIMUM_PROMPTS:
            raise refusal
    return taken


def _refusal(server: ProbedServer, prompt: Prompt) -> ProbeRefused | None:
    try:
        server.ask(prompt)
    except ProbeRefused as refusal:
        return refusal
    return None


def _conversation(text: str) -> Prompt:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    return prompt_of(body, DEFAULT_SEGMENT)


def _text(text: str) -> Prompt:
    return prompt_of({"prompt": text}, DEFAULT_SEGMENT)
