"""Imports optional parts by name when a feature needs them, so that any of their files may be deleted."""

from importlib import import_module
from types import MethodType
from typing import Any


class MissingFileError(ImportError):
    """Raised when a feature needs a file of nanoengine, or a package, that is not installed."""


def load(name: str, feature: str) -> Any:
    """Import and return a module of nanoengine, such as "contrib.kvstore", that a feature needs.

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


class OptionalMethod:
    """Makes a function of an optional module a method, imported at the first access.

    The function has the method's name, or is `function`.
    """

    def __init__(self, module: str, function: str | None = None) -> None:
        self.module, self.function = module, function

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        module = load(self.module, f"{owner.__name__}.{self.name}")
        function = getattr(module, self.function or self.name)
        return function if instance is None else MethodType(function, instance)
