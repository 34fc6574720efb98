# Requirement rules, by the library that pip itself uses. Runs isolated (-I), reads
# one JSON request from standard input and answers with one JSON document.
import json
import re
import sys


def answer(**fields):
    json.dump(fields, sys.stdout)
    sys.exit(0)


def refuse(kind, **fields):
    answer(error=dict(fields, kind=kind))


def library():
    # pip's vendored copy first: it is the one that will install.
    for prefix in ("pip._vendor.packaging", "packaging", "setuptools._vendor.packaging"):
        try:
            return [__import__(prefix + "." + m, fromlist=["x"]) for m in ("requirements", "utils", "version")]
        except ImportError:
            continue
    refuse("no_library")


requirements, utils, version = library()

# pip and uv replace ${NAME} in a requirements file from their environment.
VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")


def applies(req):
    return req.marker is None or req.marker.evaluate({"extra": ""})


def parse_version(text):
    try:
        return version.Version(text)
    except version.InvalidVersion:
        return None


def relaxed(req, sdk):
    # The published SDK 0.7's only relaxation: one "==X" of series 0.6 on a later 0.6.
    specs = list(req.specifier)
    if len(specs) != 1 or specs[0].operator != "==" or specs[0].version.endswith(".*"):
        return False
    pin = parse_version(specs[0].version)
    return pin is not None and pin.release[:2] == (0, 6) and sdk.release[:2] == (0, 6) and pin <= sdk


def parse(text, sdk, most):
    out, used_relaxation = [], False
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("-"):
            refuse("option", line=number)
        try:
            req = requirements.Requirement(line)
            name = utils.canonicalize_name(req.name)
            needed = name != "langbot-plugin" or applies(req)
            shown = str(req)
        except Exception:
            refuse("invalid", line=number)
        if name == "langbot-plugin":
            if not needed:
                continue
            have = parse_version(sdk)
            if req.url:
                refuse("sdk_url", line=number)
            if have is None:
                refuse("sdk_unknown", line=number)
            if not req.specifier.contains(have, prereleases=True):
                # Whether that is enough depends on a setting of the runtime.
                if not relaxed(req, have):
                    refuse("sdk_mismatch", line=number, requirement=shown[:200])
                used_relaxation = used_relaxation or shown[:200]
            continue
        if VARIABLE.search(shown) or "\\" in (req.url or "") or shown.endswith("\\"):
            refuse("variable", line=number)
        out.append(shown)
        if len(out) > most:
            refuse("too_many", line=number)
    answer(requirements=out, relaxed=used_relaxation or "")


def installed(path):
    """The versions of what is installed on path, by canonical name; the first of a name counts."""
    import importlib.metadata

    have = {}
    for dist in importlib.metadata.distributions(path=path):
        try:
            name, ver = dist.metadata["Name"], dist.version
        except Exception:
            continue
        if name:
            have.setdefault(utils.canonicalize_name(name), ver)
    return have


def validate(site, wanted, most_metadata):
    import os

    for entry in os.scandir(site):
        if entry.name.endswith((".dist-info", ".egg-info")) and entry.is_dir(follow_symlinks=False):
            for name in ("METADATA", "PKG-INFO"):
                try:
                    size = os.stat(os.path.join(entry.path, name), follow_symlinks=False).st_size
                except OSError:
                    continue
                if size > most_metadata:
                    refuse("metadata_too_large")
    have = installed([site])
    missing = []
    for line in wanted:
        req = requirements.Requirement(line)
        if not applies(req):
            continue
        ver = have.get(utils.canonicalize_name(req.name))
        if ver is not None and (req.url or (parse_version(ver) is not None and req.specifier.contains(ver, prereleases=True))):
            continue
        missing.append(req.name)
    answer(missing=missing)


# A comment as pip takes it out of a requirements file.
COMMENT = re.compile(r"(^|\s+)#.*$")


def classify(text, sites, sdk, most):
    """Says of each line what an environment has of it; pip's own lines are left out."""
    # The environment of the plugin first, then what the Runtime's interpreter has.
    have = installed([p for p in sites if p] + sys.path)
    out = []
    for line in text.replace("\\\r\n", "").replace("\\\n", "").splitlines():
        line = COMMENT.sub("", line).strip()
        if not line or line.startswith("-"):
            continue
        if len(out) == most:
            refuse("too_many", line=len(out) + 1)
        entry = dict(text=line, name=line, status="opaque", have="")
        out.append(entry)
        if VARIABLE.search(line):
            entry["status"] = "variable"
            continue
        try:
            req = requirements.Requirement(line)
            name = utils.canonicalize_name(req.name)
            if not applies(req):
                entry["status"] = "idle"
                continue
        except Exception:
            continue  # a path or a repository: pip's business
        entry["name"] = req.name
        ver = sdk if name == "langbot-plugin" else have.get(name)
        entry["have"] = ver or ""
        met = ver is not None and parse_version(ver) is not None and req.specifier.contains(ver, prereleases=True)
        if name == "langbot-plugin":
            entry["status"] = "runtime" if met and not req.url else "other_runtime"
        elif ver is None:
            entry["status"] = "missing"
        else:
            entry["status"] = "met" if met or req.url else "mismatch"
    answer(classified=out)


def main():
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (50, 55))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        sys.set_int_max_str_digits(10_000)
    except (ImportError, AttributeError, OSError, ValueError):
        pass
    request = json.load(sys.stdin)
    if request["do"] == "parse":
        parse(request["text"], request["sdk"], request["most"])
    if request["do"] == "classify":
        classify(request["text"], request["sites"], request["sdk"], request["most"])
    validate(request["site"], request["requirements"], request["most"])


main()
