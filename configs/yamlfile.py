"""Reads YAML that people write: whatever is wrong with a text, there is one kind of error for it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

_MOST_BITS = 1024


class YamlError(ValueError):
    """The text is not YAML that can be used; the message says why on one line."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: one of the two values would be dropped without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key: Any = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return the integer; Python itself reads no longer ones in decimal, but would in hexadecimal."""
        number: int = super().construct_yaml_int(node)
        if number.bit_length() > _MOST_BITS:
            raise yaml.constructor.ConstructorError(None, None, "a number is too long", node.start_mark)
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read(text: str) -> Any:
    """Return what a YAML text holds, plain Python values only.

    Raises:
        YamlError: It is no YAML, gives a key twice, holds a date or number that does not exist, or nests too deeply.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise YamlError("it nests too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise YamlError(f"{where}{error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        raise YamlError(f"character {error.position + 1}: {error.reason}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2030-13-45 and integers of thousands of digits
        raise YamlError(" ".join(str(error).split())) from error
