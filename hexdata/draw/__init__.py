"""Drawings of Hex boards: SVG for pages and notebooks, text for terminals."""

from hexdata.draw.diagram import Diagram, Shades
from hexdata.draw.svg import board_svg, film_svg
from hexdata.draw.terminal import board_text

__all__ = ["Diagram", "Shades", "board_svg", "board_text", "film_svg"]
