package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"

	"github.com/stockade-run/stockade/client"
)

// say writes a line for the person, to standard error.
func (a *app) say(format string, args ...any) {
	line := fmt.Sprintf(format+"\n", args...)
	if a.raw.Load() {
		line = "\r" + strings.ReplaceAll(line, "\n", "\r\n")
	}
	_, _ = io.WriteString(a.Stderr, line)
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// printJSON prints one document.
func (a *app) printJSON(v any) error { return writeJSON(a.Stdout, v) }

// printLine prints one document on one line, for commands that stream.
func (a *app) printLine(v any) error {
	enc := json.NewEncoder(a.Stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// removed tells of one thing that is gone, of several that may have been named.
func (a *app) removed(what string) error {
	if a.json {
		return a.printLine(map[string]string{"removed": what})
	}
	_, err := fmt.Fprintln(a.Stdout, what)
	return err
}

// show prints a listing: with --json the items as they are, else a table with what row
// makes of each.
func show[T any](a *app, items []T, header []string, row func(item T, now time.Time) []string) error {
	if a.json {
		return a.printJSON(client.List[T]{Items: items})
	}
	now := time.Now()
	rows := make([][]string, 0, len(items))
	for _, item := range items {
		rows = append(rows, row(item, now))
	}
	return a.table(header, rows)
}

// table prints aligned columns under a header, like docker ps.
func (a *app) table(header []string, rows [][]string) error {
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 3, ' ', 0)
	fmt.Fprintln(w, strings.Join(header, "\t"))
	for _, r := range rows {
		for i := range r {
			r[i] = printable(r[i])
		}
		fmt.Fprintln(w, strings.Join(r, "\t"))
	}
	return w.Flush()
}

// printable keeps what tenants wrote from moving the cursor of whoever looks.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// age says how long ago t was, in the largest fitting unit.
func age(now, t time.Time) string {
	d := now.Sub(t)
	switch {
	case d < 0:
		return "now"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}

// size prints bytes with a binary unit.
func size(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[i])
}

// terminal returns the file behind w if it is a terminal.
func terminal(w any) (*os.File, bool) {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, false
	}
	return f, true
}

// progress tells, after a second, what is being waited for, and stops when the
// returned function is called. On a terminal the line is taken back; elsewhere
// it is said once.
func (a *app) progress(what string) (done func()) {
	if a.json {
		return func() {}
	}
	stop, joined := make(chan struct{}), make(chan struct{})
	f, tty := terminal(a.Stderr)
	go func() {
		defer close(joined)
		start := time.Now()
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		shown := false
		for {
			select {
			case <-stop:
				if shown && tty {
					fmt.Fprint(f, "\r\x1b[K")
				}
				return
			case now := <-tick.C:
				switch {
				case tty:
					fmt.Fprintf(f, "\r\x1b[K%s … %ds", what, int(now.Sub(start).Seconds()))
				case !shown:
					a.say("%s …", what)
				}
				shown = true
			}
		}
	}()
	return func() {
		close(stop)
		<-joined
	}
}
