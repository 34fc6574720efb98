package osproc

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestRedact(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"Authorization: Bearer abc.def":             "Authorization: [REDACTED]",
		"authorization=Basic Zm9v; x=1":             "authorization=[REDACTED]",
		"curl -H 'authorization: Basic Zm9v' x":     "curl -H 'authorization: [REDACTED]' x",
		"got bearer abc, then more":                 "got bearer [REDACTED], then more",
		`{"api_key": "k-1", "n": 2}`:                `{"api_key": [REDACTED], "n": 2}`,
		"OPENAI_API_KEY=abc next":                   "OPENAI_API_KEY=[REDACTED] next",
		"LANGBOT_AGENT_MCP_TOKEN=abc":               "LANGBOT_AGENT_MCP_TOKEN=[REDACTED]",
		"langbot_asset_run_token: abc":              "langbot_asset_run_token: [REDACTED]",
		"my password = 'a b c' here":                "my password = [REDACTED] here",
		"client_secret:x":                           "client_secret:[REDACTED]",
		"key sk-ant-0123456789 was refused":         "key [REDACTED] was refused",
		"no route to http://me:pass!w@proxy:8080/x": "no route to http://me:[REDACTED]@proxy:8080/x",
		"http://localhost:8080/a@b":                 "http://localhost:8080/a@b",
		"a secretary, 12 tokens, no key":            "a secretary, 12 tokens, no key",
		"":                                          "",
	} {
		if got := Redact(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func FuzzRedact(f *testing.F) {
	f.Add("password=", "x")
	f.Add("Authorization: ", "a b")
	f.Fuzz(func(t *testing.T, text, secret string) {
		if out := Redact(text+secret+text, secret); len(secret) >= minSecret && !strings.Contains(redacted, secret) &&
			strings.Contains(strings.ReplaceAll(out, redacted, "\x00"), secret) {
			t.Errorf("%q is still in %q", secret, out)
		}
	})
}

func TestEnvironment(t *testing.T) {
	t.Parallel()
	rules := Rules{Allow: []string{"PATH", "LC_*", "LD_*"}, Reserved: []string{"LD_*", "TOKEN"}}
	own := []string{"PATH=/bin", "LC_ALL=C", "SECRET=parent", "PATHS=x", "LD_PRELOAD=x", "broken"}
	got, err := Environment(own, rules, map[string]string{"LC_ALL": "C.UTF-8", "EMPTY": ""}, map[string]string{"TOKEN": "t"})
	if want := []string{"EMPTY=", "LC_ALL=C.UTF-8", "PATH=/bin", "TOKEN=t"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	for name, value := range map[string]string{"LD_PRELOAD": "x", "TOKEN": "hidden", "": "x", "A=B": "x", "N\x00": "x", "Z": "a\x00b", "BIG": strings.Repeat("v", 128<<10)} {
		if _, err := Environment(own, rules, map[string]string{name: value}, nil); !errdefs.Is(err, errdefs.Invalid) || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%q: %v", name, err)
		}
	}
	many := map[string]string{}
	for i := range maxEnvNames + 1 {
		many["N"+strings.Repeat("x", i)] = ""
	}
	if _, err := Environment(nil, rules, many, nil); !errdefs.Is(err, errdefs.Invalid) {
		t.Error(err)
	}
}

// Paired with test_coding_native_lifecycle.py, shared_workspace_defaults_and_dedicated_preserved:
// the workspace is where the machine's owner allows it.
func TestOpenWorkspace(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	root, other := filepath.Join(base, "root"), filepath.Join(base, "other")
	link := filepath.Join(base, "link")
	for _, err := range []error{
		os.MkdirAll(filepath.Join(root, "a/b"), 0o755), os.MkdirAll(filepath.Join(other, "c"), 0o755),
		os.WriteFile(filepath.Join(root, "file"), nil, 0o644), os.Symlink(root, link),
		os.Symlink("a/b", filepath.Join(root, "inside")), os.Symlink("../other", filepath.Join(root, "out")),
		os.Symlink(other, filepath.Join(root, "abs")), os.Symlink("loop", filepath.Join(root, "loop")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		"": root, root: root, root + "/a/../a/b/": root + "/a/b", root + "/inside": root + "/a/b", link + "/a": root + "/a",
	} {
		f, real, err := OpenWorkspace([]string{root, link}, path)
		if err != nil || real != want {
			t.Errorf("%q: %q, %v, want %q", path, real, err, want)
			continue
		}
		_ = f.Close()
	}
	for path, code := range map[string]errdefs.Code{
		"relative": errdefs.Invalid, root + "/../other": errdefs.Denied, other: errdefs.Denied, "/": errdefs.Denied, root + "x": errdefs.Denied,
		root + "/out": errdefs.Denied, root + "/out/c": errdefs.Denied, root + "/abs": errdefs.Denied, root + "/loop": errdefs.Denied,
		root + "/none": errdefs.NotFound, root + "/file": errdefs.Invalid, root + "/a\x00": errdefs.Invalid,
	} {
		if f, real, err := OpenWorkspace([]string{root}, path); !errdefs.Is(err, code) {
			t.Errorf("%q: %v, %q, %v, want %s", path, f, real, err, code)
		}
	}
	if _, _, err := OpenWorkspace(nil, ""); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("nothing allowed: %v", err)
	}
}

func TestTailKeepsWholeLines(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	tl := newTail(r, 100)
	for range 50 {
		if _, err := w.WriteString("password=0123456789abcdef\n"); err != nil {
			t.Fatal(err)
		}
	}
	_ = w.Close()
	<-tl.done
	got := tl.text()
	if len(got) > 100 || got == "" {
		t.Errorf("%d bytes", len(got))
	}
	for line := range strings.Lines(got) {
		if line != "password=0123456789abcdef\n" {
			t.Errorf("a cut line: %q", line)
		}
	}
}

// FuzzLines: whatever comes, the lines are those that a split makes, until a bound.
func FuzzLines(f *testing.F) {
	f.Add([]byte("a\nb\n\nc"), 3)
	f.Add([]byte("\n\n"), 1)
	f.Add(bytes.Repeat([]byte("x"), 100), 16)
	f.Fuzz(func(t *testing.T, data []byte, maxLine int) {
		if maxLine <= 0 || maxLine > 1<<10 || len(data) > 32<<10 {
			return
		}
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
		_ = w.Close()
		l := newLines(r, maxLine, 16<<10)
		var want [][]byte
		if len(data) > 0 {
			want = bytes.Split(bytes.TrimSuffix(data, []byte("\n")), []byte("\n"))
		}
		for i := 0; ; i++ {
			line, err := l.next()
			if errors.Is(err, io.EOF) {
				if i != len(want) {
					t.Errorf("%d lines, want %d", i, len(want))
				}
				return
			}
			if err != nil {
				if len(data) <= 16<<10 && len(want[i]) <= maxLine {
					t.Errorf("line %d: %v", i, err)
				}
				return
			}
			if len(line) > maxLine || !bytes.Equal(line, want[i]) {
				t.Errorf("line %d: %q, want %q", i, line, want[i])
			}
		}
	})
}
