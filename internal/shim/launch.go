package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/wire"
)

const (
	// startPatience bounds the runtime's start of a container; it takes 30 ms.
	startPatience = 60 * time.Second
	// deletePatience bounds its removal.
	deletePatience = 10 * time.Second
	// failPatience bounds the wait for the report of a start that failed. The
	// report ends with the last process that holds it.
	failPatience = 2 * time.Second
	// runtimeText is how much of a runtime's own words goes into a detail.
	runtimeText = 1 << 10

	pidFile    = "init.pid"
	runtimeLog = "runtime.log"
)

// ends are the descriptors of a start. A field is -1 while it is closed or not
// there; each is closed once, by whoever takes it out.
type ends struct {
	inR, inW         int
	outR, outW       int
	errR, errW       int
	reportR, reportW int
}

func (e *ends) all() []*int {
	return []*int{&e.inR, &e.inW, &e.outR, &e.outW, &e.errR, &e.errW, &e.reportR, &e.reportW}
}

func (e *ends) close(fds ...*int) {
	for _, fd := range fds {
		if *fd >= 0 {
			_ = unix.Close(*fd)
			*fd = -1
		}
	}
}

func take(fd *int) int {
	n := *fd
	*fd = -1
	return n
}

// open makes the child's pipes and the report channel. The pipes belong to the
// child's user: otherwise it could not open /dev/stdout, which is an ordinary
// open of the pipe. On a terminal only the runtime itself writes to errW.
func (e *ends) open(spec wire.ProcSpec, uid, gid int) (err error) {
	for _, fd := range e.all() {
		*fd = -1
	}
	defer func() {
		if err != nil {
			e.close(e.all()...)
		}
	}()
	pair := func(r, w *int, size int) error {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return os.NewSyscallError("pipe", err)
		}
		*r, *w = p[0], p[1]
		if err := unix.Fchown(p[0], uid, gid); err != nil {
			return os.NewSyscallError("fchown", err)
		}
		if size > 0 {
			// Where the user's share of pipe memory is used up the pipe stays small,
			// which costs throughput and nothing else.
			_, _ = unix.FcntlInt(uintptr(p[1]), unix.F_SETPIPE_SZ, size)
		}
		return nil
	}
	if spec.Stdin && spec.PTY == nil {
		if err := pair(&e.inR, &e.inW, 0); err != nil {
			return err
		}
	} else if e.inR, err = unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return os.NewSyscallError("open /dev/null", err)
	}
	if err := pair(&e.errR, &e.errW, pipeBytes); err != nil {
		return err
	}
	if spec.PTY == nil {
		if err := pair(&e.outR, &e.outW, pipeBytes); err != nil {
			return err
		}
	}
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	e.reportR, e.reportW = p[0], p[1]
	return nil
}

// bundled is what a keeper must know of a bundle.
type bundled struct {
	uid, gid int           // who the child will be on this machine
	limits   api.BoxLimits // of its own control group
}

// readBundle reads it from a bundle.
func readBundle(dir string) (bundled, error) {
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return bundled{}, err
	}
	type mapping struct {
		ContainerID, HostID, Size int64
	}
	var cfg struct {
		Process struct {
			User struct{ UID, GID int64 }
		}
		Linux struct {
			UIDMappings, GIDMappings []mapping
			Resources                struct{ Memory, Pids struct{ Limit int64 } }
		}
	}
	if err := json.Unmarshal(b, &cfg); err != nil {
		return bundled{}, fmt.Errorf("the bundle's config.json: %w", err)
	}
	outside := func(ms []mapping, id int64) int {
		for _, m := range ms {
			if id >= m.ContainerID && id-m.ContainerID < m.Size {
				return int(m.HostID + id - m.ContainerID)
			}
		}
		return int(id)
	}
	return bundled{
		uid: outside(cfg.Linux.UIDMappings, cfg.Process.User.UID), gid: outside(cfg.Linux.GIDMappings, cfg.Process.User.GID),
		limits: api.BoxLimits{MemoryBytes: cfg.Linux.Resources.Memory.Limit, Pids: cfg.Linux.Resources.Pids.Limit},
	}, nil
}

// launch carries out process.LaunchContainer. It sends Started or RuntimeFailed,
// sees to it that ReportClosed and Drained come in every case, and stays until
// wait4 returned for the init, to send Reaped.
func (k *keeper) launch() {
	l := &launching{keeper: k, terminal: -1, pumped: make(chan struct{}), begun: make(chan struct{}), reported: make(chan struct{})}
	status, err := l.run()
	if err == nil {
		k.send(process.Started{})
		ws := <-status
		k.input.end()
		k.send(reaped(ws))
		return
	}
	k.log.Warn("start failed", "error", err)
	l.abandon(err)
}

