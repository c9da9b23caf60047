"""Tessera in Python: load a trained model and use it.

    import tessera

    model = tessera.load("runs/vit/latest")
    model.predict("photo.png").label

`load` takes what the command line takes; the class of its result has the methods of its task.
Nothing heavy is imported before the first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.utils.errors import DataError, UsageError
    from tasks.errors import RunError
    from tasks.predictions import LabelSet, Number, Prediction, Score

    from .images import ImageClassifier
    from .language import LanguageModel
    from .loading import load
    from .models import Attention, Model
    from .predictor import Predictor
    from .texts import Filling, MaskedLanguageModel, TextClassifier
    from .translation import Translator

    __version__: str

__all__ = [
    "Attention",
    "DataError",
    "Filling",
    "ImageClassifier",
    "LabelSet",
    "LanguageModel",
    "MaskedLanguageModel",
    "Model",
    "Number",
    "Prediction",
    "Predictor",
    "RunError",
    "Score",
    "TextClassifier",
    "Translator",
    "UsageError",
    "load",
]
MODULES = {
    **dict.fromkeys(("DataError", "RunError", "UsageError"), "tasks.errors"),
    **dict.fromkeys(("LabelSet", "Number", "Prediction", "Score"), "tasks.predictions"),
    "Attention": ".models",
    "Filling": ".texts",
    "ImageClassifier": ".images",
    "LanguageModel": ".language",
    "MaskedLanguageModel": ".texts",
    "Model": ".models",
    "Predictor": ".predictor",
    "TextClassifier": ".texts",
    "Translator": ".translation",
    "__version__": "tasks",
    "load": ".loading",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in MODULES:
            raise AttributeError(f"module 'tessera' has no attribute '{name}'")
        globals()[name] = getattr(import_module(MODULES[name], __name__), name)
        return globals()[name]


def __dir__() -> list[str]:
    return __all__
