package shim

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/process"
)

// InitMain is the body of `stockade-host init [--cwd DIR] -- COMMAND [ARG…]`:
// PID 1 of a container. It forks the command once, forwards polite signals to
// the command's process group, reaps everything, reports on descriptor 3 how the
// command ended and exits, whereupon the kernel kills whatever is left. The
// command gets init's environment, standard streams and, if they are one, its
// terminal; nothing else.
func InitMain(args []string) int {
	runtime.GOMAXPROCS(1)
	if err := unblockSignals(); err != nil {
		fmt.Fprintln(os.Stderr, "stockade init:", err)
		return 1
	}
	// Nobody in the container, whatever its user, may look into this process,
	// borrow its descriptors or write the report for it.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "stockade init: prctl:", err)
		return 1
	}
	if err := unix.CloseRange(reportFD, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		fmt.Fprintln(os.Stderr, "stockade init: close_range:", err)
		return 1
	}
	in := initProcess{tty: isTerminal(0), goes: make(chan struct{}, 2)}
	go in.listen()
	rep := in.run(args)
	if err := in.send(encodeReport(rep)); err != nil {
		return 1 // no report and another status: the end is unknown, as it should be
	}
	if in.tty && rep.Kind != api.ExitSpawnFailed {
		in.drainTerminal()
	}
	return process.InitStatus(rep)
}

type initProcess struct {
	tty   bool
	goes  chan struct{} // one for each allowance of the shim; closed when it is gone
	mu    sync.Mutex
	pid   int              // of the command; 0 before its start and after its end
	early []syscall.Signal // came before its start
}

func spawnFailed(format string, args ...any) process.InitReport {
	return process.InitReport{Kind: api.ExitSpawnFailed, Detail: clip(fmt.Sprintf(format, args...), reportText)}
}

func (in *initProcess) run(args []string) process.InitReport {
	cwd, argv, err := parseInit(args)
	if err != nil {
		return spawnFailed("%v", err)
	}
	if cwd != "" {
		if err := os.Chdir(cwd); err != nil {
			return spawnFailed("the working directory %s cannot be entered: %v", clip(cwd, nameText), reason(err))
		}
	}
	path, err := lookPath(argv[0], os.Getenv("PATH"))
	if err != nil {
		return spawnFailed("%v", err)
	}
	// Every signal gets a handler here, and exec turns a handler, unlike an
	// inherited "ignore", into the default disposition. Nobody reads the channel:
	// what does not fit is dropped.
	signal.Notify(make(chan os.Signal, 1))
	heedRealTime()
	if in.tty {
		if err := in.allowed(); err != nil {
			return spawnFailed("the terminal is not ready: %v", err)
		}
	}
	if err := in.send(encodeLine(reportLine{Kind: kindBegun})); err != nil {
		return spawnFailed("nobody listens to the report: %v", err)
	}
	attr := &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		// A process group of its own, in init's session: signals reach all of it,
		// and on a terminal it is the foreground group that Ctrl-C goes to. Init
		// stays the session leader, because the terminal's unread output is lost
		// in the moment its session leader exits.
		Sys: &syscall.SysProcAttr{Setpgid: true, Foreground: in.tty, Ctty: 0},
	}
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return spawnFailed("%s cannot be executed: %v", clip(path, nameText), reason(err))
	}
	in.letGo()
	in.setCommand(pid)
	return in.wait(pid)
}

// parseInit reads [--cwd DIR] -- COMMAND [ARG…].
func parseInit(args []string) (cwd string, argv []string, err error) {
	for len(args) > 0 && args[0] != "--" {
		switch {
		case args[0] == "--cwd" && len(args) > 1:
			cwd, args = args[1], args[2:]
		default:
			return "", nil, fmt.Errorf("init does not know the argument %q", args[0])
		}
	}
	if len(args) < 2 || args[1] == "" {
		return "", nil, errors.New("no command was given")
	}
	return cwd, args[1:], nil
}

