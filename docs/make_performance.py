"""Writes the tables of performance.md from the JSON files under benchmarks/results/."""

from __future__ import annotations

from collections.abc import Callable

import measured_tables as of_runs
import predicted_tables as of_code
import summary
from tables import DOCS, Result, load

PREDICTED = ("predicted_a100", "predicted_h200", "others_predicted", "flashinfer_predicted_h200")
RECURRENT = of_runs.family("recurrent_", points=("base", "tree binary 8", "tree binary 128", "rule kimi delta"))
VERIFICATION = of_runs.family("verify_", "sample", points=("base", "tree chain 32"))
DRAFTING = of_runs.family("append_kv", "compact_kv", "merge_states", "build", "expand", "ngram")
WIDE = of_runs.end_to_end(
    "transformers",
    *(f"pagedtree, {way}" for way in ("plain", "n-gram tree", "n-gram tree, auto")),
    *(f"pagedtree, n-gram and draft-model {way}" for way in ("chain", "tree, auto")),
)


def kept(name: str, render: Callable[[Result, str], str]) -> Callable[[], str]:
    def shown() -> str:
        result = load(name)
        return "Not measured." if result is None else render(result, name)

    return shown


# Marker in the page -> what stands there.
SECTIONS = {
    "summary": summary.measured,
    "summary-predicted": summary.predicted,
    "attention": kept("ops_avx512", of_runs.family("tree_attention", plot="Time against context, tree and batch")),
    "latent": kept("latent_cpu", of_runs.family("latent_attention")),
    "recurrent": kept("recurrent_cpu", RECURRENT),
    "verification": kept("ops_avx512", VERIFICATION),
    "options": kept("options_cpu", of_runs.options),
    "drafting": kept("ops_avx512", DRAFTING),
    "real": kept("real_cpu", of_runs.real_table),
    "real-float32": kept("real_float32_cpu", of_runs.real_table),
    "wide": kept("wide_cpu", WIDE),
    "end-to-end": kept("end_to_end_cpu", of_runs.end_to_end()),
    "chosen-trees": kept("chosen_trees_cpu", of_runs.chosen_trees("n-gram", "n-gram and draft-model")),
    "rules": kept("rules", of_runs.rules),
    "vllm": kept("vllm", of_runs.vllm),
    "distributed": kept("distributed", of_runs.distributed),
    "grammars": kept("grammars_cpu", of_runs.grammars),
    "predicted": of_code.attention(*PREDICTED),
    "published": kept("published_predicted", of_code.published),
    "bounds": kept("wgmma_bounds_h200", of_code.bounds),
}


def filled(text: str) -> str:
    for marker, shown in SECTIONS.items():
        begin, end = f"<!-- {marker}:begin -->\n", f"\n<!-- {marker}:end -->"
        head, rest = text.split(begin, 1)
        text = head + begin + shown() + end + rest.split(end, 1)[1]
    return text


if __name__ == "__main__":
    page = DOCS / "performance.md"
    page.write_text(filled(page.read_text()))
