package agent_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"

	"github.com/stockade-run/stockade/internal/agent"
	"github.com/stockade-run/stockade/internal/agent/acp"
	"github.com/stockade-run/stockade/internal/agent/claude"
	"github.com/stockade-run/stockade/internal/agent/codex"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

func newCodec(payload []byte) (agent.Codec, error) {
	kind, err := agent.KindOf(payload)
	if err != nil {
		return nil, err
	}
	switch kind {
	case agent.ACP:
		return acp.New(payload)
	case agent.Claude:
		return claude.New(payload)
	default:
		return codex.New(payload)
	}
}

var host = agent.Host{Private: "/private", MCP: agent.MCP{Name: "langbot_agent", URL: "http://127.0.0.1:1/mcp", Token: "the-token"}}

// TestTranscripts plays what agents said against the codecs. A transcript has the
// payload, the agent's output line by line ("cancel" alone on a line is the hub's
// wish), how the agent ended, and everything that the codec wants from then on:
//
//	$ how it is launched    > what is written to the agent
//	! an event              . input closed, or turn over
func TestTranscripts(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			t.Parallel()
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			part := map[string]string{}
			for _, f := range a.Files {
				part[f.Name] = string(f.Data)
			}
			got := play(t, part)
			if got == part["want"] {
				return
			}
			if !*update {
				t.Errorf("got:\n%s\nwant:\n%s", got, part["want"])
				return
			}
			for i := range a.Files {
				if a.Files[i].Name == "want" {
					a.Files[i].Data = []byte(got)
				}
			}
			if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func play(t *testing.T, part map[string]string) string {
	t.Helper()
	var b strings.Builder
	c, err := newCodec([]byte(part["payload"]))
	var l agent.Launch
	if err == nil {
		l, err = c.Launch(host)
	}
	if err != nil {
		f, ok := err.(*agent.Failure)
		if !ok {
			t.Fatalf("%T: %v", err, err)
		}
		fmt.Fprintf(&b, "! %s\n", f.Event())
		return b.String()
	}
	show := func(s agent.Step) {
		for _, e := range s.Events {
			fmt.Fprintf(&b, "! %s\n", e)
		}
		for line := range strings.Lines(string(s.Write)) {
			fmt.Fprintf(&b, "> %s\n", strings.TrimSuffix(line, "\n"))
		}
		if s.CloseInput {
			b.WriteString(". input closed\n")
		}
		if s.Done {
			b.WriteString(". over\n")
		}
	}
	fmt.Fprintf(&b, "$ %q\n", append(l.Command, l.Args...))
	fmt.Fprintf(&b, "$ preset %v workspace %q env %v inherit %v unset %v\n", l.Preset, l.Workspace, l.Env, l.Inherit, l.Unset)
	fmt.Fprintf(&b, "$ timeout %v start %v call %v\n", l.Timeout, l.StartTimeout.Round(time.Second), l.CallTimeout)
	for _, f := range l.Files {
		fmt.Fprintf(&b, "$ file %s %s\n", f.Name, f.Data)
	}
	show(c.Start("/real/workspace"))
	for line := range strings.Lines(part["out"]) {
		if line = strings.TrimSuffix(line, "\n"); line == "cancel" {
			show(c.Cancel())
		} else {
			show(c.Feed([]byte(line)))
		}
	}
	var e agent.Exit
	if part["exit"] != "" {
		if err := json.Unmarshal([]byte(part["exit"]), &e); err != nil {
			t.Fatal(err)
		}
	}
	for _, ev := range c.Finish(e) {
		fmt.Fprintf(&b, "! %s\n", ev)
	}
	return b.String()
}

// FuzzCodecs: whatever an agent prints, the codec does not panic, its events are
// events, its lines are lines, and the last event of a run is its end.
func FuzzCodecs(f *testing.F) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		a, err := txtar.ParseFile(file)
		if err != nil {
			f.Fatal(err)
		}
		part := map[string]string{}
		for _, x := range a.Files {
			part[x.Name] = string(x.Data)
		}
		f.Add([]byte(part["payload"]), []byte(part["out"]), 0, false)
		f.Add([]byte(part["payload"]), []byte(part["out"]), 1, true)
	}
	f.Fuzz(func(t *testing.T, payload, out []byte, code int, timedOut bool) {
		c, err := newCodec(payload)
		if err != nil {
			if _, ok := err.(*agent.Failure); !ok {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		l, err := c.Launch(host)
		if err != nil {
			if _, ok := err.(*agent.Failure); !ok {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		if len(l.Command) == 0 {
			t.Fatal("no command")
		}
		check := func(s agent.Step) {
			for _, e := range s.Events {
				if k := kindOf(t, e); k == "run.completed" || k == "run.failed" {
					t.Fatalf("%s before the end", k)
				}
			}
			if len(l.Args) > 0 && l.Args[0] == "app-server" { // JSON-RPC it must be

				for line := range strings.Lines(string(s.Write)) {
					if !json.Valid([]byte(line)) {
						t.Fatalf("it writes %q", line)
					}
				}
			}
		}
		check(c.Start("/w"))
		for line := range strings.Lines(string(out)) {
			check(c.Feed([]byte(strings.TrimSuffix(line, "\n"))))
		}
		check(c.Cancel())
		last := c.Finish(agent.Exit{Code: code, TimedOut: timedOut, Stderr: string(out)})
		if len(last) == 0 {
			t.Fatal("no end")
		}
		for i, e := range last {
			k := kindOf(t, e)
			if end := k == "run.completed" || k == "run.failed"; end != (i == len(last)-1) {
				t.Fatalf("event %d of %d is %s", i, len(last), k)
			}
		}
	})
}

func kindOf(t *testing.T, e json.RawMessage) string {
	t.Helper()
	var m struct {
		Type string          `json:"type"`
		Data json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(e, &m); err != nil || m.Type == "" || len(m.Data) == 0 || m.Data[0] != '{' {
		t.Fatalf("%s is no event: %v", e, err)
	}
	return m.Type
}

// A long answer costs what it is long, not the square of it: 2 MiB in lines that are no
// events, which each begin another message.
func TestManyMessagesAreCheap(t *testing.T) {
	c, err := claude.New(json.RawMessage(`{"prompt":"x","config":{"streaming":false}}`))
	if err != nil {
		t.Fatal(err)
	}
	c.Feed([]byte(`{"type":"system"}`))
	line := bytes.Repeat([]byte("x"), 1<<10)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 2 << 10 {
		c.Feed(line)
	}
	runtime.ReadMemStats(&after)
	if n := (after.TotalAlloc - before.TotalAlloc) >> 20; n > 200 {
		t.Errorf("%d MiB were allocated", n)
	}
}

// What a program says when it fails is as much as a person reads, whatever it prints.
func TestAFailureIsBounded(t *testing.T) {
	t.Parallel()
	for name, line := range map[string]string{
		"plain": strings.Repeat("no ", 1<<20),
		"error": `{"type":"error","message":"` + strings.Repeat("é", 1<<20) + `"}`,
	} {
		for code := range 2 {
			c, err := claude.New(json.RawMessage(`{"prompt":"x"}`))
			if err != nil {
				t.Fatal(err)
			}
			for range 3 {
				c.Feed([]byte(line))
			}
			last := c.Finish(agent.Exit{Code: code, Stderr: "the reason"})
			if len(last) != 1 || !strings.Contains(string(last[0]), "run.failed") || len(last[0]) > 100<<10 {
				t.Errorf("%s, code %d: %d events, %d bytes: %.100s", name, code, len(last), len(last[0]), last[0])
			}
			if name == "plain" && code == 1 && !strings.Contains(string(last[0]), "the reason") {
				t.Errorf("what it said on stderr is lost: %.100s", last[0])
			}
		}
	}
}
