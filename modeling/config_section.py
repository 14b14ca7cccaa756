"""One JSON object of a configuration file, read key by key; whatever nobody asked for can be reported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxdi_qwen.modeling.config_checks import shown
from nxdi_qwen.modeling.errors import InputError


class ConfigSection:
    """A JSON object that remembers which of its keys were read. `null` counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self._null_keys = {key for key, value in values.items() if value is None}
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where it is absent."""
        self._read.add(key)
        return self.values.get(key, default)

    def require(self, key: str) -> Any:
        """The value of `key`. Raises InputError where it is absent."""
        value = self.get(key)
        if value is None:
            state = "null" if key in self._null_keys else "missing"
            raise InputError(f"{key} is {state}; add it with the value of the published configuration")
        return value

    def section(self, key: str) -> ConfigSection | None:
        """The object under `key`, None where it is absent. Raises InputError for anything but an object."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InputError(f"{key} must be an object, got {shown(value)}")
        return ConfigSection(value)

    def unread(self) -> list[str]:
        """The keys that were never asked for, sorted."""
        return sorted(self.values.keys() - self._read)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises InputError that names the file and, for bad JSON, the line."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{path} is not valid JSON ({error.msg} at {place}); download it again") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or numbers and nesting beyond Python's limits
        raise InputError(f"{path} is not a configuration file ({error}); download it again") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a JSON object, got {shown(values)}; download it again")
    return values
