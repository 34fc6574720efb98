package osproc

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// KeeperCommand is the first argument by which a program that uses this package
// is asked to call [KeeperMain].
const KeeperCommand = "relay-keep"

// controlFD is the control socket in the keeper.
const controlFD = 3

// KeeperMain is the body of the keeper, for the main function of a program that
// was started with [KeeperCommand]. It returns the exit code. Nobody starts it by
// hand: without a control socket it does nothing.
func KeeperMain() int { return keeperMain(pidfdSignal) }

// keeper is owned by one goroutine, the locked main one.
type keeper struct {
	send  func(pidfd int, sig unix.Signal) error
	out   *json.Encoder
	agent int // 0 before it started and after it was waited for

	stop     <-chan time.Time // ends the stage
	stage    stage
	killWait time.Duration
	why      error // the last failure to signal
}

type stage int

const (
	running stage = iota
	terming
	killing
)

func keeperMain(send func(int, unix.Signal) error) int {
	unix.CloseOnExec(controlFD)
	control := os.NewFile(controlFD, "control")
	dec := json.NewDecoder(control)
	var first order
	if err := dec.Decode(&first); err != nil || first.Start == nil {
		fmt.Fprintln(os.Stderr, KeeperCommand+" is started by the relay client and not by hand")
		return 2
	}
	k := &keeper{send: send, out: json.NewEncoder(control)}
	// The agent dies with this thread, also when the keeper is killed.
	runtime.LockOSThread()
	// What is caught is default again in the agent; what is ignored would not be.
	// The agent may signal its parent as much as it likes.
	others, children := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(others, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGPIPE)
	signal.Notify(children, unix.SIGCHLD)
	if err := k.start(*first.Start); err != nil {
		_ = k.out.Encode(report{Failed: err.Error(), Errno: int(errno(err))})
		return 1
	}
	_ = k.out.Encode(report{Started: k.agent})

	orders := make(chan order)
	go func() {
		defer close(orders)
		for {
			var o order
			if dec.Decode(&o) != nil {
				return // the caller has gone: its end is an order to stop
			}
			orders <- o
		}
	}()
	return k.run(orders, children, first)
}

// start makes this process the subreaper and starts the agent with the keeper's
// own streams, which the keeper then lets go of, so that their ends are the
// agent's.
func (k *keeper) start(s startOrder) error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper: %w", err)
	}
	p, err := os.StartProcess(s.Argv[0], s.Argv, &os.ProcAttr{
		Env: s.Env, Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return err
	}
	k.agent = p.Pid
	_ = p.Release() // wait4 below waits for every child
	// An agent of the same user must not be able to make the keeper say what is not
	// true: no ptrace, no writing to its memory (PR_SET_DUMPABLE in prctl(2)). Not
	// before the start, or the agent's own /proc would be root's until its exec.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	for fd := range 3 {
		if err := unix.Dup3(null, fd, 0); err != nil {
			return err
		}
	}
	return unix.Close(null)
}

func (k *keeper) run(orders <-chan order, children <-chan os.Signal, first order) int {
	for {
		none := k.reap()
		if none && k.stage != running {
			_ = k.out.Encode(report{Gone: true})
			return 0
		}
		if k.stage == killing {
			k.signal(unix.SIGKILL) // whom the last end has brought into sight
		}
		select {
		case <-children:
		case o, ok := <-orders:
			if !ok {
				o, orders = first, nil
			}
			if k.stage == running {
				k.stage, k.killWait = terming, o.KillWait
				k.signal(unix.SIGTERM)
				k.stop = time.After(o.Grace)
			}
		case <-k.stop:
			if k.stage == killing {
				_ = k.out.Encode(report{Left: k.left()})
				return 1
			}
			k.stage, k.stop = killing, time.After(k.killWait)
		}
	}
}

// reap waits for every child that has ended and reports whether there is none
// left at all, which is the proof.
func (k *keeper) reap() (none bool) {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ECHILD):
			return true
		case err != nil || pid == 0:
			return false
		case pid == k.agent && (ws.Exited() || ws.Signaled()):
			e := Exit{Code: ws.ExitStatus()}
			if ws.Signaled() {
				e = Exit{Code: -1, Signal: unix.SignalName(ws.Signal())}
			}
			k.agent = 0
			_ = k.out.Encode(report{Exit: &e})
		}
	}
}

func (k *keeper) signal(sig unix.Signal) {
	if err := signalBelow(os.Getpid(), sig, k.send); err != nil {
		k.why = err
	}
}

// left says what is still there, for people.
func (k *keeper) left() string {
	pids, err := descendants(os.Getpid())
	if err != nil {
		return "what is left cannot be listed: " + err.Error()
	}
	text := fmt.Sprintf("%d processes are still there after SIGKILL: %v", len(pids), pids[:min(len(pids), 20)])
	if k.why != nil {
		text += "; " + k.why.Error()
	}
	return text
}

func errno(err error) syscall.Errno {
	var e syscall.Errno
	errors.As(err, &e)
	return e
}
