"""Writes tables and lists of README.md and docs/: results (benchmarks/results/), public names, architectures."""

from __future__ import annotations

from collections.abc import Callable

import architectures
import make_api
import measured_tables as of_runs
import real_tables as of_model
import summary
from tables import DOCS, Result, load

SAME_RUN = "The run of [attention](#attention-on-the-cpu)."
AMX_RUN = "The run of [attention with AMX](#attention-on-the-cpu)."
OF_RECURRENT = ("base", "tree binary 8", "tree binary 128", "rule kimi delta")
RECURRENT = of_runs.family("recurrent_", points=OF_RECURRENT, run=AMX_RUN)
VERIFICATION = of_runs.family("verify_", "sample", points=("base", "tree chain 32"), run=SAME_RUN)
OPS = ("append_kv", "rope_append", "compact_kv", "merge_states", "build", "expand", "ngram")
DRAFTING = of_runs.family(*OPS, run=SAME_RUN)
DRAFTERS = (("n-gram tree", "n-gram trees"), ("EAGLE-3 tree", "trees of a small EAGLE-3 head"))
COMBINED = ("n-gram or EAGLE-3 tree", "n-grams, or else the head")
FIRST_LOOK = (
    *((way, way) for way in ("transformers, prompt lookup", "plain")),
    DRAFTERS[0],
    ("n-gram or EAGLE-3 auto", 'n-gram trees, or else a small EAGLE-3 head\'s, by `tree="auto"`'),
)


def kept(name: str, render: Callable[[Result, str], str]) -> Callable[[], str]:
    return lambda: render(load(name), name)


# Page -> its markers -> their content.
PAGES = {
    DOCS / "performance.md": {
        "summary": summary.measured,
        "attention": kept("ops_avx512", of_runs.family("tree_attention", plot="Time against context, tree and batch")),
        "attention-amx": kept("ops_amx", of_runs.family("tree_attention")),
        "latent": kept("ops_amx", of_runs.family("latent_attention", run=AMX_RUN)),
        "recurrent": kept("ops_amx", RECURRENT),
        "verification": kept("ops_avx512", VERIFICATION),
        "drafting": kept("ops_avx512", DRAFTING),
        "gpu": kept("headline_h200", of_runs.on_gpu),
        "real": kept("real_cpu", of_model.gains),
        "real-amx": kept("real_amx", of_model.ways),
    },
    DOCS / "your_model.md": {"accepted": kept("real_cpu", of_model.accepted(*DRAFTERS, COMBINED))},
    DOCS.parent / "README.md": {
        "in-short": kept("headline_h200", of_runs.in_short),
        "gpu": kept("headline_h200", of_runs.first_on_gpu),
        "first-look": kept("real_cpu", of_model.at_once(*FIRST_LOOK)),
    },
    DOCS / "transformers.md": {"architectures": architectures.listed},
    DOCS / "api.md": {"names": make_api.names},
}


def filled(text: str, sections: dict[str, Callable[[], str]]) -> str:
    for marker, shown in sections.items():
        begin, end = f"<!-- {marker}:begin -->\n", f"\n<!-- {marker}:end -->"
        head, rest = text.split(begin, 1)
        text = head + begin + shown() + end + rest.split(end, 1)[1]
    return text


if __name__ == "__main__":
    for page, sections in PAGES.items():
        page.write_text(filled(page.read_text(encoding="utf-8"), sections), encoding="utf-8")
