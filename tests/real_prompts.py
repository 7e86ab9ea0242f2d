"""Forty prompts as people write them: prose, code, lists, dialogue, numbers, several languages; 5 to 1,500 tokens.

They are made by joining passages in turn and cutting at a token, so they are the same in every run.
"""

from collections.abc import Callable

NUM_PROMPTS = 40
SHORTEST_PROMPT_TOKENS = 5
LONGEST_PROMPT_TOKENS = 1500

PASSAGES = (
    "The capital of France is Paris, and the river that runs through it is the Seine. Barges still carry sand and "
    "wheat past the islands, while visitors crowd the bridges to photograph the towers of the cathedral. In winter "
    "the water rises over the lower quays and the city closes the road beside it.",
    "def moving_average(values, width):\n    if width <= 0:\n        raise ValueError('width must be positive')\n"
    "    total = 0.0\n    averages = []\n    for index, value in enumerate(values):\n        total += value\n"
    "        if index >= width:\n            total -= values[index - width]\n        if index >= width - 1:\n"
    "            averages.append(total / width)\n    return averages\n",
    "Shopping list:\n- 2 kg flour\n- 6 eggs\n- 250 g butter\n- lemons (unwaxed)\n- a bottle of olive oil\n"
    "- yeast, if the shop has any\n- coffee beans, dark\nRemember to take the empty bottles back.",
    "User: My bicycle makes a clicking sound when I pedal uphill. What should I check first?\n"
    "Assistant: Start with the chain and the bottom bracket. Does the click come once per turn of the pedals?\n"
    "User: Yes, always when the right foot is down.\nAssistant:",
    "Die Werkstatt öffnet um acht Uhr. Wer früher kommt, wartet im Hof unter dem Kastanienbaum, trinkt Kaffee aus "
    "der Thermoskanne und erzählt, was gestern nicht fertig geworden ist. Um neun beginnt der Lehrgang über das "
    "Schleifen von Hobeleisen, und danach wird gefegt.",
    "Quarter, revenue, cost, margin\nQ1, 1204.50, 987.25, 18.0%\nQ2, 1318.75, 1010.40, 23.4%\n"
    "Q3, 1277.00, 1102.90, 13.6%\nQ4, 1502.30, 1156.85, 23.0%\nTotal, 5302.55, 4257.40, 19.7%",
    "# Tidewater\n\nTidewater predicts the height of the tide at a harbour from its harmonic constants.\n\n"
    "## Install\n\n    python -m pip install tidewater\n\n## Use\n\nGive it a station and a day; it prints the times "
    "of high and low water. The constants of forty stations are included, and others can be read from a file.",
    "Once there was a lighthouse keeper who collected the names of ships. He wrote each one in a ledger with the "
    "hour and the weather, and on quiet nights he read them aloud to the dog. One evening a ship passed whose name "
    "was already there, sixty years before, in another hand.",
    "A las siete de la mañana el mercado ya huele a cilantro y a pan dulce. Doña Carmen acomoda los mangos por "
    "color, del verde al rojo, y saluda a cada vecino por su nombre. Nadie compra sin preguntar primero por la salud "
    "de los nietos y por el precio del maíz.",
    "SELECT customer.name, COUNT(*) AS num_orders, SUM(line.quantity * line.price) AS total\nFROM customer\n"
    "JOIN purchase ON purchase.customer_id = customer.id\nJOIN line ON line.purchase_id = purchase.id\n"
    "WHERE purchase.placed_at >= DATE '2024-01-01'\nGROUP BY customer.name\nHAVING SUM(line.quantity) > 10\n"
    "ORDER BY total DESC;",
    "To whom it may concern: the lift in the north stairwell has been out of order since the 14th. Two residents on "
    "the sixth floor cannot use the stairs. We ask that the repair be scheduled this week, and that a notice with "
    "the expected date be put up on every landing.",
    "Photosynthesis turns light into chemical energy. In the light reactions, water is split, oxygen is released, "
    "and the energy is stored in two carriers. In the Calvin cycle, those carriers drive the fixation of carbon "
    "dioxide into sugars. The enzyme that does this is slow, and there is a great deal of it.",
    "東京の朝は早い。駅前のパン屋は五時に店を開け、始発を待つ人に温かいあんぱんを売る。雨の日は傘の列が角まで続き、"
    "みんな静かに順番を待っている。",
    "3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5, 0, 2, 8, 8. "
    "Sort these numbers, count each digit, and say which one is the most frequent.",
    "[2024-03-07 02:14:09] WARN disk usage at 91% on /var\n[2024-03-07 02:14:41] INFO log rotation started\n"
    "[2024-03-07 02:15:02] ERROR could not remove archive: permission denied\n"
    "[2024-03-07 02:15:02] INFO retrying in 30 s\n[2024-03-07 02:15:33] INFO archive removed, usage at 64%",
    "La bibliothèque municipale prête aussi des outils: perceuses, échelles, une machine à coudre et même un "
    "télescope. Il suffit d'une carte de lecteur et d'une caution. Les retards se paient en heures de bénévolat, ce "
    "qui explique l'excellent état du jardin.",
    "Recipe for four: soak 300 g of chickpeas overnight. Simmer them for ninety minutes with a bay leaf. Fry an "
    "onion in oil until it is golden, add cumin, paprika and two chopped tomatoes, then stir in the chickpeas. Serve "
    "with flat bread, yoghurt and a squeeze of lemon.",
    '{"station": "harbour-north", "readings": [{"time": "06:00", "wind_kn": 14, "gust_kn": 21}, {"time": "07:00", '
    '"wind_kn": 17, "gust_kn": 26}, {"time": "08:00", "wind_kn": 19, "gust_kn": null}], "units": {"wind": "knots"}, '
    '"valid": true}',
    "What is the difference between a virus and a bacterium, and why do antibiotics help against only one of them? "
    "Explain it to a child of ten in five short sentences, then give one example of each.",
    "В деревне осталось семь домов и одна почта. Почтальонка Анна приезжает по средам, привозит газеты, лекарства и "
    "новости, и каждый раз её ждут у колодца. Зимой она оставляет машину за мостом и идёт пешком по снегу.",
    "use std::collections::HashMap;\n\nfn word_counts(text: &str) -> HashMap<String, usize> {\n"
    "    let mut counts = HashMap::new();\n    for word in text.split_whitespace() {\n"
    "        *counts.entry(word.to_lowercase()).or_insert(0) += 1;\n    }\n    counts\n}\n",
    "Minutes of the allotment society, 12 May. Present: nine members. The water butt by plot 4 leaks and will be "
    "replaced. The plum trees are to be pruned after the harvest, not before. Mr Okafor offered to build a second "
    "compost bay from pallets. The next meeting is on 9 June at 18:30.",
    "The theorem says that every continuous function on a closed interval attains its maximum. Proof sketch: take a "
    "sequence whose values approach the supremum; by compactness it has a convergent subsequence; by continuity the "
    "limit takes the value. Where does the argument fail on an open interval?",
    "Oggi il treno per Bologna parte dal binario sette con venti minuti di ritardo. Una signora divide le sue "
    "ciliegie con gli sconosciuti, un ragazzo ripassa la fisica, e il controllore annuncia che il bar è chiuso ma "
    "che la vista sul fiume è gratuita.",
    "Name: Ada Lindqvist\nBorn: 1961, Umeå\nOccupation: bridge engineer\nKnown for: the cable-stayed crossing at "
    "Skarvsund, a method to measure fatigue in hangers by their sound, and a children's book about knots.\n"
    "Write a biography of two paragraphs.",
    "🌧️ Weather for Saturday: showers until noon, then bright spells, 11 to 14 °C, wind from the west. 🌈 Bring a "
    "coat to the fair! The tug-of-war 💪 starts at 14:00, the cake contest 🎂 at 15:30; dogs are welcome 🐕.",
)


