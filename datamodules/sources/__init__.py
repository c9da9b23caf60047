"""Where labelled images come from: a source is a class and an entry in `SOURCES`."""

from datamodules.sources.base import DatasetOptions, Source
from datamodules.sources.digits import Digits
from datamodules.sources.folder import Folder
from datamodules.sources.hub import Hub

__all__ = ["SOURCES", "DatasetOptions", "Source"]

SOURCES: dict[str, type[Source]] = {"digits": Digits, "hub": Hub, "folder": Folder}
