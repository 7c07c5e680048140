"""Shipped recipes, by what they describe."""

from __future__ import annotations

import re
from functools import cache

from ssl_vit import recipe


@cache
def comparisons() -> list[str]:
    """Names of those that describe a comparison, found by their text: to read all of them takes seconds."""
    texts = {name: path.read_text() for name, path in recipe.shipped().items()}

    def has_arms(name: str) -> bool:
        base = re.search(r"^base: (\S+)$", texts[name], re.M)
        return "\narms:" in texts[name] or (base is not None and has_arms(base[1]))

    return [name for name in texts if has_arms(name)]
