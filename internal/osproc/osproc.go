package osproc

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// Process is one agent and everything below it. Its methods may be called from
// any goroutine, except that one goroutine at a time reads lines.
//
// Every process that was started must be stopped: [Process.Stop] also ends what a
// finished agent left behind, and frees what is held.
type Process struct {
	cfg    Config
	keeper *exec.Cmd
	orders *json.Encoder
	// control is closed by stop only.
	control *os.File
	group   *cgroup.Group // nil: none
	pid     int

	lines *lines
	input *input
	tail  *tail

	exited chan struct{} // closed when exit is set, or the keeper is gone
	exit   Exit
	// final receives the keeper's last word: one report, then it is closed. It is
	// closed without a word when the keeper was killed.
	final chan report

	once    sync.Once
	outcome Outcome
}

// Start starts the agent and returns when it runs. The error's code says why it
// does not: not_found and denied are about the program's file.
func Start(cfg Config) (*Process, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	p := &Process{cfg: cfg, exited: make(chan struct{}), final: make(chan report, 1)}
	if err := p.spawn(); err != nil {
		return nil, err
	}
	return p, nil
}

// spawn starts the keeper, puts it into its group, and only then lets it start
// the agent.
func (p *Process) spawn() (err error) {
	var ours, theirs []*os.File
	defer func() {
		closeAll(theirs)
		if err != nil {
			closeAll(ours)
		}
	}()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "a process cannot be started: %v", err)
	}
	_ = unix.SetNonblock(pair[0], true) // so that closing it ends a read
	p.control = os.NewFile(uintptr(pair[0]), "control")
	ours, theirs = append(ours, p.control), append(theirs, os.NewFile(uintptr(pair[1]), "control"))
	var streams [3][2]*os.File
	for i := range streams {
		r, w, err := os.Pipe()
		if err != nil {
			return errdefs.Wrap(err, errdefs.Unavailable, "a process cannot be started: %v", err)
		}
		if i == 0 {
			r, w = w, r
		}
		streams[i] = [2]*os.File{r, w} // ours, theirs
		ours, theirs = append(ours, r), append(theirs, w)
	}
	p.keeper = &exec.Cmd{
		Path: p.cfg.Keeper[0], Args: p.cfg.Keeper, Env: []string{},
		// The child's own view of the open directory: no path is looked up again.
		Dir:   "/proc/self/fd/" + strconv.Itoa(int(p.cfg.Dir.Fd())),
		Stdin: streams[0][1], Stdout: streams[1][1], Stderr: streams[2][1],
		ExtraFiles:  []*os.File{theirs[0]},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	err = p.keeper.Start()
	closeAll(theirs) // with a copy here their ends would never be seen
	theirs = nil
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the keeper of a process cannot be started: %v", err)
	}
	p.joinGroup()
	p.orders = json.NewEncoder(p.control)
	dec := json.NewDecoder(p.control)
	first := order{Start: &startOrder{Argv: p.cfg.Argv, Env: p.cfg.Env}, Grace: p.cfg.Grace, KillWait: p.cfg.KillWait}
	var r report
	_ = p.control.SetDeadline(time.Now().Add(startBound))
	if err = p.orders.Encode(first); err == nil {
		err = dec.Decode(&r)
	}
	if err != nil || r.Started == 0 {
		_ = p.keeper.Process.Kill() // it has no child
		_ = p.keeper.Wait()
		p.removeGroup()
		return startError(p.cfg.Argv[0], r, err)
	}
	_ = p.control.SetDeadline(time.Time{})
	p.pid = r.Started
	p.lines = newLines(streams[1][0], p.cfg.MaxLine, p.cfg.MaxOutput)
	p.input = newInput(streams[0][0], p.cfg.MaxPending)
	p.tail = newTail(streams[2][0], p.cfg.StderrTail)
	go p.listen(dec)
	return nil
}

