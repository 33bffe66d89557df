"""What a multiprocessor does with an instruction: which unit takes it, for how long, and how late its result comes.

Rates and latencies are those of public measurements and of the stall counts that ptxas writes; how well whole loops fit
published figures stands in docs/performance.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from sass_listing import Instruction, tensor_flops

TENSOR = {"HMMA", "IMMA", "BMMA", "QMMA"}
WGMMA = {"HGMMA", "QGMMA", "IGMMA"}
FLOAT = {"FADD", "FMUL", "FFMA", "FADD32I", "FMUL32I", "FFMA32I"}
HALF = {"HFMA2", "HMUL2", "HADD2"}
INTEGER_PRODUCT = {"IMAD", "IMUL", "IMAD32I"}
SLOW = {"MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV"}
SHARED = {"LDS", "LDSM", "STS", "STSM", "SHFL", "ATOMS"}
GLOBAL = {"LDG", "LD", "STG", "ST", "LDL", "STL", "ATOM", "ATOMG", "RED"}
SPECIAL = {"S2R", "S2UR", "LDC", "B2R", "CCTL", "R2B"}
CONTROL = {
    "BRA", "BSSY", "BSYNC", "BREAK", "EXIT", "CALL", "RET", "WARPSYNC", "NOP", "YIELD", "DEPBAR", "LDGDEPBAR", "BAR",
    "MEMBAR", "ERRBAR", "FENCE", "WARPGROUP", "SYNCS", "UTMALDG", "ELECT", "NANOSLEEP", "ARRIVES", "UCGABAR_ARV",
    "UCGABAR_WAIT", "BMOV", "USETMAXREG", "UTMACMDFLUSH",
}  # fmt: skip


class Use(NamedTuple):
    """A unit, the cycles for which an instruction occupies it, and how the instruction goes there: "fixed" (the stall
    count says when the result is there), "slow", "shared", "global", "copy" (to shared memory) or "async" (wgmma)."""

    unit: str
    cycles: float
    way: str


@dataclass(frozen=True)
class Machine:
    """A GPU; cycles are those of a sub-partition, of which a multiprocessor has four.

    Attributes:
        read_share: part of the memory's nominal bandwidth that a good copy reaches.
        l2_bytes: bytes per cycle that a multiprocessor gets from L2.
        hmma: cycles between two HMMA.16816; float_cycles: those of a warp's FADD, FMUL or FFMA.
        wgmma: products and sums of a sub-partition per cycle.
        load_interval: cycles between instructions for shared or global memory; load_queue: how many of them can wait.
        atomic_cycles: of a pass of an atomic addition to shared memory, which reads the banks and writes them;
            atomic_passes: that it takes, two where two lanes share a column of banks (tile/radix.cuh). Neither was
            compared with published figures.
        shared_factor: multiplies the cycles of shared memory; the only number that was fitted to published figures.
    """

    name: str
    architecture: str
    multiprocessors: int
    ghz: float
    memory_gb_per_s: float
    read_share: float = 0.90
    l2_bytes: float = 40.0
    memory_latency: int = 600
    l2_latency: int = 260
    hmma: int = 8
    float_cycles: int = 2
    wgmma: int = 512
    shared_latency: int = 19
    matrix_latency: int = 25
    l1_latency: int = 30
    slow_latency: int = 18
    shuffle_latency: int = 22
    load_interval: int = 4
    load_queue: int = 8
    barrier_latency: int = 16
    branch: int = 4
    atomic_cycles: float = 2.0
    atomic_passes: float = 2.0
    shared_factor: float = 1.15

    def bytes_per_cycle(self, source: str) -> float:
        """Bytes per cycle that a multiprocessor gets from "memory" or "l2"."""
        share = self.memory_gb_per_s * self.read_share / self.multiprocessors / self.ghz
        return self.l2_bytes if source == "l2" else min(self.l2_bytes, share)

    def use(self, instruction: Instruction) -> Use:
        opcode, root = instruction.opcode, instruction.root
        words = 4 if ".128" in opcode else 2 if ".64" in opcode else 1
        if root in TENSOR:
            is_half = ".1688" in opcode and "TF32" not in opcode  # tf32 has half the rate of 16 bits
            return Use("tensor", max(1, round(self.hmma * (0.5 if is_half else 1))), "fixed")
        if root in WGMMA:
            rate = self.wgmma * (1 if root == "HGMMA" else 2)
            return Use("tensor", max(8, tensor_flops(opcode) // 2 // rate), "async")
        if root in FLOAT or root in HALF:
            return Use("float", self.float_cycles if root in FLOAT else 2, "fixed")
        if root in INTEGER_PRODUCT:
            return Use("float", 4 if ".WIDE" in opcode or ".HI" in opcode else 2, "fixed")
        if root in SLOW:
            return Use("slow", 8, "slow")
        if root == "ATOMS" and ".ARRIVE" not in opcode:
            return Use("shared", self.atomic_cycles * self.atomic_passes, "shared")
        if root in SHARED and instruction.predicate != "!PT":  # never executed, ptxas puts them before LDGSTS
            matrices = re.search(r"\.([124])$", opcode) if root in ("LDSM", "STSM") else None
            cycles = int(matrices[1]) if matrices else 1 if root in ("LDSM", "STSM") else words
            return Use("shared", cycles * self.shared_factor, "shared")
        if root in GLOBAL:
            return Use("shared", words * self.shared_factor, "global")
        if root == "LDGSTS":
            return Use("shared", (words + 1 if words == 4 else 2) * self.shared_factor, "copy")
        if root in SPECIAL:
            return Use("shared", self.shared_factor, "shared")
        if root in CONTROL or root in SHARED:
            return Use("control", 1, "fixed")
        if root.startswith("U") or root == "R2UR":
            return Use("uniform", 1 if root == "ULDC" else 2, "fixed")
        return Use("integer", 2, "fixed")


A100 = Machine("A100 SXM 80 GB", "sm_80", 108, 1.41, 2039)
H100 = Machine(
    "H100 SXM", "sm_90", 132, 1.755, 3352, l2_bytes=36, memory_latency=650, l2_latency=270, hmma=6, float_cycles=1
)
H200 = replace(H100, name="H200 SXM", memory_gb_per_s=4800)
# No published figure was compared with the model of these. Their rates are those of the data sheets; for B200's
# mma.sync NVIDIA states none, and A100's is assumed.
L40S = Machine(
    "L40S", "sm_89", 142, 2.52, 864, l2_bytes=16, memory_latency=750, l2_latency=300, hmma=16, float_cycles=1
)
B200 = Machine(
    "B200", "sm_100", 148, 1.85, 8000, l2_bytes=36, memory_latency=800, l2_latency=320, hmma=8, float_cycles=1
)
RTX_PRO_6000 = Machine(
    "RTX PRO 6000 Blackwell", "sm_120", 188, 2.6, 1792, l2_bytes=16, memory_latency=850, l2_latency=350, hmma=16,
    float_cycles=1,
)  # fmt: skip
MACHINES = {
    "a100": A100, "h100": H100, "h200": H200, "l40s": L40S, "b200": B200, "rtx_pro_6000": RTX_PRO_6000,
}  # fmt: skip