// send writes to the report channel.
func (in *initProcess) send(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(reportFD, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// listen reads what the shim says, until it is gone.
func (in *initProcess) listen() {
	defer close(in.goes)
	var b [64]byte
	for {
		n, err := unix.Read(reportFD, b[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		for _, c := range b[:n] {
			if c == goByte {
				select {
				case in.goes <- struct{}{}:
				default: // there are two at most
				}
			} else if s := syscall.Signal(c); politeSignal(s) {
				in.forward(s)
			}
		}
	}
}

// forward passes a polite signal on to the command's process group.
func (in *initProcess) forward(s syscall.Signal) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.pid > 0 {
		_ = syscall.Kill(-in.pid, s)
	} else if len(in.early) < maxPending {
		in.early = append(in.early, s)
	}
}

func (in *initProcess) setCommand(pid int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.pid = pid
	for _, s := range in.early {
		_ = syscall.Kill(-pid, s)
	}
	in.early = nil
}

// allowed waits for one allowance of the shim.
func (in *initProcess) allowed() error {
	if _, ok := <-in.goes; !ok {
		return errors.New("the shim is gone")
	}
	return nil
}

// letGo drops init's own hold on the command's pipes, so that the command alone
// decides when they end. A terminal stays open: its other end would see an end
// whenever no process has it open, and the command may open it again.
func (in *initProcess) letGo() {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	for fd := 0; fd < 3; fd++ {
		if in.tty && fd == 0 {
			continue
		}
		if err == nil {
			_ = unix.Dup2(null, fd)
		} else {
			_ = unix.Close(fd)
		}
	}
	if err == nil && null > 2 {
		_ = unix.Close(null)
	}
}

// wait reaps every child of this PID namespace until the command has ended.
func (in *initProcess) wait(command int) process.InitReport {
	options := unix.WALL
	if in.tty {
		options |= unix.WUNTRACED
	}
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, options, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			// Not possible while the command is a child; without its status nothing
			// can be claimed.
			os.Exit(1)
		}
		if pid != command {
			continue
		}
		if !ws.Stopped() {
			in.setCommand(0)
		}
		switch {
		case ws.Exited():
			return process.InitReport{Kind: api.ExitExited, Code: ws.ExitStatus()}
		case ws.Signaled():
			return process.InitReport{Kind: api.ExitSignalled, Signal: process.SignalName(int(ws.Signal()))}
		case ws.Stopped():
			// No shell sits above the command to continue it: Ctrl-Z would stop it
			// for ever. It has no effect, as in a session whose leader is the command.
			_ = syscall.Kill(-command, syscall.SIGCONT)
		}
	}
}

// drainTerminal ends whatever else still runs and writes to the terminal, and
// waits until the shim has read what the terminal holds. If the shim is gone the
// wait ends at once.
func (in *initProcess) drainTerminal() {
	_ = syscall.Kill(-1, syscall.SIGKILL)
	for {
		if _, err := syscall.Wait4(-1, nil, unix.WALL, nil); err != nil && err != syscall.EINTR {
			break
		}
	}
	_ = unix.Close(0)
	_ = in.allowed()
}

// unblockSignals starts this program again with an empty signal mask if it was
// started with another: the Go runtime hands the mask it was started with on to
// its children.
func unblockSignals() error {
	blocked, err := blockedSignals()
	if err != nil || blocked == 0 {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var none unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &none, nil); err != nil {
		return fmt.Errorf("unblock signals: %w", err)
	}
	if blocked, err = blockedSignals(); err != nil || blocked != 0 {
		return fmt.Errorf("signals %x stay blocked (%v)", blocked, err)
	}
	return fmt.Errorf("start again: %w", syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
}

// blockedSignals returns the signal mask of the calling thread.
func blockedSignals() (uint64, error) {
	var set unix.Sigset_t
	err := unix.PthreadSigmask(unix.SIG_BLOCK, nil, &set)
	return set.Val[0], err
}

func isTerminal(fd int) bool {
	_, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	return err == nil
}