func startError(name string, r report, err error) error {
	code := errdefs.Unavailable
	switch syscall.Errno(r.Errno) {
	case syscall.ENOENT, syscall.ENOTDIR:
		code = errdefs.NotFound
	case syscall.EACCES, syscall.EPERM, syscall.ENOEXEC:
		code = errdefs.Denied
	}
	if r.Failed == "" {
		return errdefs.Wrap(err, code, "the keeper of %s ended before it had started it", filepath.Base(name))
	}
	return errdefs.New(code, "%s cannot be started: %s", filepath.Base(name), r.Failed)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// joinGroup puts the keeper into a control group of its own where that is
// possible; where not, the keeper alone proves.
func (p *Process) joinGroup() {
	if p.cfg.CgroupParent == "" {
		return
	}
	g := cgroup.New(p.cfg.CgroupRoot, path.Join(p.cfg.CgroupParent, strings.ToLower(rand.Text())))
	err := g.Create(api.BoxLimits{})
	if err == nil {
		err = g.Add(p.keeper.Process.Pid)
	}
	p.group = &g
	if err != nil {
		p.cfg.Logger.Debug("no control group for the agent", "error", err)
		p.removeGroup()
		p.group = nil
	}
}

// listen passes on what the keeper says until it has gone.
func (p *Process) listen(dec *json.Decoder) {
	defer close(p.final)
	told := false
	for {
		var r report
		if dec.Decode(&r) != nil {
			break
		}
		switch {
		case r.Exit != nil && !told:
			p.exit, told = *r.Exit, true
			close(p.exited)
		case r.Gone || r.Left != "":
			select {
			case p.final <- r:
			default:
			}
		}
	}
	_ = p.keeper.Wait()
	if !told {
		p.exit = Exit{Code: -1}
		close(p.exited)
	}
}

// PID is the agent's process number.
func (p *Process) PID() int { return p.pid }

// Exited is closed when the agent's own process has ended; others of its tree may
// go on until [Process.Stop].
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Exit is how the agent ended; it is valid once Exited is closed. Code -1 without
// a signal means that nobody saw its end.
func (p *Process) Exit() Exit {
	<-p.exited
	return p.exit
}

// ReadLine returns the next line of output without its end; the slice is valid
// until the next call. io.EOF comes when every process that held the output has
// let it go, or Stop has proven that the tree is gone and the rest was read. A line or an output beyond its bound is an exhausted error, after
// which there is no more.
func (p *Process) ReadLine() ([]byte, error) { return p.lines.next() }

// Write gives data to the agent's standard input and does not wait for it to be
// taken. More than Config.MaxPending untaken is an exhausted error. What a closed
// or dead agent no longer takes is dropped.
func (p *Process) Write(data []byte) error { return p.input.write(data) }

// CloseInput ends the agent's standard input after what was written.
func (p *Process) CloseInput() { p.input.end() }

// Stderr is the end of what the agent wrote there, redacted ([Redact]).
func (p *Process) Stderr() string { return Redact(p.tail.text(), p.cfg.Secrets...) }

// Stop ends the whole tree: SIGTERM, the grace time, SIGKILL, the time to be
// gone; then the group's kill, if there is a group. It always returns within the
// sum of these and a few seconds, takes no context, and cannot be interrupted;
// calling it again waits for the first call and returns its outcome. Output that
// was written before can still be read.
func (p *Process) Stop() Outcome {
	p.once.Do(func() { p.outcome = p.end() })
	return p.outcome
}

func (p *Process) end() Outcome {
	why := p.ask()
	if why != "" && p.group != nil {
		if err := p.killGroup(); err != nil {
			why += "; " + err.Error()
		} else {
			why = ""
		}
	}
	// Also tells a keeper that did not answer to end by itself.
	_ = p.control.Close()
	p.input.abort()
	if why != "" {
		p.cfg.Logger.Error("the end of a process tree is not proven", "pid", p.pid, "why", why)
		// Somebody may hold the other ends for ever.
		p.lines.abort()
		p.tail.abort()
		return Outcome{Why: why}
	}
	p.lines.f.finish()
	p.tail.f.finish()
	<-p.tail.done
	p.removeGroup()
	return Outcome{Confirmed: true}
}

// ask lets the keeper end the tree; it returns "" with the proof, else why there
// is none.
func (p *Process) ask() string {
	// Fails when the keeper is gone, which final tells too.
	_ = p.orders.Encode(order{Stop: true, Grace: p.cfg.Grace, KillWait: p.cfg.KillWait})
	t := time.NewTimer(p.cfg.Grace + p.cfg.KillWait + answerSlack)
	defer t.Stop()
	select {
	case r, ok := <-p.final:
		switch {
		case !ok:
			return "the keeper was killed, so nobody can prove what is left"
		case r.Left != "":
			return r.Left
		}
		for range p.final { // until the keeper has been waited for
		}
		return ""
	case <-t.C:
		return "the keeper does not answer"
	}
}

func (p *Process) killGroup() error {
	ctx, cancel := detached(p.cfg.KillWait)
	defer cancel()
	if err := p.group.Kill(ctx); err != nil {
		return err
	}
	some, err := p.group.Populated()
	if err == nil && some {
		err = errors.New("its control group is still populated")
	}
	if err != nil {
		return err
	}
	for range p.final { // the keeper was in the group too
	}
	return nil
}

func (p *Process) removeGroup() {
	if p.group == nil {
		return
	}
	ctx, cancel := detached(p.cfg.KillWait)
	defer cancel()
	if err := p.group.Remove(ctx); err != nil {
		p.cfg.Logger.Warn("a control group stays behind", "group", p.group.Path(), "error", err)
	}
}

// String names the process for the log, without its arguments.
func (p *Process) String() string { return fmt.Sprintf("%s[%d]", filepath.Base(p.cfg.Argv[0]), p.pid) }
