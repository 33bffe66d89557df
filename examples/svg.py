"""A few SVG shapes in one style, light and dark, with which the pictures of docs/ and of a run are drawn."""

from __future__ import annotations

from html import escape

__all__ = ["Drawing", "mono_width"]

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
    "red": ("#cf222e", "#f85149"),
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
.faint {{ opacity: 0.45; }}
.none {{ fill: none; }}
"""


def mono_width(text: str) -> float:
    """The width in pixels of `text` in the drawing's monospaced font."""
    return len(text) * FONT_SIZE * _MONO_ADVANCE


def _palette(theme: int) -> str:
    rules = []
    for name, colors in _COLORS.items():
        color = colors[theme]
        rules.append(f".fill-{name} {{ fill: {color}; }} .stroke-{name} {{ stroke: {color}; }}")
    return "\n".join(rules)


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

    def circle(self, x: float, y: float, radius: float, style: str, *, hover: str = "") -> None:
        self._add("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"', style, hover)

    def path(self, data: str, style: str, *, arrow: str = "") -> None:
        """`arrow`: the colour role of a head at the path's end."""
        head = f' marker-end="url(#head-{arrow})"' if arrow else ""
        self._add("path", f'd="{data}"{head}', f"none {style}")

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str, *, arrow: str = "") -> None:
        self.path(f"M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}", style, arrow=arrow)

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
        heads = "".join(
            f'<marker id="head-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0.8 L7.5 4 L0 7.2 z" class="fill-{name}"/></marker>'
            for name in ("ink", "muted", "blue", "green", "gold")
        )
        body = "\n".join(self._shapes)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" \
width="{width:.0f}" height="{height:.0f}" role="img">
<title>{escape(self.title)}</title>
<style>{_SHAPES}{_palette(0)}
@media (prefers-color-scheme: dark) {{
{_palette(1)}
}}</style>
<defs>{heads}</defs>
<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" class="fill-page stroke-line thin"/>
{body}
</svg>
"""

    def _add(self, tag: str, geometry: str, style: str, hover: str = "") -> None:
        inner = f"<title>{escape(hover)}</title>" if hover else ""
        self._shapes.append(f'<{tag} {geometry} class="{style}">{inner}</{tag}>')


def pill_width(text: str) -> float:
    return max(mono_width(text) + 14, 24)
