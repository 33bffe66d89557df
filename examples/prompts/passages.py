"""Topics and short texts for `training.py`."""

from __future__ import annotations

__all__ = ["DOES", "NAMES", "PLACES", "TEXTS", "THINGS", "WHO"]

NAMES = (
    *("Amara", "Bjorn", "Chen", "Dalia", "Emeka", "Freya", "Goran", "Hana", "Ilya", "Jonas", "Keiko", "Leila", "Mateo"),
    *("Nadia", "Omar", "Petra", "Quentin", "Rosa", "Samir", "Tilda", "Uma", "Viktor", "Wanda", "Yusuf", "Zoe"),
)
PLACES = (
    *("Lisbon", "Osaka", "Nairobi", "Bergen", "Quito", "Gdansk", "Perth", "Tunis", "Halifax", "Lyon", "Busan", "Accra"),
)
WHO = (
    *("an old lighthouse keeper", "a nervous young pilot", "two sisters from a fishing village"),
    *("a retired chess master", "a cat that lives in a bakery", "the last librarian of a desert town"),
    *("a clumsy apprentice wizard", "a robot gardener", "the captain of a paper ship", "a street musician"),
    *("a girl who collects clocks", "a tired detective", "a shy dragon", "an astronomer without a telescope"),
    *("a family of hedgehogs", "the king of a very small island", "a night bus driver", "a beekeeper"),
    *("a boy with a borrowed violin", "an honest thief", "a ghost who is afraid of the dark", "a mountain guide"),
    *("the cook of a submarine", "a travelling dentist", "a teacher in a school on the moon", "a postman"),
    *("a knight who has lost his horse", "a scientist in the Antarctic", "the smallest elephant of the herd"),
    "a tailor",
)
DOES = (
    ("finds a map in an empty bottle", "found a map in an empty bottle"),
    ("has to cross a frozen lake at night", "had to cross a frozen lake at night"),
    ("makes a promise that is hard to keep", "made a promise that was hard to keep"),
    ("gets lost in a city where nobody speaks", "got lost in a city where nobody spoke"),
    ("receives a message from the future", "received a message from the future"),
    ("repairs a machine without knowing what it does", "repaired a machine without knowing what it did"),
    ("wins a contest by accident", "won a contest by accident"),
    ("learns to swim at last", "learned to swim at last"),
    ("shares a secret with the wrong person", "shared a secret with the wrong person"),
    ("meets an enemy and makes a friend", "met an enemy and made a friend"),
    ("forgets one important word", "forgot one important word"),
    ("plants a seed that grows overnight", "planted a seed that grew overnight"),
    ("discovers a door behind the stove", "discovered a door behind the stove"),
    ("looks for a missing brother", "looked for a missing brother"),
    ("refuses a great treasure", "refused a great treasure"),
    ("must keep a fire burning for three days", "had to keep a fire burning for three days"),
    ("hears music under the ground", "heard music under the ground"),
    ("builds a boat in the middle of a forest", "built a boat in the middle of a forest"),
    ("is mistaken for somebody famous", "was mistaken for somebody famous"),
    ("saves the village from a flood", "saved the village from a flood"),
)
THINGS = (
    *("a heat pump", "the printing press", "photosynthesis", "a good night's sleep", "compound interest", "volcanoes"),
    *("the Silk Road", "learning a language", "vaccines", "chess openings", "rainbows", "a bicycle gear", "composting"),
    *("public libraries", "black holes", "bread baking", "the water cycle", "electric cars", "working from home"),
    *("the Roman roads", "encryption", "coral reefs", "first aid for burns", "a sorting algorithm"),
    *("memory in computers", "earthquakes", "growing tomatoes", "the stock market", "honey bees", "street photography"),
    *("a job interview", "the human heart", "tea", "solar panels", "ocean tides", "the Olympic Games", "saving money"),
    *("jazz", "antibiotics", "hiking in the mountains", "gravity", "the periodic table", "regular exercise"),
    *("democracy", "glass", "bridges", "migrating birds", "public speaking", "the internet", "recycling paper", "snow"),
    *("the violin", "time zones", "speed reading", "vegetarian food", "the steam engine", "dreams", "machine learning"),
    *("city traffic", "friendship"),
)
TEXTS = (
    "The ferry leaves at 7 every morning, and Petra is always the first on board. She carries 2 baskets of bread for"
    " the hotel on the island and 1 bag of letters. The captain knows her step on the gangway and does not look up."
    " In winter the crossing takes 40 minutes, in summer only 25. On the way back the baskets are full of fish.",
    "Dear team, the new booking system goes live on Monday. Please finish all open orders in the old one by Friday at"
    " noon, because it will be switched off on Saturday. Whoever has not yet got a password should ask Goran. There"
    " is a short training on Thursday at 10, in the small meeting room; lunch is provided afterwards.",
    "Moss has no roots. It takes water through its leaves, which are only one cell thick in most species, and it can"
    " dry out completely without dying. After months without rain, a few drops are enough to turn a grey cushion"
    " green within minutes. For this reason moss was one of the first plants to live on land.",
    "The committee met on the 3rd of May. Ms Okafor reported that the roof of the sports hall had been repaired for"
    " 18,400 euros, which was 1,600 less than planned. Mr Lindqvist proposed to spend the rest on new nets. The"
    " proposal was accepted with 7 votes against 2. The next meeting is going to be held in September.",
    "To make the dough, mix 500 grams of flour with 10 grams of salt and 7 grams of dry yeast. Add 320 millilitres of"
    " lukewarm water and knead for 8 minutes. Cover the bowl and let it rest until the dough has doubled. Shape it"
    " into a loaf, cut the top twice, and bake at 230 degrees for 35 minutes. Let it cool on a rack.",
    "When the railway came to the valley, nobody was against it except the miller. He said that the smoke would spoil"
    " his flour, that the noise would scare his donkeys, and that people who can leave easily will leave. Forty years"
    " later his grandson sold the mill to an engineer and took the morning train.",
    "A hash table stores each value in a place that is computed from its key. Looking a value up therefore takes about"
    " the same time however many there are. Two keys may lead to the same place; then the table has to look further."
    " If it gets too full, this happens often, so the table is made larger and all values are moved.",
    "My grandmother kept her buttons in a tin that had once held biscuits. On rainy days we was allowed to pour them"
    " on the table and sort them by colour, by size, or by the coat they had belong to. She could tell a story about"
    " every one of them. The tin is mine now, but I has forgotten most of the stories.",
    "Sound travels about four times faster in water than in air. Whales make use of it: the calls of a blue whale can"
    " be heard by others at a distance of hundreds of kilometres. Since ships have become louder, that distance has"
    " shrunk. Researchers who listened in the quiet weeks of 2020 found that whales called less often, but further.",
    "The shop on the corner changed hands again. First it was a bank, then a place that sold phones, then it stood"
    " empty for two years. Now a young couple mends shoes there. They work at the window, so one sees what becomes"
    " of the shoes. On Saturdays there is a queue, and nobody in it seems to be in a hurry.",
    "Patients who were given a fixed time for their appointment waited 12 minutes on average; those who were told to"
    " come in the morning waited 54. Both groups saw the doctor for about 9 minutes. The authors conclude that the"
    " length of the wait depends on the plan and hardly at all on the number of doctors.",
    "Clouds are white because their drops scatter all colours alike. A thick cloud looks grey from below, as little"
    " light gets through it. Its colour says nothing about rain, but its shape does: towers that grow quickly in the"
    " afternoon often end in a thunderstorm, while thin layers of ice far up announce a change within a day or two.",
    "The contract begins on 1 March and runs for 24 months. Either side may end it with a notice of 3 months in"
    " writing. The rent is 950 a month and is due on the third working day. Small repairs up to 100 are paid by the"
    " tenant. Pets need the landlord's permission, which may not be refused without a reason.",
    "Before the match everyone had favored the visitors, whose defense had not let in a goal for five games. It took"
    " Zoe Martens eleven minutes to change that. She took the ball in the center, turned once and hit the post, and"
    " Uma Reyes put in the rebound. The home crowd was still singing when the second goal fell.",
    "An old method to find north needs only a stick and the sun. Push the stick into the ground and mark the tip of"
    " its shadow with a stone. Wait for a quarter of an hour and mark it again. The line between the stones runs from"
    " west to east. It works best around noon, and not at all near the poles.",
    "Samir wanted to give up the violin when he was nine. His teacher agreed at once and asked him to come one last"
    " time to help her tune the instruments of the little ones. He came, and he stayed the whole afternoon. Nobody"
    " ever spoke about giving up again. Today he builds violins, and each has a small mistake on purpose.",
)
