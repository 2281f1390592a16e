"""A drawing as SVG, readable on light and on dark pages: it brings its own background."""

from __future__ import annotations

from html import escape

STYLE = """\
  <style>
    .paper { fill: #fdfdfc; stroke: #c9c9c4 }
    .ink { fill: #22262b } .soft { fill: #5b6168 }
    .line { stroke: #22262b; stroke-width: 1.5; fill: none } .thin { stroke: #9aa0a6; stroke-width: 1; fill: none }
    .dash { stroke-dasharray: 5 4 }
    .a { fill: #1f6fb2 } .b { fill: #b3541e } .c { fill: #2f7d4f } .pale { fill: #c8d3dd }
    .edge-a { stroke: #1f6fb2; stroke-width: 2; fill: none } .edge-b { stroke: #b3541e; stroke-width: 2; fill: none }
    .edge-c { stroke: #2f7d4f; stroke-width: 2; fill: none }
    .on { fill: #ffffff }
    text { font: 13px system-ui, sans-serif } .small { font-size: 11.5px } .strong { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #1b1f24; stroke: #3b4148 }
      .ink { fill: #e6e8ea } .soft { fill: #aab1b8 }
      .line { stroke: #e6e8ea } .thin { stroke: #6b737b }
      .a { fill: #6db3f2 } .b { fill: #f0935a } .c { fill: #6cc08b } .pale { fill: #3d4853 }
      .edge-a { stroke: #6db3f2 } .edge-b { stroke: #f0935a } .edge-c { stroke: #6cc08b }
      .on { fill: #10151a }
    }
  </style>
"""


class Drawing:
    """A drawing with a title for those who cannot see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Begin an empty drawing."""
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, look: str = "ink", anchor: str = "start") -> None:
        """Write a line of text."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{look}" text-anchor="{anchor}">{escape(words)}</text>')

    def line(self, *points: tuple[float, float], look: str = "line") -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{look}"/>')

    def box(self, corner: tuple[float, float], size: tuple[float, float], look: str, radius: int = 0) -> None:
        """Draw a rectangle."""
        (x, y), (width, height) = corner, size
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
        self.parts.append(f'<rect {place} class="{look}"/>')

    def dot(self, x: float, y: float, radius: float, look: str) -> None:
        """Draw a circle."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{look}"/>')

    def __str__(self) -> str:
        """Return the SVG."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"  <title>{escape(self.title)}</title>",
        ]
        paper = f'  <rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="6" class="paper"/>'
        return "\n".join([*lines, STYLE.rstrip(), paper, *(f"  {part}" for part in self.parts), "</svg>", ""])
