"""Prints the SDK's enumerations of actions as JSON: class, then values."""

import enum
import json

from langbot_plugin.entities.io.actions import enums

print(json.dumps({
    name: sorted(str(m.value) for m in cls)
    for name, cls in vars(enums).items()
    if isinstance(cls, type) and issubclass(cls, enum.Enum) and len(cls)
}))
