"""Import PyTorch Lightning without packages that are not used here.

Lightning imports torchmetrics, which imports transformers, torchvision, matplotlib and SciPy if
they are installed, for metrics that no task here computes: about half of the start-up time. Telling
torchmetrics that they are absent keeps them out; our own code still imports them when needed.
This patch is not in `tasks/lightning_patches.py`, which imports Lightning: it must come first.
"""

import logging
import re
import sys
import warnings

_UNUSED = {
    *("transformers", "torchvision", "matplotlib", "scienceplots"),
    *("scipy", "onnxruntime", "librosa", "torchaudio", "regex"),
}
EXPECTED_WARNINGS = (  # Lightning's warnings about what is intended here
    ".*treespec, LeafSpec.*",  # its own use of torch
    "Experiment logs directory .* exists",  # a resumed run keeps its rows
    "Checkpoint directory .* exists",  # and its checkpoints
    ".*could not find the monitored key.*",  # a run stopped before the first validation
    ".*smaller than the logging interval.*",
    ".*does not have many workers.*",  # data in memory
    ".*recommended to use .*sync_dist.*",  # torchmetrics has reduced them already
)


def import_lightning() -> None:
    """Import `pytorch_lightning`, without its hints and the warnings that are expected."""
    if "torchmetrics" not in sys.modules:
        import_without_unused()
    import pytorch_lightning  # noqa: F401

    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    format_warnings()
    for name in ("pytorch_lightning", "lightning_fabric"):  # no hints and lists of hardware
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("pytorch_lightning.profilers").setLevel(logging.INFO)  # their reports


def format_warnings() -> None:
    """Prints warnings as sentences; Lightning, once imported, prints them in a way of its own."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"


def import_without_unused() -> None:
    """Import `pytorch_lightning` while torchmetrics takes the packages in `_UNUSED` for absent."""
    from lightning_utilities.core import imports
    from lightning_utilities.core.imports import RequirementCache

    check = RequirementCache._check_available
    is_available = imports.package_available

    def is_used_and_available(package_name: str) -> bool:
        return package_name not in _UNUSED and is_available(package_name)

    def check_used(self: RequirementCache) -> None:
        name = re.split(r"[^\w-]", self.requirement or self.module or "")[0]
        if name in _UNUSED:
            self.available = False
            self.message = f"{name} is not used here"
        else:
            check(self)

    RequirementCache._check_available = check_used  # type: ignore[method-assign]
    imports.package_available = is_used_and_available  # type: ignore[assignment]
    try:
        import pytorch_lightning  # noqa: F401
    finally:
        RequirementCache._check_available = check  # type: ignore[method-assign]
        imports.package_available = is_available
