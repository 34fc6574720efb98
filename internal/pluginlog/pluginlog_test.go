package pluginlog_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/pluginlog"
)

func texts(lines []pluginlog.Line) string {
	var out []string
	for _, l := range lines {
		out = append(out, l.Level+" "+l.Text)
	}
	return strings.Join(out, "\n")
}

func TestCaptureReadsLevelsAndContinuations(t *testing.T) {
	t.Parallel()
	b := pluginlog.New()
	in := strings.Join([]string{
		"[11-29 21:53:22.123] main.py (12) - [INFO] : hello",
		"",
		"[11-29 21:53:23.001] main.py (14) - [ERROR] : it broke",
		"Traceback (most recent call last):",
		"  File \"main.py\", line 3",
		"WARNING:plugin:careful",
		"a \xff byte",
		"last line without an end",
	}, "\n")
	if err := b.Capture(strings.NewReader(in)); err != nil {
		t.Fatal(err)
	}
	want := strings.Join([]string{
		"INFO [11-29 21:53:22.123] main.py (12) - [INFO] : hello",
		"ERROR [11-29 21:53:23.001] main.py (14) - [ERROR] : it broke",
		"ERROR Traceback (most recent call last):",
		"ERROR   File \"main.py\", line 3",
		"WARNING WARNING:plugin:careful",
		"WARNING a \uFFFD byte",
		"WARNING last line without an end",
	}, "\n")
	if got := texts(b.Tail(100, "")); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := b.Tail(100, "error"); len(got) != 3 {
		t.Errorf("at least error: %s", texts(got))
	}
	if got := texts(b.Tail(2, "debug")); got != "WARNING a \uFFFD byte\nWARNING last line without an end" {
		t.Errorf("newest two: %s", got)
	}
	if got := b.Tail(-1, ""); len(got) != 0 {
		t.Errorf("a negative limit gave %s", texts(got))
	}
}

func TestOldLinesGoAndLongOnesAreCut(t *testing.T) {
	t.Parallel()
	b := pluginlog.New()
	var in strings.Builder
	for i := range pluginlog.MaxLines + 7 {
		fmt.Fprintf(&in, "line %d\n", i)
	}
	in.WriteString(strings.Repeat("x", 3*pluginlog.MaxLine) + "\nafter\n" + strings.Repeat("y", pluginlog.MaxLine) + "\n")
	if err := b.Capture(strings.NewReader(in.String())); err != nil {
		t.Fatal(err)
	}
	all := b.Tail(5000, "")
	if len(all) != pluginlog.MaxLines {
		t.Fatalf("%d lines are kept", len(all))
	}
	if all[0].Text != "line 10" {
		t.Errorf("the oldest is %q", all[0].Text)
	}
	n := len(all)
	if got := all[n-3].Text; got != strings.Repeat("x", pluginlog.MaxLine)+pluginlog.Clipped {
		t.Errorf("the long line has %d bytes", len(got))
	}
	if all[n-2].Text != "after" {
		t.Errorf("after the long line: %q", all[n-2].Text)
	}
	if got := all[n-1].Text; got != strings.Repeat("y", pluginlog.MaxLine) {
		t.Errorf("a line of exactly the limit has %d bytes", len(got))
	}
}

// A worker that floods with long lines holds no more than MaxBytes, and the answer to
// get_plugin_logs fits into a message whatever the lines are made of.
func TestAllLinesTogetherAreBounded(t *testing.T) {
	t.Parallel()
	b := pluginlog.New()
	for i := range pluginlog.MaxLines {
		line := fmt.Sprintf("%04d", i) + strings.Repeat("\x01", pluginlog.MaxLine-4) + "\n"
		if err := b.Capture(strings.NewReader(line)); err != nil {
			t.Fatal(err)
		}
	}
	all, sum := b.Tail(pluginlog.MaxLines, ""), 0
	for _, l := range all {
		sum += len(l.Text)
	}
	if sum > pluginlog.MaxBytes || sum < pluginlog.MaxBytes-pluginlog.MaxLine || !strings.HasPrefix(all[len(all)-1].Text, "0999") {
		t.Errorf("%d lines of %d bytes are kept", len(all), sum)
	}
	if raw, err := json.Marshal(all); err != nil || len(raw) > 15<<20 {
		t.Errorf("the answer has %d bytes, %v", len(raw), err)
	}
	for i := range 2*pluginlog.MaxLines + 100 {
		b.Add(time.Unix(int64(i), 0), "INFO", fmt.Sprint(i))
	}
	if all = b.Tail(5000, ""); len(all) != pluginlog.MaxLines || all[0].Text != "1100" || all[len(all)-1].Text != "2099" {
		t.Errorf("%d lines, %s to %s", len(all), all[0].Text, all[len(all)-1].Text)
	}
}

func TestAdd(t *testing.T) {
	t.Parallel()
	b := pluginlog.New()
	now := time.Unix(1_700_000_000, 500_000_000)
	b.Add(now, "warn", "careful")
	b.Add(now, "loud", strings.Repeat("é", pluginlog.MaxLine))
	b.Add(now, "ERROR", "  \n")
	got := b.Tail(10, "")
	if len(got) != 2 || got[0] != (pluginlog.Line{TS: 1_700_000_000.5, Level: "WARNING", Text: "careful"}) || got[1].Level != "INFO" {
		t.Fatalf("%+v", got[:1])
	}
	if !strings.HasSuffix(got[1].Text, "é"+pluginlog.Clipped) {
		t.Error("a long text is cut inside a character")
	}
}

func FuzzCapture(f *testing.F) {
	f.Add("[a] b - [INFO] : c\n\nd")
	f.Add("CRITICAL:x\r\n\xff\xfe")
	f.Fuzz(func(t *testing.T, in string) {
		b := pluginlog.New()
		if err := b.Capture(strings.NewReader(in)); err != nil {
			t.Fatal(err)
		}
		for _, l := range b.Tail(pluginlog.MaxLines, "") {
			if strings.TrimSpace(l.Text) == "" || strings.Contains(l.Text, "\n") || len(l.Text) > 3*pluginlog.MaxLine {
				t.Fatalf("line %q", l.Text)
			}
		}
		if b.Reading() {
			t.Fatal("still reading")
		}
	})
}
