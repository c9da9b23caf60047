"""Tessera in Python: load a trained model and use it.

    import tessera

    model = tessera.load("runs/vit/latest")
    model.predict("photo.png").label

`load` takes what the command line takes; the class of its result has the methods of its task.
Nothing heavy is imported before the first use.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.utils.errors import DataError, UsageError
    from tasks.errors import RunError
    from tasks.predictions import LabelSet, Number, Prediction, Score

    from .images import ImageClassifier, MaskedImageModel, Reconstruction
    from .language import LanguageModel
    from .loading import load
    from .models import Attention, Model
    from .pixels import ImageGenerator
    from .predictor import Predictor
    from .texts import Filling, MaskedLanguageModel, TextClassifier
    from .translation import Translator

    __version__: str

__all__ = [
    "Attention",
    "DataError",
    "Filling",
    "ImageClassifier",
    "ImageGenerator",
    "LabelSet",
    "LanguageModel",
    "MaskedImageModel",
    "MaskedLanguageModel",
    "Model",
    "Number",
    "Prediction",
    "Predictor",
    "Reconstruction",
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
    "ImageGenerator": ".pixels",
    "LanguageModel": ".language",
    "MaskedImageModel": ".images",
    "MaskedLanguageModel": ".texts",
    "Model": ".models",
    "Predictor": ".predictor",
    "Reconstruction": ".images",
    "TextClassifier": ".texts",
    "Translator": ".translation",
    "__version__": "tasks",
    "load": ".loading",
}

PACKAGES = {"tasks": "errors.py", "modules": "norm.py", "datamodules": "base.py"}  # a file of each

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in MODULES:
            raise AttributeError(f"module 'tessera' has no attribute '{name}'")
        try:
            found = getattr(import_module(MODULES[name], __name__), name)
        except ImportError as error:
            raise hidden_packages() or error from error
        globals()[name] = found
        return found


def hidden_packages() -> ImportError | None:
    """The error to raise if Python finds packages that are not ours under the names of ours."""
    for package, file in PACKAGES.items():
        folders = list(getattr(find_spec(package), "submodule_search_locations", None) or [])
        if not any(Path(folder, file).exists() for folder in folders):
            place = folders[0] if folders else f"the module {package}"
            return ImportError(
                f"{place} hides Tessera's package {package}: rename it, or start Python elsewhere "
                "(the command `tessera` works in every folder)"
            )
    return None


def __dir__() -> list[str]:
    return __all__
