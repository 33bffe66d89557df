"""The list of architectures in transformers.md, from architectures.json, which tests compare with each run.

PYTHONPATH=tests python -m support.architectures writes architectures.json (some minutes).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

KEPT = Path(__file__).with_name("architectures.json")
# Patterns of refusals, and their meaning for a reader.
REASONS = {
    r"use transformers' attention interface": "The attention is the model's own code, not transformers' interface",
    r"decoder of full or sliding attention layers, got (.*)": "Layers of other kinds (chunked, sparse) or an encoder",
    r"expected recurrent layers among": "Recurrent layers of other kinds than gated delta rules, Mamba-2 and short"
    " convolutions, or with attention that layers share",
    r"forward that takes position_ids": "No positions can be given: it counts them itself, or has none",
    r"expected latent attention of": "Latent attention of other sizes than 512 and 64 values a token",
    r"expected a head_dim in .*": "Head dimensions that attention does not have",
    r"each layer to run once in a pass": "A layer attends more than once in a pass",
    r"hand the attention_mask": "A layer adds a bias to the mask",
    r"asks for another mask": "The mask is neither causal nor a sliding window",
    r"masks of the config's sliding_window": "Its masks have no window, but its cache in transformers has",
}


def listed() -> str:
    """Returns a Markdown table of served, refused (with reasons) and untried model types."""
    outcomes = json.loads(KEPT.read_text(encoding="utf-8"))["outcomes"]
    served = [name for name, outcome in outcomes.items() if outcome == "same"]
    rows = [("The same text", served)]
    refused = {name: outcome for name, outcome in outcomes.items() if outcome.startswith("refused: ")}
    for pattern, text in REASONS.items():
        names = [name for name in refused if re.search(pattern, refused[name])]
        rows += [(f"Refused. {text}", names)] if names else []
    rest = outcomes.keys() - refused.keys() - set(served)
    rows.append(("Not tried: transformers cannot build a tiny one from a config alone", list(rest)))
    if sorted(name for _, names in rows for name in names) != sorted(outcomes):
        raise ValueError("architectures.json: expected each refusal to have one of the REASONS")
    lines = ["| | Model types |", "|---|---|"]
    lines += [f"| {text} ({len(names)}) | {', '.join(sorted(names))} |" for text, names in rows]
    return "\n".join(lines)
