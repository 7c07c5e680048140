"""Self-supervised pretraining of Vision Transformers, and comparisons that measure what it gains.

import ssl_vit

network = ssl_vit.load("runs/digits_ssl")                       # a timm VisionTransformer
frame = ssl_vit.embed("runs/digits_ssl", "data/digits/test")    # key, label, embedding
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "train": "ssl_vit.api",
    "evaluate": "ssl_vit.api",
    "embed": "ssl_vit.analysis.embeddings",
    "load": "ssl_vit.api",
    "read_results": "ssl_vit.api",
    "compare": "ssl_vit.comparison.run",
    "few_shot_accuracy": "ssl_vit.evaluators.few_shot",
}

if TYPE_CHECKING:
    from ssl_vit.analysis.embeddings import embed as embed
    from ssl_vit.api import evaluate as evaluate
    from ssl_vit.api import load as load
    from ssl_vit.api import read_results as read_results
    from ssl_vit.api import train as train
    from ssl_vit.comparison.run import compare as compare
    from ssl_vit.evaluators.few_shot import few_shot_accuracy as few_shot_accuracy


def __getattr__(name: str) -> Any:
    """Import on first use: `import ssl_vit` stays fast, without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ssl_vit' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_MODULES]
