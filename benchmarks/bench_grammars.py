"""Masks of grammars on draft trees: how long they take to fill, and how much of that a target's pass does not hide.

    python -m pagedtree bench grammars [--vocab 128256] [--tree "EAGLE-2 64"] [--batch 1 4 16] [--json PATH]

Needs xgrammar; llguidance is measured where it is installed. The vocabulary is made of the standard library's source
text: all bytes and its most frequent pieces, as long as those of real tokenizers. The trees follow a text of the
grammar from many positions, and the grammar allows every draft, so that each row has to be filled.

Filling: the rows of one tree by one thread, by xgrammar's own walk, by a loop in Python that accepts, fills and rolls
back at each node, and by llguidance. Whole batches: GrammarMasks, alone and beside a pass of a given time, in which
the host waits, as it does for a GPU, or multiplies matrices on one thread.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import as_row, interleaved, machine_facts, save
from named_trees import tree_named

from pagedtree import DraftTree, TreeBatch
from pagedtree.grammars import DepthFirstMatcher, GrammarMasks, GrammarMatcher, TokenTree
from pagedtree.grammars.matcher import linked_tree

try:
    import xgrammar

    from pagedtree.integrations.xgrammar import XGrammarMatcher
except ImportError:
    raise SystemExit('bench grammars needs xgrammar: pip install "pagedtree[xgrammar]"') from None

STDLIB = Path(sysconfig.get_path("stdlib"))
PIECES = re.compile(r" ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+|\s+")
LONGEST_TOKEN = 12
EOS = 0
SCHEMA = """{"type": "object", "required": ["name", "version", "tags", "size", "files"], "additionalProperties": false,
"properties": {"name": {"type": "string"}, "version": {"type": "string", "pattern": "^[0-9]+\\\\.[0-9]+$"},
"tags": {"type": "array", "items": {"enum": ["stable", "testing", "nightly"]}}, "size": {"type": "integer"},
"files": {"type": "array", "items": {"type": "object", "required": ["path", "lines"], "additionalProperties": false,
"properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}}}}"""
DOCUMENT = (
    b'{"name": "a tree of drafts, with spaces and words", "version": "12.34", "tags": ["stable", "nightly"],'
    b' "size": 123456, "files": [{"path": "python/pagedtree/grammars.py", "lines": 400},'
    b' {"path": "docs/integration.md", "lines": 55}]}'
)
# Recursive, and one token may be many things: what a mask can keep ready for each state of a schema is of less use.
PROGRAMS = r"""root ::= statement+
statement ::= name space "=" space sum ";" space | "if" space "(" sum ")" space "{" space statement* "}" space
sum ::= term (space ("+" | "-" | "*" | "<" | "==") space term)*
term ::= name | number | string | "(" sum ")" | name "(" (sum ("," space sum)*)? ")" | "[" (sum ("," space sum)*)? "]"
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
number ::= [0-9]+ ("." [0-9]+)?
string ::= "\"" ([^"\\\n] | "\\" ["nrt\\])* "\""
space ::= [ \n]*
"""
PROGRAM = (
    b'x = foo(1, bar + 2, "abc def"); if (x < 3) { y = [1, 2.5, z(x)]; } total = total + x * (y - 1);'
    b' if (total == limit(x)) { result = [total, "done", (x + 1) * 2]; }'
)


def vocabulary(size: int) -> list[bytes]:
    """An end token, all bytes, and the most frequent pieces of Python's source text."""
    files = sorted(path for path in STDLIB.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    words = Counter(word for path in files for word in PIECES.findall(path.read_text("utf-8", "replace")))
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        for begin in range(len(word)):
            for end in range(begin + 2, min(len(word), begin + LONGEST_TOKEN) + 1):
                pieces[word[begin:end]] += count
    ranked = sorted(pieces, key=lambda piece: (-pieces[piece], piece))
    tokens = [b"<eos>", *(bytes([byte]) for byte in range(256))]
    tokens += [piece.encode() for piece in ranked if len(piece.encode()) > 1][: size - len(tokens)]
    if len(tokens) < size:
        raise SystemExit(f"--vocab: the text has no more than {len(tokens)} tokens")
    return tokens


def greedy(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """The longest token at each place."""
    tokens, at = [], 0
    while at < len(text):
        length = next(n for n in range(4 * LONGEST_TOKEN, 0, -1) if text[at : at + n] in ids)
        tokens.append(ids[text[at : at + length]])
        at += length
    return tokens


class ByNode(DepthFirstMatcher):
    """xgrammar's matcher, visited by a loop in Python as SGLang visits a tree: accept, fill a row, roll back."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocab_size: int) -> None:
        self.matcher, self.vocab_size = matcher, vocab_size
        self.stop_token_ids = list(matcher.stop_token_ids)

    def accept(self, token: int) -> bool:
        return self.matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)

    def is_terminated(self) -> bool:
        return self.matcher.is_terminated()

    def fill_row(self, row: np.ndarray) -> None:
        self.matcher.fill_next_token_bitmask(torch.from_numpy(row))


class Grammar(NamedTuple):
    """A grammar, tokens of a text of it, and by name what makes a matcher at the text's beginning."""

    name: str
    text: list[int]
    makers: dict[str, Callable[[], GrammarMatcher]]


ONE_CALL, BY_NODE = "xgrammar, one call", "xgrammar, node by node"


def grammars(vocab: int) -> list[Grammar]:
    tokens = vocabulary(vocab)
    ids = {token: i for i, token in reversed(list(enumerate(tokens))) if i != EOS}
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, vocab_size=vocab, stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info)

    def makers(compiled: xgrammar.CompiledGrammar) -> dict[str, Callable[[], GrammarMatcher]]:
        return {
            ONE_CALL: lambda: XGrammarMatcher(xgrammar.GrammarMatcher(compiled), vocab),
            BY_NODE: lambda: ByNode(xgrammar.GrammarMatcher(compiled), vocab),
        }

    schema = Grammar("JSON schema", greedy(DOCUMENT, ids), makers(compiler.compile_json_schema(SCHEMA)))
    programs = Grammar("programs", greedy(PROGRAM, ids), makers(compiler.compile_grammar(PROGRAMS)))
    with suppress(ImportError):
        schema.makers["llguidance"] = llguidance_maker(tokens, ids)
    return [schema, programs]


def llguidance_maker(tokens: list[bytes], ids: dict[bytes, int]) -> Callable[[], GrammarMatcher]:
    import llguidance

    from pagedtree.integrations.llguidance import LLGuidanceMatcher

    class Tokenizer:
        eos_token_id, bos_token_id, special_token_ids = EOS, None, (EOS,)

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: bytes) -> list[int]:
            return greedy(text, ids)

    slices = llguidance.LLTokenizer.json_slices()
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokenizer()), slices=slices)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    return lambda: LLGuidanceMatcher(llguidance.LLMatcher(tokenizer, grammar), tokenizer)


def allowed(matcher: GrammarMatcher) -> np.ndarray:
    """The tokens that may come next."""
    row = np.full((1, -(-matcher.vocab_size // 32)), -1, np.int32)
    none = np.array([-1])
    matcher.fill_tree(TokenTree(none, none, none, none), row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[: matcher.vocab_size])


def drafts(tree: DraftTree, matcher: GrammarMatcher, text: list[int], generator: random.Random) -> np.ndarray:
    """Tokens that the grammar allows: first children go on with the text where they can, siblings differ."""
    tokens = np.full(tree.num_nodes, -1, np.int64)

    def visit(node: int, rest: list[int]) -> None:
        choices = [token for token in allowed(matcher).tolist() if token != EOS]
        child, used = int(tree.first_child[node]), set()
        while child >= 0 and choices:
            token = rest[0] if rest and not used else generator.choice(choices)
            used.add(token)
            tokens[child] = token
            assert matcher.accept(token)
            visit(child, rest[1:] if rest and token == rest[0] else [])
            matcher.rollback(1)
            child = int(tree.next_sibling[child])

    visit(0, text)
    return tokens


def cases(grammar: Grammar, maker: str, tree: DraftTree, count: int) -> list[tuple[GrammarMatcher, np.ndarray]]:
    """Matchers behind ever more of the text, to three quarters of it, and drafts for each."""
    found = []
    for i in range(count):
        at = i * (len(grammar.text) * 3 // 4) // count
        matcher = grammar.makers[maker]()
        assert all(map(matcher.accept, grammar.text[:at]))
        found.append((matcher, drafts(tree, matcher, grammar.text[at:], random.Random(i))))
    return found


def passes(seconds: float) -> dict[str, Callable[[], object]]:
    """Returns what runs while the masks are filled."""
    a, b = torch.randn(2, 512, 512)

    def multiply() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            a @ b

    return {"the host waits": lambda: time.sleep(seconds), "matmul on one thread": multiply}


def measure_filling(grammar: Grammar, tree: DraftTree, budget: float, copies: int) -> list[dict[str, Any]]:
    """One tree, one thread, no GrammarMasks around it."""
    calls, masks = {}, {}
    for name in grammar.makers:
        trees = [
            (matcher, linked_tree(tokens, tree.parents, (tree.num_nodes, tree.num_nodes), matcher.vocab_size))
            for matcher, tokens in cases(grammar, name, tree, copies)
        ]

        def fill(repeat: int, trees: list[Any] = trees) -> np.ndarray:
            matcher, part = trees[repeat % len(trees)]
            mask = np.full((tree.num_nodes, -(-matcher.vocab_size // 32)), -1, np.int32)
            matcher.fill_tree(part, mask)
            return mask

        calls[name], masks[name] = fill, [fill(i) for i in range(copies)]
    assert all((one == other).all() for one, other in zip(masks[ONE_CALL], masks[BY_NODE], strict=True)), "masks differ"
    timings = interleaved(calls, budget=budget)
    return [
        {"grammar": grammar.name, "what": name, "nodes": tree.num_nodes, "python_beside": python_beside(calls[name])}
        | as_row(timing)
        for name, timing in timings.items()
    ]


def measure_batches(grammar: Grammar, tree: DraftTree, batch: int, vocab: int, args: Any) -> list[dict[str, Any]]:
    """GrammarMasks, alone and beside a pass. `waited` is what result() took."""
    matchers, tokens = zip(*cases(grammar, ONE_CALL, tree, batch), strict=True)
    trees, flat = TreeBatch.from_trees([tree] * batch), torch.from_numpy(np.concatenate(tokens))
    rows = []
    with GrammarMasks(matchers, vocab, threads=args.threads) as masks:
        for name, run in {"nothing": lambda: None, **passes(args.pass_ms / 1e3)}.items():
            samples: dict[str, list[float]] = {"filled": [], "waited": [], "step": [], "call": []}
            for repeat in range(args.repeats + 1):
                begin = time.perf_counter()
                fill = masks.fill(flat, trees)
                samples["call"].append(time.perf_counter() - begin)
                run()
                fill.result()
                samples["step"].append(time.perf_counter() - begin)
                samples["filled"].append(fill.filled or 0.0)
                samples["waited"].append(fill.waited or 0.0)
                if repeat == 0:  # a warm-up
                    for values in samples.values():
                        values.clear()
            row: dict[str, Any] = {"grammar": grammar.name, "what": "GrammarMasks", "beside": name, "batch": batch}
            row["nodes"] = tree.num_nodes
            for key, values in samples.items():
                low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
                row |= {key: float(middle), f"{key}_spread": float(high - low)}
            rows.append(row | {"repeats": args.repeats})
    return rows


def python_beside(run: Callable[[int], object], seconds: float = 1.0) -> float:
    """Measures Python's speed beside calls of `run` in another thread, over its speed alone; needs two free cores.

    Half and less says that the calls hold Python's global lock.
    """

    def count(stop: float) -> int:
        steps = 0
        while time.perf_counter() < stop:
            steps += 1
        return steps

    def repeat(stop: float) -> None:
        calls = 0
        while time.perf_counter() < stop:
            run(calls)
            calls += 1

    alone = count(time.perf_counter() + seconds)
    stop = time.perf_counter() + seconds
    thread = threading.Thread(target=repeat, args=(stop,))
    thread.start()
    beside = count(stop)
    thread.join()
    return beside / alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--tree", default="EAGLE-2 64", help="shape and nodes, as in the other sweeps")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--positions", type=int, default=16, help="how many places of the document are measured")
    parser.add_argument("--pass-ms", type=float, default=20.0, help="the pass beside which masks are filled")
    parser.add_argument("--threads", type=int, help="of GrammarMasks; default one per core")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for filling single trees")
    parser.add_argument("--json", help="where to write; default benchmarks/results/grammars_cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine_facts() | {"arguments": {key: value for key, value in vars(args).items() if key != "json"}}
    for name in ("xgrammar", "llguidance"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    tree = tree_named(args.tree)
    rows = []
    print(f"{args.tree}, vocabulary {args.vocab}; load {facts['load']:.1f}")
    for grammar in grammars(args.vocab):
        filled = measure_filling(grammar, tree, args.budget, args.positions)
        rows += filled
        for row in filled:
            print(
                f"{grammar.name:<12} {row['what']:<24} {row['median'] * 1e3:7.2f} ms +- {row['spread'] * 1e3:.2f},"
                f" beside it Python runs at {row['python_beside']:.2f} of its speed"
            )
        print("             beside                  batch  filled ms  waited ms    step ms")
        for batch in args.batch:
            for row in measure_batches(grammar, tree, batch, args.vocab, args):
                figures = "  ".join(f"{row[key] * 1e3:9.2f}" for key in ("filled", "waited", "step"))
                print(f"{grammar.name:<12} {row['beside']:<22} {batch:6d}  {figures}")
                rows.append(row)
    facts["load_at_the_end"] = os.getloadavg()[0]
    save("grammars_cpu", rows, facts, args.json)


if __name__ == "__main__":
    main()