func reaped(ws syscall.WaitStatus) process.Reaped {
	if ws.Signaled() {
		return process.Reaped{Signal: int(ws.Signal())}
	}
	return process.Reaped{Code: ws.ExitStatus()}
}

// launching is one start under way; launch's goroutine owns it.
type launching struct {
	*keeper
	ends     ends
	opened   bool
	terminal int // the terminal's master until output takes it, -1
	pumping  bool
	pumped   chan struct{} // closed when output is being moved, or never will be
	begun    chan struct{} // closed when init is about to fork the command
	reported chan struct{} // closed when the report is at its end
}

// run starts the container and returns the channel of its init's wait status.
func (l *launching) run() (<-chan syscall.WaitStatus, error) {
	if err := writeDurable(l.dir, markerFile, fmt.Appendf(nil, "%s\n%s\n", l.cfg.Container, l.id.BootID)); err != nil {
		return nil, err
	}
	spec := l.cfg.Spec
	bundle, err := readBundle(l.cfg.Bundle)
	if err != nil {
		return nil, err
	}
	program, argv := l.cfg.Runtime, l.runArgs()
	if l.cfg.Manner.Grouped {
		if err := l.cgroup.Create(bundle.limits); err != nil {
			return nil, err
		}
		// This very program, even where its file was replaced since.
		program, argv = "/proc/self/exe", l.cfg.Manner.InGroup("stockade-host", l.cfg.CgroupRoot, l.cfg.Cgroup, argv)
	}
	if err := l.ends.open(spec, bundle.uid, bundle.gid); err != nil {
		return nil, err
	}
	l.opened = true
	ctx, cancel := context.WithTimeout(context.Background(), startPatience)
	defer cancel()
	defer func() { l.ends.close(&l.ends.inR, &l.ends.outW, &l.ends.errW, &l.ends.reportW) }()
	l.readReport()
	var master <-chan int
	if spec.PTY != nil {
		con, err := listenConsole(l.cfg.Bundle)
		if err != nil {
			return nil, err
		}
		defer con.close()
		terminal := l.awaitTerminal(ctx, con)
		master = terminal
		defer func() { // whatever happened, the one that was sent is taken or closed
			cancel()
			if fd, ok := <-terminal; ok && fd >= 0 {
				_ = unix.Close(fd)
			}
			l.ends.close(&l.terminal)
		}()
	}

	out := l.ends.outW
	if spec.PTY != nil {
		out = l.ends.errW
	}
	pid, runtimeEnd, err := l.reap.start(program, argv, &syscall.ProcAttr{
		Dir: l.cfg.Bundle, Env: runtimeEnv(),
		Files: []uintptr{uintptr(l.ends.inR), uintptr(out), uintptr(l.ends.errW), uintptr(l.ends.reportW)},
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return nil, fmt.Errorf("the runtime %s cannot be executed: %w", l.cfg.Runtime, err)
	}
	l.ends.close(&l.ends.inR, &l.ends.outW, &l.ends.errW, &l.ends.reportW)

	begun := l.begun
	for {
		select {
		case ws := <-runtimeEnd:
			if ws.ExitStatus() != 0 {
				return nil, l.runtimeError(ws)
			}
			if master != nil { // not received yet
				if l.terminal = <-master; l.terminal < 0 {
					return nil, errors.New("the runtime sent no terminal")
				}
			}
			return l.started()
		case l.terminal = <-master:
			master = nil
			if l.terminal < 0 {
				return nil, fmt.Errorf("the runtime sent no terminal: %w", l.runtimeError(lastWords(pid, runtimeEnd)))
			}
		case <-begun: // on a terminal only after it was received
			begun = nil
			if err := l.output(); err != nil {
				return nil, err
			}
		case <-ctx.Done():
			_ = unix.Kill(-pid, unix.SIGKILL)
			<-runtimeEnd
			return nil, fmt.Errorf("the runtime did not start the container within %v: %w", startPatience, l.runtimeError(0))
		}
	}
}

// lastWords gives a runtime that has failed a moment to say why and end, and
// then ends it.
func lastWords(pid int, end <-chan syscall.WaitStatus) syscall.WaitStatus {
	select {
	case ws := <-end:
		return ws
	case <-time.After(failPatience):
		_ = unix.Kill(-pid, unix.SIGKILL)
		return <-end
	}
}

// started takes over the init of a container that the runtime says runs.
func (l *launching) started() (<-chan syscall.WaitStatus, error) {
	b, err := os.ReadFile(filepath.Join(l.dir, pidFile))
	if err != nil {
		return nil, fmt.Errorf("the runtime left no pid: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return nil, fmt.Errorf("the runtime left the pid %q", clip(string(b), 32))
	}
	fd, status, err := l.reap.adopt(pid)
	if err != nil {
		return nil, err
	}
	if err := l.output(); err != nil {
		return nil, err
	}
	l.setInit(fd)
	return status, nil
}

// output begins to move what the child says into the log, and what it is told
// into its input.
func (l *launching) output() error {
	if l.pumping || l.cfg.Spec.PTY != nil && l.terminal < 0 {
		return nil
	}
	var sources []source
	if l.cfg.Spec.PTY != nil {
		in, err := unix.FcntlInt(uintptr(l.terminal), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("dup", err)
		}
		terminal := take(&l.terminal)
		l.setTerminal(terminal)
		sources = []source{{fd: terminal, kind: wire.KindStdout, tty: true}}
		l.ends.inW = in
	} else {
		sources = []source{
			{fd: take(&l.ends.outR), kind: wire.KindStdout},
			{fd: take(&l.ends.errR), kind: wire.KindStderr},
		}
	}
	p, err := newPump(l.spool, sources, func(detail string) { l.send(process.LogFailed{Detail: detail}) })
	if err != nil {
		return err
	}
	l.pumping = true
	l.setPump(p)
	close(l.pumped)
	go func() {
		detail := p.run()
		l.setTerminal(-1)
		l.finishLog(detail)
	}()
	if in := take(&l.ends.inW); in >= 0 {
		_ = unix.SetNonblock(in, true)
		f := os.NewFile(uintptr(in), "stdin")
		go func() {
			select {
			case <-l.begun: // before, a Ctrl-C would end the init
			case <-l.reported:
			}
			l.input.attach(f)
		}()
	}
	return nil
}

// readReport reads the init's report by a goroutine, to its end.
func (l *launching) readReport() {
	fd := take(&l.ends.reportR)
	_ = unix.SetNonblock(fd, true)
	f := os.NewFile(uintptr(fd), "report")
	l.setReport(f)
	go func() {
		defer f.Close()
		err := readReport(f, func() { close(l.begun) }, func(r process.InitReport) {
			l.send(r)
			if l.cfg.Spec.PTY != nil {
				l.releaseInit()
			}
		})
		if err != nil {
			l.log.Warn("read the init's report", "error", err)
			if errors.Is(err, errReport) {
				_, _ = io.Copy(io.Discard, f)
			}
		}
		close(l.reported)
		l.send(process.ReportClosed{})
	}()
}

// releaseInit lets an init exit that waits for its terminal to be read empty.
func (l *launching) releaseInit() {
	<-l.pumped
	l.lift() // what a terminal holds is bounded, and nobody may be reading the log
	if p := l.pump(); p != nil {
		<-p.caught()
	}
	l.allow()
}

// awaitTerminal receives the terminal's master by a goroutine, sets its size
// and allows init to go on. The channel gets it, or -1.
func (l *launching) awaitTerminal(ctx context.Context, con *console) <-chan int {
	ch := make(chan int, 1)
	go func() {
		fd, err := con.receive(ctx)
		if err == nil {
			err = setSize(fd, *l.cfg.Spec.PTY)
		}
		if err != nil {
			l.log.Warn("receive the terminal", "error", err)
			if fd >= 0 {
				_ = unix.Close(fd)
			}
			fd = -1
		}
		ch <- fd
		close(ch)
		if fd >= 0 {
			l.allow()
		}
	}()
	return ch
}

// abandon cleans up after a start that failed, and tells the machine.
func (l *launching) abandon(err error) {
	if !l.pumping {
		close(l.pumped)
	}
	l.kill()
	l.deleteContainer()
	mayHaveRun := false
	if f := l.report(); f != nil {
		select {
		case <-l.reported: // with the last process that could have gone on
		case <-time.After(failPatience):
			mayHaveRun = true
		}
		select {
		case <-l.begun:
			mayHaveRun = true
		default:
		}
	}
	detail := err.Error()
	if l.opened {
		l.ends.close(l.ends.all()...)
	}
	l.input.end()
	l.send(process.RuntimeFailed{Detail: clip(detail, reportText), MayHaveRun: mayHaveRun})
	if l.report() == nil {
		l.send(process.ReportClosed{})
	}
	if !l.pumping {
		l.finishLog("")
	}
}
