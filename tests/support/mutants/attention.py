"""Mutants of GPU attention and its engine's choice."""

from __future__ import annotations

from support.mutants.mutant import CASES, Mutant, family

__all__ = ["ENGINE", "JOINED", "LATENT_WGMMA", "SEGMENTS", "WGMMA", "WIDE"]

ATTENTION = ("tests/ops/test_tree_attention.py", CASES)
SELF_TEST = ("tests/kernels/test_engine.py",)
BITS, LOGITS = ("tests/ops/test_segments.py",), ("tests/generation/test_generate_segments.py",)


of_wgmma = family("cuda/attention/{}_sm90.cuh", ATTENTION, "simt", "simt and wgmma")
of_join = family("cuda/attention/{}.cuh", ("tests/kernels/test_schedule.py",), "simt", "simt and not wgmma")
of_wide = family("cuda/attention/{}_wide.cuh", ATTENTION, "simt", "simt and (latent or 576x512) and not wgmma")


def of_latent(name: str, line: str, broken: str) -> Mutant:
    file = "cuda/attention/attend_latent_sm90.cuh"
    return Mutant(name, file, line, broken, ATTENTION, "simt", "simt and latent and wgmma")


WGMMA = [
    of_wgmma("no phase flip", "stage", "      parity ^= 1;\n", ""),
    of_wgmma(
        "V given back while it is multiplied", "attend",
        "        end_values();\n      }\n      if (stage != stages.first) release(values);",
        "        if (stage != stages.first) release(values);\n        end_values();\n      }",
    ),
    of_wgmma(
        "K given back while it is multiplied", "attend",
        "      ptx::wgmma_wait<I::kOverlapsSoftmax", "      release(keys);\n      ptx::wgmma_wait<I::kOverlapsSoftmax",
    ),
    of_wgmma("Q given back before its last scores", "attend", "if (stage + I::kTiles >= stages.end) release_q();",
             "if (stage == stages.first) release_q();"),
    of_wgmma("windows that begin with the first key", "stage", "shared_.row_windows[place][thread()] = row;",
             "shared_.row_windows[place][thread()] = TreeWindow{0, row.first_bit};"),
    of_wgmma("another stride in descriptors", "attend", "kEightRows = 8 * 128", "kEightRows = 4 * 128"),
    of_wgmma(
        "no proxy fence behind cp.async", "attend",
        "if (!I::kDecodes && !(plain && maps_.box > 0)) ptx::fence_proxy_async();", "",
    ),
    of_wgmma(
        "no proxy fence behind decoded codes", "stage",
        "ptx::fence_proxy_async();\n      ptx::mbar_arrive", "ptx::mbar_arrive",
    ),
    of_wgmma("rows of the accumulator swapped", "attend", "first_row + half * 8", "first_row + (1 - half) * 8"),
    of_wgmma("columns of a quad swapped", "attend", "(n + lane % 2) * 8", "(n + 1 - lane % 2) * 8"),
    of_wgmma("sums not rescaled", "attend", "&& changed) rescale<I>(sums, rescales);", "&& false) {}"),
    of_wgmma("V read that no row sees", "stage", "if (!is_attended) (I::kLatent ? row.k : row.v) = nullptr;", ""),
    of_wgmma("boxes of the first head", "stage", "tile.kv_head * maps_.head_panels", "0"),
    of_wgmma("keys of the next piece", "attend", "if (stage + I::kTiles > end) keys.hide_from(kKvTile);", ""),
    of_wgmma("fewer bytes expected", "stage", "(panels) * kPanelBytes);", "(panels) * kPanelBytes / 2);"),
    of_wgmma("no first turn", "attend", "if (group == 1) pass(true);", ""),
    of_wgmma("a group without rows does not give stages back", "attend", "return skip(stages);", "return;"),
]  # fmt: skip

ENGINE = [
    Mutant(
        "a verdict with more behind it counts", "cuda/engine.cu",
        "beginning_of(path) == beginning + kPassed", "beginning_of(path).starts_with(beginning + kPassed)",
        SELF_TEST, "simt", "test_engine",
    ),
    Mutant(
        "maps that the driver has refused", "cuda/attention/cache_maps.cuh",
        "if (!k || !v) return maps;", "if (!k || !v) return CacheMaps{{}, {}, box, 1, 1, 0};",
        ("tests/kernels/test_panels.py",), "simt", "agree",
    ),
    Mutant(
        "panels of K behind each other's rows", "cuda/attention/attend_sm90.cuh",
        "(panel * I::kPanelStep + in_panel) / 16", "(step * 32) / 16",
        ("tests/kernels/test_panels.py",), "simt", "agree",
    ),
    Mutant(
        "a self-test with fewer rows passes", "check/self_test.py", "len(lines) == expected + 1 and", "lines and",
        SELF_TEST, "python", "end_of_the_process",
    ),
]  # fmt: skip

