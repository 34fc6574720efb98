// Package python looks at a Python interpreter: where it is, what it is, and
// which plugin SDK is installed for it.
package python

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// probeTime bounds one look at an interpreter: it takes 50 ms, on a cold disk or
// a machine under load seconds.
const probeTime = 20 * time.Second

// maxAnswer bounds what a probe's script may print; it prints a few hundred bytes.
const maxAnswer = 64 << 10

// SDKName is the distribution that plugins are written with, as the package
// index and the interpreter's metadata name it.
const SDKName = "langbot-plugin"

// Interpreter is a Python of this machine.
type Interpreter struct {
	Path           string `json:"executable"`     // absolute; in a virtual environment its own link, not what it points to
	Prefix         string `json:"prefix"`         // sys.prefix, absolute
	BasePrefix     string `json:"base_prefix"`    // sys.base_prefix: Prefix, except in a virtual environment
	Version        string `json:"version"`        // major.minor, such as "3.11"
	FullVersion    string `json:"full_version"`   // such as "3.11.7"
	CacheTag       string `json:"cache_tag"`      // such as "cpython-311"
	Implementation string `json:"implementation"` // such as "cpython"
	ImportRoot     string `json:"import_root"`    // directory that holds the SDK's package; "" without one
	SDK            string `json:"sdk"`            // version of the installed SDK; "" if none is installed
}

// script prints an Interpreter. It looks for the SDK without importing it.
const script = `import importlib.metadata, importlib.util, json, os, sys
root = sdk = ""
spec = importlib.util.find_spec("langbot_plugin")
if spec is not None:
    places = list(spec.submodule_search_locations or [])
    if places:
        root = os.path.dirname(os.path.abspath(places[0]))
    try:
        sdk = importlib.metadata.version("langbot-plugin")
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({
    "executable": os.path.abspath(sys.executable) if sys.executable else "",
    "prefix": os.path.abspath(sys.prefix), "base_prefix": os.path.abspath(sys.base_prefix),
    "version": "%d.%d" % sys.version_info[:2], "full_version": "%d.%d.%d" % sys.version_info[:3],
    "cache_tag": sys.implementation.cache_tag or "", "implementation": sys.implementation.name,
    "import_root": root, "sdk": sdk}))
`

// Probe asks an interpreter what it is; "" is the first of python3 and python on
// the PATH. An interpreter without the SDK is no error: Interpreter.SDK is empty
// then, see [Interpreter.CheckSDK]. The script runs isolated (python -I), so
// neither the environment nor the working directory adds anything.
//
// Errors: unavailable when there is no interpreter or it does not answer.
func Probe(ctx context.Context, python string) (Interpreter, error) {
	path, err := find(python)
	if err != nil {
		return Interpreter{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "-I", "-c", script)
	cmd.Dir = "/"
	cmd.WaitDelay = time.Second
	var out, said limited
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return Interpreter{}, errdefs.Wrap(err, errdefs.Unavailable, "the Python interpreter %s does not answer: %v%s", path, err, detail(said.b.Bytes())).
			WithNext("install Python 3.10 or later, or name another interpreter")
	}
	i, err := parse(out.b.Bytes())
	if err != nil {
		return Interpreter{}, errdefs.Wrap(err, errdefs.Unavailable, "%s does not answer as a Python interpreter: %v", path, err).
			WithNext("name a Python 3.10 or later")
	}
	return i, nil
}

// CheckSDK returns an unavailable error for an interpreter without the SDK.
func (i Interpreter) CheckSDK() error {
	if i.ImportRoot != "" && i.SDK != "" {
		return nil
	}
	return errdefs.New(errdefs.Unavailable, "the plugin SDK (%s) is not installed for %s", SDKName, i.Path).
		WithNext("%s -m pip install %s", i.Path, SDKName)
}

// String returns what an operator wants to know, such as
// "Python 3.11.7 at /opt/venv/bin/python3 with SDK 0.7.18".
func (i Interpreter) String() string {
	s := fmt.Sprintf("Python %s at %s", i.FullVersion, i.Path)
	if i.SDK == "" {
		return s + " without the plugin SDK"
	}
	return s + " with SDK " + i.SDK
}

func find(python string) (string, error) {
	names := []string{python}
	if python == "" {
		names = []string{"python3", "python"}
	}
	for _, n := range names {
		path, err := exec.LookPath(n)
		if err == nil {
			if path, err = filepath.Abs(path); err == nil {
				return path, nil
			}
		}
		if !errors.Is(err, exec.ErrNotFound) && !errors.Is(err, os.ErrNotExist) {
			return "", errdefs.Wrap(err, errdefs.Unavailable, "the Python interpreter %q cannot be used: %v", n, err).
				WithNext("name an interpreter that this user may execute")
		}
	}
	return "", errdefs.New(errdefs.Unavailable, "there is no Python interpreter %s", strings.Join(names, " or ")).
		WithNext("apt-get install python3, or name an interpreter")
}

func parse(answer []byte) (Interpreter, error) {
	var i Interpreter
	if err := json.Unmarshal(answer, &i); err != nil {
		return i, errors.New("its answer is not what the probe prints")
	}
	for _, p := range []*string{&i.Path, &i.Prefix, &i.BasePrefix} {
		if !filepath.IsAbs(*p) {
			return i, errors.New("it does not know where it is")
		}
		*p = filepath.Clean(*p)
	}
	if i.ImportRoot != "" {
		if !filepath.IsAbs(i.ImportRoot) {
			return i, errors.New("it does not know where the SDK is")
		}
		i.ImportRoot = filepath.Clean(i.ImportRoot)
	}
	if i.Version == "" || i.Implementation == "" {
		return i, errors.New("it does not say its version")
	}
	return i, nil
}

// limited keeps the first maxAnswer bytes written to it.
type limited struct{ b bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	if room := maxAnswer - l.b.Len(); room > 0 {
		l.b.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// detail is the last line an interpreter said, bounded, for a message.
func detail(said []byte) string {
	lines := strings.Split(strings.TrimSpace(strings.ToValidUTF8(string(said), "?")), "\n")
	last := lines[len(lines)-1]
	if last == "" {
		return ""
	}
	return ": " + last[:min(len(last), 300)]
}
