"""A grammar without an engine."""

from __future__ import annotations

from generate_case import VOCAB

from pagedtree.grammars import DepthFirstMatcher

STOP = 127


class Brackets(DepthFirstMatcher):
    """Brackets in a bracket, up to three deep: 0..9 open, 10..84 are letters, 85..99 close."""

    vocab_size = VOCAB

    def __init__(self, needs_stop=True):
        self.text, self.stop_token_ids, self.needs_stop = [], [STOP], needs_stop

    def allowed(self):
        depth = sum(token < 10 for token in self.text) - sum(85 <= token < 100 for token in self.text)
        if self.is_terminated():
            return set()
        if self.text and depth == 0:
            return {STOP}
        return {*range(10 * (depth < 3)), *(range(10, 100) if depth else ())}

    def fill_row(self, row):
        row.fill(0)
        for token in self.allowed():
            row.view("uint32")[token // 32] |= 1 << token % 32

    def accept(self, token):
        if token not in self.allowed():
            return False
        self.text.append(token)
        return True

    def rollback(self, count):
        del self.text[len(self.text) - count :]

    def is_terminated(self):
        if self.needs_stop:
            return STOP in self.text
        opened = sum(token < 10 for token in self.text)
        return opened > 0 and opened == sum(85 <= token < 100 for token in self.text)
