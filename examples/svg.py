"""A few SVG shapes in one style, light and dark, of which the picture of a run is made."""

from __future__ import annotations

from html import escape

__all__ = ["Drawing", "pill_width"]

FONT_SIZE = 12
_MONO_ADVANCE = 0.602  # as a share of the font size, in every common monospaced font

# Colour roles: name -> (light, dark).
_COLORS = {
    "page": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#151b23"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "blue": ("#0969da", "#4493f8"),
    "blue-fill": ("#ddf4ff", "#15273f"),
    "green": ("#1a7f37", "#3fb950"),
    "green-fill": ("#c9f2d2", "#163822"),
    "gold": ("#9a6700", "#d29922"),
    "gold-fill": ("#fff1b3", "#3a2d12"),
}

_SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# The other style of each shape class: everything that is not a colour.
_SHAPES = f"""
text {{ font-family: {_SANS}; font-size: {FONT_SIZE}px; }}
text.mono {{ font-family: {_MONO}; white-space: pre; }}
text.head {{ font-size: 15px; font-weight: 600; }}
text.bold {{ font-weight: 600; }}
text.small {{ font-size: 10.5px; }}
.thin {{ stroke-width: 1; }}
.thick {{ stroke-width: 2.4; }}
.dash {{ stroke-dasharray: 4 3; }}
.none {{ fill: none; }}
"""


def _palette(theme: int) -> str:
    colors = {name: both[theme] for name, both in _COLORS.items()}
    return " ".join(f".fill-{name} {{ fill: {c}; }} .stroke-{name} {{ stroke: {c}; }}" for name, c in colors.items())


class Drawing:
    """Collects shapes; y grows downwards. `style` arguments are class names, e.g. "fill-panel stroke-line thin"."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._shapes: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, *, radius: float = 0, hover: str = ""
    ) -> None:
        size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}"'
        self._add("rect", size, style, hover)

    def path(self, data: str, style: str) -> None:
        self._add("path", f'd="{data}"', f"none {style}")

    def text(self, x: float, y: float, text: str, style: str = "fill-ink", *, anchor: str = "start") -> None:
        """`y` is the baseline; `anchor` is start, middle or end."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._shapes.append(f'<text {place} class="{style}">{escape(text)}</text>')

    def spans(self, x: float, y: float, spans: list[tuple[str, str]]) -> None:
        """One monospaced line of (text, style) pieces."""
        pieces = "".join(f'<tspan class="{style}">{escape(text)}</tspan>' for text, style in spans if text)
        self._shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" class="mono" xml:space="preserve">{pieces}</text>')

    def pill(self, x: float, y: float, text: str, style: str, ink: str, *, hover: str = "") -> float:
        """A token in a rounded box, its left middle at (x, y); returns the box's width."""
        width = pill_width(text)
        self.rect(x, y - 10, width, 20, f"{style} thin", radius=6, hover=hover)
        self.text(x + width / 2, y + 4, text, f"mono {ink}", anchor="middle")
        return width

    def render(self, width: float, height: float) -> str:
        body = "\n".join("".join(self._shapes[i : i + 20]) for i in range(0, len(self._shapes), 20))
        return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" \
width="{width:.0f}" height="{height:.0f}" role="img">
<title>{escape(self.title)}</title>
<style>{_SHAPES}{_palette(0)}
@media (prefers-color-scheme: dark) {{ {_palette(1)} }}</style>
<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" class="fill-page stroke-line thin"/>
{body}
</svg>
"""

    def _add(self, tag: str, geometry: str, style: str, hover: str = "") -> None:
        inner = f"<title>{escape(hover)}</title>" if hover else ""
        self._shapes.append(f'<{tag} {geometry} class="{style}">{inner}</{tag}>')


def pill_width(text: str) -> float:
    """The width in pixels of the box around `text` in the drawing's monospaced font."""
    return max(len(text) * FONT_SIZE * _MONO_ADVANCE + 14, 24)
