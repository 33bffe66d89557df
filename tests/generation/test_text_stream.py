"""The text that the command prints as tokens come."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("transformers")

from tokenizer_case import SHIPPED, TOKENIZERS, moonshine, unigram
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedtree.integrations.transformers.text_stream import CLEANED, MAX_MISSING, MAX_UNCUT, TextStream

TEXT = (
    "It's a na\u00efve caf\u00e9 \u2014 we don't know, do they? \"Yes\"!  日本語のテキスト、漢字。 हिन्दी မြန်မာ 한국어 ﷽"
    " e\u0301\u0327 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600\U0001f680\n\n"
    "\tdef f(x):\n        return x ' .  [1, 2] ! don 't\r\n"
)
# Of words that the vocabulary has; it has no token for others.
OROMO = "akka kan ta e hin beekne . isaan kaleessa dhufan sababni isaas yeroo dheeraa booda ' ! kan . '"
# Three bytes for each character, which moonshine's vocabulary lacks.
KHMER = "ភាសាខ្មែរ" * 30


@pytest.fixture(scope="module", params=TOKENIZERS, ids=lambda make: make.__name__)
def tokenizer(request):
    """A tokenizer and the tokens of a text."""
    result = request.param()
    return result, result.encode(OROMO if request.param is unigram else TEXT, add_special_tokens=False)


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.clean_up_tokenization_spaces = tokenizer, tokenizer.clean_up_tokenization_spaces
        self.count = self.most = 0

    def decode(self, tokens, **options):
        self.count, self.most = self.count + len(tokens), max(self.most, len(tokens))
        return self.tokenizer.decode(tokens, **options)


def whole(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True)


def pieces(tokenizer, tokens, draw_step, first=None):
    """Returns what each step gives, and the end."""
    stream, parts = TextStream(tokenizer), []
    while tokens:
        step = first or draw_step()
        parts.append(stream.add(tokens[:step]))
        tokens, first = tokens[step:], None
    return [*parts, stream.finish()]


def random_tokens(tokenizer, rng, count):
    """Any but single bytes, of which wrong ones change right ones before them."""
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return rng.choices([token for token, name in enumerate(names) if not name.startswith("<0x")], k=count)


@pytest.mark.each_value
@pytest.mark.parametrize("most", [1, 7, 300])
def test_text_is_the_whole_one(tokenizer, most):
    """Real text and random tokens, in steps of one token, of a few, of very many."""
    tokenizer, text = tokenizer
    rng = random.Random(most)
    for tokens in (text * 4, random_tokens(tokenizer, rng, 800)):
        found = "".join(pieces(tokenizer, tokens, lambda: rng.randint(1, most)))
        assert found == whole(tokenizer, tokens)


@pytest.mark.parametrize("make", SHIPPED, ids=lambda make: make.__name__)
def test_text_comes_early(make):
    """At most an incomplete character and, with clean-up, the last few characters are held back."""
    tokenizer = make()
    tokens = tokenizer.encode(OROMO if make is unigram else TEXT, add_special_tokens=False)
    parts = pieces(tokenizer, tokens, lambda: 1)
    margin = CLEANED if tokenizer.clean_up_tokenization_spaces else 0
    for count in range(MAX_MISSING, len(tokens)):
        before, text = whole(tokenizer, tokens[: count - MAX_MISSING]), whole(tokenizer, tokens[:count])
        certain = before.rstrip("\N{REPLACEMENT CHARACTER}")
        assert len(certain) - margin <= len("".join(parts[:count])) <= len(text)


def test_wrong_bytes_lose_no_letter():
    """A lone first byte turns right characters before it into replacement characters, but these were printed."""
    tokenizer = moonshine()
    first_byte = tokenizer.convert_tokens_to_ids("<0xE4>")
    right = tokenizer.encode(KHMER, add_special_tokens=False)
    between = tokenizer.encode("x y", add_special_tokens=False)
    tokens = [*right, first_byte, *between, *right, first_byte, first_byte]
    found = "".join(pieces(tokenizer, tokens, lambda: 1)).replace("\N{REPLACEMENT CHARACTER}", "?")
    assert found == f"{KHMER}? x y {KHMER}??"
    # What was held back at that time is not lost.
    tokenizer.clean_up_tokenization_spaces = True
    tokens = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in b"abcdefgh \xe4ijk"]
    assert "".join(pieces(tokenizer, tokens, lambda: 1)) == "abcdefgh " + "\N{REPLACEMENT CHARACTER}" * 4
    # Wrong bytes without end are printed, too, and do not hide what follows.
    tokens = [first_byte] * 5 * MAX_UNCUT
    stream = TextStream(tokenizer)
    assert len("".join(stream.add([token]) for token in tokens)) >= len(tokens) - MAX_UNCUT
    assert (stream.add(between) + stream.finish()).endswith("x y")


def test_tokens_of_parts_of_two_characters():
    """Each but the last ends within a character, so none of them ends a text."""
    (name, _), *_ = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("中")  # one letter for each byte
    core = Tokenizer(models.WordLevel({name[0]: 0, name[1:] + name[0]: 1, name[1:]: 2}, unk_token=name))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    parts = pieces(tokenizer, [0, *[1] * 100, 2], lambda: 1)
    assert "".join(parts) == "中" * 101 and parts[MAX_MISSING + 1 :] == ["中"] * (101 - MAX_MISSING) + [""]


def test_cost_is_linear(tokenizer):
    """Each step decodes a few tokens, however long the text is and whatever is in it."""
    tokenizer, text = tokenizer
    rng = random.Random(1)
    for tokens in (text, random_tokens(tokenizer, rng, 200), [max(text)]):
        counts = []
        for length in (2000, 4000):
            counted = Counted(tokenizer)
            pieces(counted, (tokens * length)[:length], lambda: 4)
            assert counted.most <= MAX_UNCUT + 8
            counts.append(counted.count)
        assert counts[1] - counts[0] <= 1.1 * counts[0] <= 1.1 * 40 * 2000
