package pluginwire_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

var updateDocs = flag.Bool("update-docs", false, "write the action table of docs/compatibility.md")

// The action table of docs/compatibility.md is made from the tables of this package.
func TestTheDocumentedActionTableIsOurs(t *testing.T) {
	t.Parallel()
	path := need.Testdata(t, "..", "docs", "compatibility.md")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- actions: made by go test ./internal/pluginwire -update-docs -->\n", "<!-- end of actions -->"
	before, rest, ok := strings.Cut(string(b), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatal("docs/compatibility.md has no place for the actions")
	}
	want := before + begin + actionTable() + end + after
	if *updateDocs {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want != string(b) {
		t.Error("the table is not current: go test ./internal/pluginwire -update-docs")
	}
}

func actionTable() string {
	scopes := map[pluginwire.Scope]string{
		pluginwire.ScopePing: "none; always allowed", pluginwire.ScopeConfig: "none; before all others", pluginwire.ScopeInstance: "none: the whole instance",
		pluginwire.ScopeWorkspace: "Workspace", pluginwire.ScopeCandidate: "a binding that may be newer", pluginwire.ScopeTenant: "the current binding",
	}
	var out strings.Builder
	out.WriteString("\nFrom LangBot:\n\n| action | context | answer |\n|---|---|---|\n")
	for _, a := range pluginwire.Actions() {
		if s := pluginwire.ControlScope(a); s != pluginwire.ScopeUnknown {
			answer := "one"
			if pluginwire.ControlStream(a) {
				answer = "stream"
			}
			if pluginwire.OSSOnly(a) {
				answer += "; refused in `shared`"
			}
			fmt.Fprintf(&out, "| `%s` | %s | %s |\n", a, scopes[s], answer)
		}
	}
	out.WriteString("\nFrom a plugin, handed on to LangBot:\n\n| action | toward LangBot | time | |\n|---|---|---|---|\n")
	var inside []string
	for _, a := range pluginwire.Actions() {
		f, ok := pluginwire.ForwardOf(a)
		if !ok {
			if pluginwire.ControlScope(a) == pluginwire.ScopeUnknown {
				inside = append(inside, "`"+a+"`")
			}
			continue
		}
		var notes []string
		if f.FromPayload {
			notes = append(notes, "the payload's `timeout` instead")
		}
		if f.Stream {
			notes = append(notes, "stream")
		}
		if f.Owner != pluginwire.OwnerNone {
			notes = append(notes, "stored for the "+string(f.Owner))
		}
		if f.File {
			notes = append(notes, "the file goes on under a new key")
		}
		fmt.Fprintf(&out, "| `%s` | `%s` | %d s | %s |\n", a, f.Host, f.Timeout/time.Second, strings.Join(notes, "; "))
	}
	out.WriteString("\nBetween the runtime and its peers alone (of every connection, toward workers, of workers, toward LangBot):\n" + strings.Join(inside, " ") + ".\n\n")
	return out.String()
}
