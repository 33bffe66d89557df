"""Machine code as nvdisasm lists it, made by hand."""

from __future__ import annotations

Line = str | tuple[str, int]


def listing(*lines: Line, name: str = "kernel") -> str:
    """Writes (instruction, control code) as nvdisasm does; other lines as they are."""
    out, address = [f"//--------------------- .text.{name}          --------------------------"], 0
    for line in lines:
        if isinstance(line, str):
            out.append(line)
            continue
        out.append(f"        /*{address:04x}*/                   {line[0]} ;   /* 0x0000000000000000 */")
        out.append(f"                                            /* 0x{line[1]:016x} */")
        address += 16
    return "\n".join(out)
