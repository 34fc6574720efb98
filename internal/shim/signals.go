package shim

import (
	"slices"
	"strings"
	"syscall"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/process"
)

// polite lists the signals that init forwards to the command. To end a process
// for good is Close's work.
func polite() []syscall.Signal {
	return []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1,
		syscall.SIGUSR2, syscall.SIGWINCH, syscall.SIGCONT, syscall.SIGTSTP}
}

func politeSignal(s syscall.Signal) bool { return slices.Contains(polite(), s) }

// parseSignal returns the signal of a name such as "SIGTERM".
func parseSignal(name string) (syscall.Signal, error) {
	if n, ok := process.SignalNumber(name); ok && politeSignal(syscall.Signal(n)) {
		return syscall.Signal(n), nil
	}
	names := make([]string, 0, len(polite()))
	for _, s := range polite() {
		names = append(names, process.SignalName(int(s)))
	}
	return 0, errdefs.New(errdefs.Invalid, "the signal %q cannot be sent", clip(name, 32)).
		WithNext("use one of %s, or close to end it", strings.Join(names, " "))
}
