// Package pluginlog keeps the newest log lines of one plugin: what its worker
// wrote to standard error, with the level read from the SDK's log format, and
// what the runtime itself has to say about it.
package pluginlog

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Bounds of one buffer. The first two are those of the published Python runtime,
// which together allow 64 MiB for each installation; the third is ours. All of a
// buffer fits into one message of 16 MiB, however JSON has to write its characters.
const (
	MaxLines = 1000     // the oldest go first
	MaxLine  = 64 << 10 // bytes of one line; the rest is cut, with a note
	MaxBytes = 2 << 20  // of all lines together; the oldest go first
)

// Clipped ends a line that was longer than MaxLine.
const Clipped = " … [line cut at 64 KiB]"

// Line is one line as the get_plugin_logs action answers it.
type Line struct {
	TS    float64 `json:"ts"` // Unix seconds
	Level string  `json:"level"`
	Text  string  `json:"text"`
}

// levels orders the names of Python's logging, which the SDK writes.
var levels = map[string]int{"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}

// format finds the level in a line of the SDK's log, such as
// "[11-29 21:53:22.123] main.py (12) - [INFO] : text", and in the forms
// "INFO: text" and "INFO:module:text" of Python's defaults.
var format = regexp.MustCompile(`^(?:\[[^\]]{1,40}\] .{1,200}? - \[(DEBUG|INFO|WARNING|ERROR|CRITICAL)\] |(DEBUG|INFO|WARNING|ERROR|CRITICAL):)`)

// Buffer holds the newest lines, at most MaxLines of at most MaxBytes. It is safe for
// concurrent use.
type Buffer struct {
	mu      sync.Mutex
	lines   []Line // from head on, oldest first
	head    int
	bytes   int    // of their texts
	level   string // of the last line that had one; continuation lines inherit it
	readers int
}

// New makes an empty buffer.
func New() *Buffer { return &Buffer{level: "INFO"} }

// Add appends text as one entry of a level; an unknown level is INFO. Blank text
// is dropped. It does not change the level that captured lines inherit.
func (b *Buffer) Add(now time.Time, level, text string) {
	level = strings.ToUpper(level)
	if level == "WARN" {
		level = "WARNING"
	}
	if _, ok := levels[level]; !ok {
		level = "INFO"
	}
	if strings.TrimSpace(text) == "" {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.append(Line{TS: seconds(now), Level: level, Text: clip(text)})
}

// Capture reads lines from a worker's standard error until it ends or fails. A
// line without a level of its own, such as one of a traceback, has that of the
// line before it. The memory it needs is bounded by MaxLine.
func (b *Buffer) Capture(r io.Reader) error {
	b.mu.Lock()
	b.readers++
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.readers--
		b.mu.Unlock()
	}()
	br := bufio.NewReaderSize(r, 4096)
	var line []byte
	cut := false
	for {
		part, err := br.ReadSlice('\n')
		if room := MaxLine - len(line); len(part) > room && !bytes.HasSuffix(part[:min(len(part), room+1)], []byte("\n")) {
			part, cut = part[:room], true
		}
		line = append(line, part...)
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		b.captured(line, cut, time.Now())
		line, cut = line[:0], false
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

func (b *Buffer) captured(line []byte, cut bool, now time.Time) {
	text := strings.TrimRight(strings.ToValidUTF8(string(line), "\uFFFD"), "\r\n")
	if strings.TrimSpace(text) == "" {
		return
	}
	if cut {
		text += Clipped
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := format.FindStringSubmatch(text); m != nil {
		b.level = m[1] + m[2] // one of the two is empty
	}
	b.append(Line{TS: seconds(now), Level: b.level, Text: text})
}

func (b *Buffer) append(l Line) {
	b.lines = append(b.lines, l)
	b.bytes += len(l.Text)
	for len(b.lines)-b.head > MaxLines || b.bytes > MaxBytes {
		b.bytes -= len(b.lines[b.head].Text)
		b.lines[b.head] = Line{}
		b.head++
	}
	if b.head >= MaxLines { // seldom enough that a flood of lines costs no more
		n := copy(b.lines, b.lines[b.head:])
		clear(b.lines[n:])
		b.lines, b.head = b.lines[:n], 0
	}
}

// Reading reports whether a Capture is under way.
func (b *Buffer) Reading() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.readers > 0
}

// Tail returns the newest limit lines of at least the level, oldest first. Level
// "" or an unknown one is every line; a limit below 1 is none.
func (b *Buffer) Tail(limit int, level string) []Line {
	b.mu.Lock()
	defer b.mu.Unlock()
	least := levels[strings.ToUpper(level)]
	kept := b.lines[b.head:]
	out := make([]Line, 0, max(0, min(limit, len(kept))))
	for _, l := range slices.Backward(kept) {
		if len(out) >= limit {
			break
		}
		if levels[l.Level] >= least {
			out = append(out, l)
		}
	}
	slices.Reverse(out)
	return out
}

func seconds(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

func clip(text string) string {
	if len(text) <= MaxLine {
		return text
	}
	cut := MaxLine
	for cut > 0 && !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut] + Clipped
}
