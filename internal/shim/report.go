package shim

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/process"
)

// The report channel is one end of a socket pair that init inherits as
// descriptor 3, closed on exec, so the tenant's command never holds it. Init
// writes JSON lines, each once:
//
//	{"kind":"begun"}                          just before the command is forked
//	{"kind":"exited","code":N}                then exactly one of these
//	{"kind":"signalled","signal":"SIGSEGV"}
//	{"kind":"spawn_failed","detail":"…"}
//
// A report that lacks "begun" proves that the command was never forked.
//
// The shim writes single bytes. 1 to 64 is a signal for the command's process
// group; it comes this way and not as a signal to init because signals to PID 1
// are lost before it has handlers, and change places when two come at once.
// goByte is an allowance, used on a terminal only: the first allows the fork (the
// terminal has its size), the second allows init to exit (what the terminal held
// has been read; it is lost when its session leader exits).
const (
	reportFD   = 3
	reportText = 1 << 10 // bytes of a detail
	nameText   = 256     // bytes of a name in it
	// reportMost bounds the whole report: JSON may write a byte as six.
	reportMost = 6*reportText + 1<<10
	goByte     = 'g'
)

const kindBegun = "begun"

type reportLine struct {
	Kind   string `json:"kind"`
	Code   int    `json:"code,omitempty"`
	Signal string `json:"signal,omitempty"`
	Detail string `json:"detail,omitempty"`
}

func encodeReport(r process.InitReport) []byte {
	return encodeLine(reportLine{Kind: string(r.Kind), Code: r.Code, Signal: r.Signal, Detail: r.Detail})
}

func encodeLine(l reportLine) []byte {
	b, err := json.Marshal(l)
	if err != nil {
		panic("encode a report: " + err.Error()) // strings and numbers only
	}
	return append(b, '\n')
}

var errReport = errors.New("the report of the container's init makes no sense")

// readReport reads init's report to its end. begun is called for the line
// before the fork, ended for the one that says how it ended. A report that makes
// no sense is an error, and is read no further: nothing is concluded from it.
func readReport(r io.Reader, begun func(), ended func(process.InitReport)) error {
	sc := bufio.NewScanner(io.LimitReader(r, reportMost))
	sc.Buffer(make([]byte, 0, 512), reportMost)
	hasBegun, hasEnded := false, false
	for sc.Scan() {
		var l reportLine
		if err := json.Unmarshal(sc.Bytes(), &l); err != nil || hasEnded {
			return errReport
		}
		if l.Kind == kindBegun {
			if hasBegun {
				return errReport
			}
			hasBegun = true
			begun()
			continue
		}
		rep := process.InitReport{Kind: api.ExitKind(l.Kind), Code: l.Code, Signal: l.Signal, Detail: l.Detail}
		if process.InitStatus(rep) < 0 || !hasBegun && rep.Kind != api.ExitSpawnFailed {
			return errReport
		}
		hasEnded = true
		ended(rep)
	}
	return sc.Err()
}

// ReadReport reads the report of a container's init to its end, for who starts
// containers without a keeper. begun says whether the command was forked; without
// ended nothing is known of its end. A report that makes no sense is an error.
func ReadReport(r io.Reader) (rep process.InitReport, begun, ended bool, err error) {
	err = readReport(r, func() { begun = true }, func(got process.InitReport) { rep, ended = got, true })
	return rep, begun, ended, err
}

// clip bounds a text from elsewhere and makes it one harmless line.
func clip(s string, most int) string {
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}
