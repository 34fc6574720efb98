package cli

import (
	"errors"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// ExitCodes maps the code of a refusal to the exit status of every command but
// run and attach, whose own failures are 125 (as with docker run), so that they
// cannot be taken for the child's.
var ExitCodes = map[errdefs.Code]int{
	errdefs.Internal:        1,
	errdefs.Invalid:         2,
	errdefs.Unauthenticated: 10,
	errdefs.Denied:          11,
	errdefs.NotFound:        12,
	errdefs.Conflict:        13,
	errdefs.Fenced:          14,
	errdefs.Cancelling:      15,
	errdefs.Exhausted:       16,
	errdefs.Unavailable:     17,
	errdefs.Indeterminate:   18,
}

// Exit statuses of run and attach that are not the child's own. 124 is that of
// timeout(1); 125, 126, 127 are those of docker run; 128+N is the shell's.
const (
	exitDeadline      = 124
	exitOurs          = 125
	exitNotExecutable = 126
	exitNotFound      = 127
	exitSignalBase    = 128
)

func exitCode(err error) int {
	if code, ok := ExitCodes[errdefs.CodeOf(err)]; ok {
		return code
	}
	return 1
}

// childExit is the exit status that stands for how a process ended. unknown is
// never 0 (P3).
func childExit(e *api.Exit) int {
	if e == nil {
		return exitOurs
	}
	switch e.Kind {
	case api.ExitExited:
		if e.Code != nil {
			return *e.Code
		}
		return exitOurs
	case api.ExitSignalled:
		return exitSignalBase + int(signalNumber(e.Signal))
	case api.ExitOOM:
		return exitSignalBase + int(syscall.SIGKILL)
	case api.ExitDeadline:
		return exitDeadline
	case api.ExitSpawnFailed:
		if isNotFound(e.Detail) {
			return exitNotFound
		}
		return exitNotExecutable
	default:
		return exitOurs
	}
}

func signalNumber(name string) syscall.Signal { return unix.SignalNum(name) }

// isNotFound tells a missing command from one that cannot be executed, by the
// words of init (package shim, lookpath.go) and of execve(2).
func isNotFound(detail string) bool {
	return strings.Contains(detail, "not found") || strings.Contains(detail, syscall.ENOENT.Error())
}

// complain prints an error for a person, or as a problem for a program.
func (a *app) complain(err error) {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		e = errdefs.New(errdefs.Internal, "%v", err)
	}
	if a.json {
		_ = writeJSON(a.Stderr, api.ProblemOf(e, "stderr"))
		return
	}
	a.say("stockade: %s", e.Message)
	if e.Next != "" {
		a.say("  next: %s", e.Next)
	}
	if e.Code == errdefs.Internal {
		if cause := e.Unwrap(); cause != nil {
			a.say("  cause: %v", cause)
		}
	}
}
