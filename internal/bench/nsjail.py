"""In the place of nsjail where there is none: runs the command without a jail.

The Python runtime shares processes only in its profile "shared", and starts those
with nsjail. What is measured is the runtime, not the jail, so the jail is left out:
paths inside it are replaced by those they are bound to.
"""

import os
import sys

args = sys.argv[1:]
cut = args.index("--")
options, command = args[:cut], args[cut + 1 :]
env, cwd, binds = {}, "/", {}
i = 0
while i < len(options):
    name = options[i]
    value = options[i + 1] if i + 1 < len(options) else ""
    if name in ("--env", "-E"):
        key, _, text = value.partition("=")
        env[key] = text
    elif name == "--cwd":
        cwd = value
    elif name.startswith("--bindmount"):
        source, _, inside = value.partition(":")
        binds[inside or source] = source
    i += 1
outside = {k: v for k, v in binds.items() if k in ("/plugin", "/plugin-dependencies")}
if "PYTHONPATH" in env:
    env["PYTHONPATH"] = os.pathsep.join(outside.get(p, p) for p in env["PYTHONPATH"].split(os.pathsep))
os.chdir(outside.get(cwd, "/"))
os.execve(command[0], command, env)
