"""What a colour means, from a palette that people with a colour vision deficiency can distinguish.

Okabe and Ito, "Color Universal Design", 2008. Colour is never the only sign: every state is also a word.
"""

from __future__ import annotations

from typing import Final

BAD: Final = "#D55E00"  # vermillion
WARNING: Final = "#E69F00"  # orange
GOOD: Final = "#009E73"  # bluish green
BETTER: Final = "#56B4E9"  # sky blue
LEARNING: Final = "#F0E442"  # yellow
SILENT: Final = "#CC79A7"  # reddish purple
MAIN: Final = "#0072B2"  # blue
NEUTRAL: Final = "#999999"
GONE: Final = "#666666"

SERIES: Final = (MAIN, WARNING, GOOD, SILENT, BETTER)  # for curves that are not states
