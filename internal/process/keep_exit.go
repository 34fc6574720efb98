package process

import (
	"fmt"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
)

const sigkill = 9

// conclude says how the process ended, from the evidence alone (P3).
//
// The init's report counts only when its own wait status agrees with it. Then
// what it says is what happened, unless a deadline or an expired lease came
// before the report (the kind is deadline, whatever the command made of SIGTERM)
// or the kernel killed the command for memory (the kind is oom). A code of 0 is
// no success where output could not be kept: the command may have been stopped
// for that, and whoever reads less than it wrote must not take it for all.
func (s KeepState) conclude() api.Exit {
	switch {
	case !s.Begun:
		return api.Exit{Kind: api.ExitSpawnFailed, Detail: "it was closed before it was started; nothing ran"}
	case s.Failed && s.MayHaveRun:
		return s.annotate(api.Exit{Kind: api.ExitUnknown, Detail: "the runtime failed when the command may already have run: " + s.FailDetail})
	case s.Failed:
		return s.annotate(api.Exit{Kind: api.ExitSpawnFailed, Detail: s.FailDetail})
	}
	agreed := s.HasReport && s.Status.Signal == 0 && s.Status.Code == InitStatus(s.Report)
	killed := s.Status.Signal == sigkill
	switch {
	case s.late() && !(agreed && s.ReportFirst):
		return s.annotate(api.Exit{Kind: api.ExitDeadline, Detail: s.lateness(agreed)})
	case s.OOMKills > 0 && !s.Killed && (killed || agreed && s.Report.Kind == api.ExitSignalled && s.Report.Signal == SignalName(sigkill)):
		return s.annotate(api.Exit{Kind: api.ExitOOM})
	case agreed && s.Report.Kind == api.ExitExited && s.Report.Code == 0 && s.LogDetail != "":
		return s.annotate(api.Exit{Kind: api.ExitUnknown, Detail: "it exited with code 0, which is no success without its output"})
	case agreed && s.Report.Kind == api.ExitExited:
		code := s.Report.Code
		return s.annotate(api.Exit{Kind: api.ExitExited, Code: &code})
	case agreed && s.Report.Kind == api.ExitSignalled:
		return s.annotate(api.Exit{Kind: api.ExitSignalled, Signal: s.Report.Signal})
	case agreed:
		return s.annotate(api.Exit{Kind: api.ExitSpawnFailed, Detail: s.Report.Detail})
	case killed && s.Killed:
		return s.annotate(api.Exit{Kind: api.ExitSignalled, Signal: SignalName(sigkill), Detail: "the whole tree was killed"})
	}
	return s.annotate(api.Exit{Kind: api.ExitUnknown, Detail: s.unexplained()})
}

// late reports whether time ran out before anything else stopped it.
func (s KeepState) late() bool { return s.Cause == CauseDeadline || s.Cause == CauseLease }

// lateness says which time ran out and what came of it.
func (s KeepState) lateness(agreed bool) string {
	what := "its lease expired: no server renewed it"
	if s.Cause == CauseDeadline {
		what = "its deadline of " + s.Deadline.String() + " passed"
	}
	switch {
	case agreed && s.Report.Kind == api.ExitExited:
		return fmt.Sprintf("%s; told to end, it exited with code %d", what, s.Report.Code)
	case agreed && s.Report.Kind == api.ExitSignalled:
		return what + "; " + s.Report.Signal + " ended it"
	case s.Killed:
		return what + "; the whole tree was killed"
	}
	return what + "; " + s.unexplained()
}

// unexplained describes a wait status that no agreeing report explains.
func (s KeepState) unexplained() string {
	end := fmt.Sprintf("the container's init exited with code %d", s.Status.Code)
	if s.Status.Signal != 0 {
		end = "the container's init was ended by " + SignalName(s.Status.Signal)
	}
	if !s.HasReport {
		return end + " and left no report"
	}
	return fmt.Sprintf("%s, which does not agree with its report (%s)", end, s.Report.Kind)
}

// annotate adds to the detail what a reader of the exit should know besides.
func (s KeepState) annotate(e api.Exit) api.Exit {
	notes := make([]string, 0, 4)
	if e.Detail != "" {
		notes = append(notes, e.Detail)
	}
	if s.OOMKills > 0 {
		notes = append(notes, fmt.Sprintf("the kernel killed processes of its tree for lack of memory (count %d)", s.OOMKills))
	}
	if s.LogDetail != "" {
		notes = append(notes, "its output could no longer be kept: "+s.LogDetail)
	}
	if s.DrainDetail != "" {
		notes = append(notes, "output may be incomplete: "+s.DrainDetail)
	}
	e.Detail = strings.Join(notes, "; ")
	return e
}

// InitStatus is the code with which a container's init exits after it reported
// r, so that its wait status proves the report: the command's own code; 128 and
// the signal's number, as shells do; 127 when the command could not be started.
// It is -1, which no wait status is, for a report that makes no sense.
func InitStatus(r InitReport) int {
	switch r.Kind {
	case api.ExitExited:
		if r.Code >= 0 && r.Code <= 255 {
			return r.Code
		}
	case api.ExitSignalled:
		if n, ok := SignalNumber(r.Signal); ok {
			return 128 + n
		}
	case api.ExitSpawnFailed:
		return 127
	}
	return -1
}

// signals are the names of Linux's signals 1 to 31, in order (signal(7), the
// numbering of x86 and ARM).
var signals = [...]string{1: "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE",
	"SIGKILL", "SIGUSR1", "SIGSEGV", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGSTKFLT", "SIGCHLD", "SIGCONT",
	"SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGXCPU", "SIGXFSZ", "SIGVTALRM", "SIGPROF", "SIGWINCH",
	"SIGIO", "SIGPWR", "SIGSYS"}

// maxSignal is the highest signal number (64 with the real-time ones).
const maxSignal = 64

// SignalName names a signal number: "SIGTERM"; "SIG40" for one without a name.
func SignalName(n int) string {
	if n > 0 && n < len(signals) {
		return signals[n]
	}
	return fmt.Sprintf("SIG%d", n)
}

// SignalNumber is the inverse of [SignalName] for the numbers 1 to 64.
func SignalNumber(name string) (int, bool) {
	for n := 1; n <= maxSignal; n++ {
		if SignalName(n) == name {
			return n, true
		}
	}
	return 0, false
}
