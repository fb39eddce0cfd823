"""Parts that are imported by name when a feature asks for them, so that any of their files may be deleted."""

from importlib import import_module
from types import MethodType
from typing import Any


class MissingFileError(ImportError):
    """A feature needs a file of nanoengine that is not installed."""


def load(name: str, feature: str) -> Any:
    """Import a module of nanoengine, such as "contrib.kvstore", for a feature that users ask for.

    Raises:
        MissingFileError: the module, or a module of nanoengine that it imports, is not installed.
    """
    wanted = f"nanoengine.{name}"
    try:
        return import_module(wanted)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if missing.partition(".")[0] != "nanoengine":
            raise
        if wanted.startswith(f"{missing}."):  # the whole folder is gone
            missing = wanted
        path = missing.replace(".", "/")
        raise MissingFileError(f"{feature} needs {path}.py, which is not installed") from None


class ContribMethod:
    """A method that is a function of the same name in a module of contrib/, imported when it is looked up."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        function = getattr(load(f"contrib.{self.module}", f"{owner.__name__}.{self.name}"), self.name)
        return function if instance is None else MethodType(function, instance)
