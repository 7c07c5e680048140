"""Self-supervised pretraining of Vision Transformers, and comparisons that measure what it gains.

import ssl_vit

run = ssl_vit.train("pretrain_vit_tiny", data="my_images")      # a folder of images
network = ssl_vit.load(run)                                     # a timm VisionTransformer
frame = ssl_vit.embed(run, "my_images")                         # key, file, label, embedding
table = ssl_vit.evaluate(run, "few_shot").table                 # a pandas DataFrame
print(ssl_vit.compare("own_images", data="my_images").headline)

Wrong input raises `UserError`, a failure during a run (full disk, non-finite loss) `RunError`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    **dict.fromkeys(
        ("train", "evaluate", "compare", "embed", "load", "export", "read_results"),
        "ssl_vit.api",
    ),
    "check_data": "ssl_vit.data.check",
    "few_shot_accuracy": "ssl_vit.evaluators.few_shot",
    **dict.fromkeys(("UserError", "RunError"), "ssl_vit.interfaces"),
}

if TYPE_CHECKING:
    from ssl_vit.api import compare as compare
    from ssl_vit.api import embed as embed
    from ssl_vit.api import evaluate as evaluate
    from ssl_vit.api import export as export
    from ssl_vit.api import load as load
    from ssl_vit.api import read_results as read_results
    from ssl_vit.api import train as train
    from ssl_vit.data.check import check_data as check_data
    from ssl_vit.evaluators.few_shot import few_shot_accuracy as few_shot_accuracy
    from ssl_vit.interfaces import RunError as RunError
    from ssl_vit.interfaces import UserError as UserError
else:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import on first use: `import ssl_vit` stays fast, without torch."""
        if name not in _MODULES:
            raise AttributeError(f"module 'ssl_vit' has no attribute '{name}'")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_MODULES]
