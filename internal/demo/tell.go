package demo

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/term"
)

// textWidth is where the agent's words are wrapped.
const textWidth = 76

// teller prints the story: plain lines, with some colour on a terminal. It may be
// used from many goroutines; a line is never torn.
type teller struct {
	mu     sync.Mutex
	out    io.Writer
	colour bool
	part   string // of a line of the agent's words
	mark   string // before it
	noise  int64  // bytes of text without words, not shown
}

func newTeller(out io.Writer) *teller {
	f, ok := out.(*os.File)
	return &teller{out: out, colour: ok && term.IsTerminal(int(f.Fd())) && os.Getenv("NO_COLOR") == ""}
}

func (t *teller) paint(code, s string) string {
	if !t.colour {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

func (t *teller) line(s string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.flush()
	fmt.Fprintln(t.out, s)
}

// chapter begins a part of the story.
func (t *teller) chapter(s string) {
	t.line("\n" + t.paint("1", s))
}

// step says what is done next, before it is done.
func (t *teller) step(format string, args ...any) {
	t.line(t.paint("36", "→ ") + fmt.Sprintf(format, args...))
}

// note says what came of it.
func (t *teller) note(format string, args ...any) {
	t.line("  " + fmt.Sprintf(format, args...))
}

// proven says what was checked and held.
func (t *teller) proven(format string, args ...any) {
	t.line(t.paint("32", "✓ ") + fmt.Sprintf(format, args...))
}

// trouble says what did not.
func (t *teller) trouble(format string, args ...any) {
	t.line(t.paint("31", "✗ ") + fmt.Sprintf(format, args...))
}

// did prints one thing the agent did, and a few lines of what came of it.
func (t *teller) did(title, result string) {
	t.line("  " + t.paint("2", "│ ") + t.paint("33", "$ ") + clean(title))
	lines := strings.Split(strings.TrimRight(result, "\n"), "\n")
	const most = 12
	for i, l := range lines {
		if result == "" {
			break
		}
		if i == most {
			t.line("  " + t.paint("2", fmt.Sprintf("│   … %d lines more", len(lines)-most)))
			break
		}
		t.line("  " + t.paint("2", "│   "+shorten(clean(l), textWidth)))
	}
}

// words prints what the agent says or thinks as it comes, wrapped. Long runs
// without a space are counted, not shown.
func (t *teller) words(thought bool, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	mark := "│ "
	if thought {
		mark = "│ … "
	}
	if mark != t.mark {
		t.flush()
		t.mark = mark
	}
	if len(text) > textWidth && !strings.ContainsAny(text, " \n") {
		if t.part != "" {
			t.flush()
			t.mark = mark
		}
		t.noise += int64(len(text))
		return
	}
	if t.noise > 0 {
		t.flush()
		t.mark = mark
	}
	t.part += text
	for {
		end := strings.IndexByte(t.part, '\n')
		if (end < 0 || end > textWidth) && len(t.part) > textWidth {
			if end = strings.LastIndexByte(t.part[:textWidth], ' '); end < 0 {
				end = textWidth
				for !utf8.RuneStart(t.part[end]) {
					end--
				}
				t.print(t.part[:end])
				t.part = t.part[end:]
				continue
			}
		}
		if end < 0 {
			return
		}
		t.print(t.part[:end])
		t.part = t.part[end+1:]
	}
}

// flush ends a line of words. The caller holds mu.
func (t *teller) flush() {
	if t.noise > 0 {
		fmt.Fprintf(t.out, "  %s\n", t.paint("2", fmt.Sprintf("│ [%s of generated text]", size(t.noise))))
		t.noise = 0
	}
	if t.part != "" {
		t.print(t.part)
		t.part = ""
	}
	t.mark = ""
}

func (t *teller) print(s string) {
	if strings.TrimSpace(s) != "" {
		fmt.Fprintf(t.out, "  %s%s\n", t.paint("2", t.mark), clean(s))
	}
}

// clean takes out what could steer a terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\t' {
			return ' '
		}
		if r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return -1
		}
		return r
	}, s)
}

func shorten(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-1]) + "…"
}

// size says a number of bytes for people.
func size(n int64) string {
	switch {
	case n < 10<<10:
		return fmt.Sprintf("%d bytes", n)
	case n < 10<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	default:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
}