JOINED = [
    of_join("empty ranges counted as pieces", "ranges", "order.count += begin < end;", "order.count += 1;"),
    of_join("tickets that stay taken", "join", "*arrived = *claimed_parts = 0;", "*arrived = 0;"),
    of_join("who goes is not counted", "join", "claimed(atomicAdd(claimed_parts, kUpper));", ""),
    of_join("parts that nobody takes", "join", "next = tickets.claim();", "next = tickets.count;"),
    of_join("states of the first rows", "join", "row - first_pair * 2;", "row % 2;"),
]  # fmt: skip

SEGMENTS = [
    Mutant(
        "cuts by the batch", "core/schedule.h",
        "return kv_tile - static_cast<int32_t>(by_segment.remainder(static_cast<uint32_t>(kv_tile)));",
        "return kv_tile;", BITS,
    ),
    Mutant(
        "segments of a range as one", "core/schedule.h", "end_visible_tile(shape, last)), of.begin + shape",
        "end_visible_tile(shape, last)), of.end + shape", BITS,
    ),
    Mutant("tiles by max_seqlen_q", "cuda/attention/config.h", "p.segment > 0 ? INT32_MAX : p.max", "p.max", BITS,
           "simt", "simt and not wgmma"),
    Mutant("a prompt's chunks by its neighbours", "generation/scheduler.py", "segment is not None", "segment == 0",
           LOGITS, "python", "logits and cpu"),
]  # fmt: skip

WIDE = [
    of_wide("the partner's scores not added", "attend", "scores[a][0][2] += taken.z;", ""),
    of_wide("keys of the other half", "attend", "keys = warp / 2 * 16,", "keys = (1 - warp / 2) * 16,"),
    of_wide("all of the depth twice", "attend", "depth = half * 32;", "depth = 0;"),
    of_wide(
        "the largest score of one warp", "attend",
        "tops[a][half] = fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w));", "",
    ),
    of_wide("K where V should be", "kernel", "add_wide_values<I>(shared, values, sums);",
            "add_wide_values<I>(shared, keys, sums);"),
    of_wide("keys copied that no row sees", "stage", "is_read = is_read && (seen >> key & 1u) != 0;", ""),
    of_wide("seen by the first rows only", "stage", "__reduce_or_sync(kWholeWarp, ", "(kWholeWarp & "),
    of_wide("512 columns of 576", "attend", "column >= I::kHeadDimV && p.head_dim <= I::kHeadDimV", "column >= 512"),
    of_wide("576 columns of 512", "attend", "column >= I::kHeadDimV && p.head_dim <= I::kHeadDimV", "column >= 576"),
]  # fmt: skip

LATENT_WGMMA = [
    of_latent("each group's own largest scores", "raised = of_row(1 - group_, half);", "raised = old;"),
    of_latent("the first group's weights under its own maxima",
              "scores[0][n][i] *= changed ? rescales[0][i / 2] : 1.0f;", ";"),
    of_latent("a group's own weights for both stages", "weights[n][i] = others[n][i];", ";"),
    of_latent("the second group's sums under the first one's maxima", "rescales[0][half] *= raised[0][half];", ";"),
    of_latent(
        "weights taken before they are given",
        "ptx::barrier_sync(kWeightsReady + 1, I::kConsumers);\n    read_weights", "read_weights",
    ),
    of_latent(
        "values given back while they are multiplied",
        "ptx::wgmma_wait<0>();\n        ptx::wgmma_results(sums.out[0]);\n        release(at.stage, ",
        "release(at.stage, static_cast<int>(group_));\n        ptx::wgmma_wait<0>();\n        std::max(at.stage, ",
    ),
    of_latent("weights of a stage that is not there", "if (hides_all) keys.hide_from(0);", ""),
    of_latent("both groups have the first columns", "stage_of(at) + column() / 64 * I::kPanelStep", "stage_of(at)"),
    of_latent("the sum of one group", "own[half] + other", "own[half]"),
    of_wgmma("a part given back after one of its uses", "stage",
             "part < 2 ? I::kShape.warps() : I::kShape.warps() / 2", "I::kLatent ? 4 : I::kShape.warps()"),
    of_latent("the last columns left out", "if (p_.head_dim == I::kHeadDim) start", "if (false) start"),
]  # fmt: skip