def real_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of the prompts by the tokenizer `encode`. Short and long ones alternate, as in real traffic."""
    return [
        _prompt(encode, number, length)
        for number, length in enumerate(length for pair in zip(*_short_and_long(), strict=True) for length in pair)
    ]


def _short_and_long() -> tuple[list[int], list[int]]:
    """Lengths that grow by a constant factor from the shortest to the longest; the upper half runs downwards."""
    factor = (LONGEST_PROMPT_TOKENS / SHORTEST_PROMPT_TOKENS) ** (1 / (NUM_PROMPTS - 1))
    lengths = [round(SHORTEST_PROMPT_TOKENS * factor**number) for number in range(NUM_PROMPTS)]
    half = NUM_PROMPTS // 2
    return lengths[:half], lengths[: half - 1 : -1]


def _prompt(encode: Callable[[str], list[int]], number: int, num_tokens: int) -> list[int]:
    # Each prompt starts with a passage of its own; a step that the number of passages does not share a factor with
    # visits all of them.
    first, stride = number, (1, 3, 5, 7)[number // len(PASSAGES) + number % 3]
    text = PASSAGES[first % len(PASSAGES)]
    place = first
    while len(token_ids := encode(text)) < num_tokens:
        place += stride
        text += "\n\n" + PASSAGES[place % len(PASSAGES)]
    return token_ids[:num_tokens]
