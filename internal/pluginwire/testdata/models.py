"""Reads lines {"model", "json"} and says what the SDK's own models make of each."""

import json
import sys

from langbot_plugin.entities.io import context, req, resp


def parse(model, text):
    value = json.loads(text)
    if model == "ActionEnvelopeContext":
        return context.parse_action_envelope_context(value)
    for module in (context, req, resp):
        if hasattr(module, model):
            return getattr(module, model).model_validate(value)
    raise KeyError(model)


for line in sys.stdin:
    case = json.loads(line)
    try:
        got = parse(case["model"], case["json"])
        dump = got.model_dump(mode="json", **({"include_pending_registration_limit": True} if case["model"] == "RuntimeConfig" else {}))
        answer = {"ok": True, "dump": dump}
    except Exception as e:  # any refusal is a refusal
        answer = {"ok": False, "error": type(e).__name__ + ": " + str(e)[:400]}
    print(json.dumps(answer), flush=True)
