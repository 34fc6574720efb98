package broker

import (
	"regexp"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// maxText is how much of a text that a host or a caller gives is kept.
const maxText = 1024

var signalName = regexp.MustCompile(`^SIG[A-Z0-9+-]{1,16}$`)

// checkState refuses a state that an honest host cannot tell, and cuts its texts.
func checkState(p store.Process, st *wire.ProcState) error {
	wrong := func(format string, args ...any) error {
		return errdefs.New(errdefs.Internal, "the host program told a state that makes no sense: "+format, args...).
			WithNext("check that its version matches the server's")
	}
	if st.ID != p.Handle || st.Box != "" && st.Box != p.Box {
		return wrong("it is about another process or box")
	}
	switch st.Phase {
	case wire.PhaseAccepted, wire.PhaseStarting, wire.PhaseRunning, wire.PhaseStopping:
		if st.Exit != nil || st.Proof != nil {
			return wrong("an end while the phase is %s", st.Phase)
		}
	case wire.PhaseEnded:
	default:
		return wrong("an unknown phase")
	}
	if e := st.Exit; e != nil {
		c := *e
		switch c.Kind {
		case api.ExitExited, api.ExitSignalled, api.ExitOOM, api.ExitDeadline, api.ExitSpawnFailed, api.ExitUnknown:
		default:
			return wrong("an unknown exit kind")
		}
		if (c.Kind == api.ExitExited) != (c.Code != nil) {
			return wrong("an exit code without an exit, or an exit without its code")
		}
		if c.Code != nil && (*c.Code < 0 || *c.Code > 255) {
			return wrong("the exit code %d", *c.Code)
		}
		if c.Signal != "" && !signalName.MatchString(c.Signal) {
			return wrong("a signal's name that is none")
		}
		c.Detail = cut(c.Detail)
		st.Exit = &c
	}
	for _, t := range []*time.Time{st.Started, st.Ended} {
		if t != nil && !plausible(*t) {
			return wrong("a time outside the years 2000 to 9999")
		}
	}
	if pr := st.Proof; pr != nil {
		c := *pr
		if !plausible(c.EmptyAt) {
			return wrong("a proof without a time")
		}
		c.EmptyAt = c.EmptyAt.UTC().Truncate(time.Microsecond)
		c.BootID, c.Container, c.Cgroup = cut(c.BootID), cut(c.Container), cut(c.Cgroup)
		st.Proof = &c
	}
	in, log := &st.Stdin, &st.Log
	for _, n := range []int64{in.Accepted, in.Window, log.Oldest, log.Next, log.Stdout, log.Stderr} {
		if n < 0 || n > api.MaxOffset {
			return wrong("a position outside 0 to 2^53")
		}
	}
	if log.Oldest > log.Next {
		return wrong("a log that begins after its end")
	}
	st.Unproven, log.Failure = cut(st.Unproven), cut(log.Failure)
	return nil
}

func plausible(t time.Time) bool { return t.Year() >= 2000 && t.Year() <= 9999 }

// cut bounds a foreign text and makes it one harmless line.
func cut(s string) string { return cutTo(s, maxText) }

func cutTo(s string, most int) string {
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
