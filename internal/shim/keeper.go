package shim

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/spool"
	"github.com/stockade-run/stockade/internal/wire"
)

// killPatience bounds one attempt to kill and look at a cgroup.
const killPatience = 5 * time.Second

// keeper is the owner of a process. The goroutine of loop alone owns the
// machine's state; everybody else sends events. Effects that can block are
// carried out by the goroutine of work, one after the other.
type keeper struct {
	dir    string
	cfg    Config
	id     identity
	log    *slog.Logger
	reap   *reaper
	spool  *spool.Writer
	input  *input
	cgroup cgroup.Group
	clock  clock
	timer  *timer
	null   uintptr // /dev/null
	events chan process.KeepEvent
	jobs   chan func()
	done   chan struct{} // closed when loop may end

	killQueued atomic.Bool // a kill waits for the worker

	mu      sync.Mutex
	view    wire.ProcState // without Stdin and Log until it has ended
	logEnd  bool           // the view's Rev counts the end of the log, or its failure
	changed chan struct{}  // closed at the next change of view
	initFD  int            // pidfd of the container's init, -1
	pending []syscall.Signal
	tty     int // the terminal's master, -1
	output  *pump
	reports *os.File
}

func newKeeper(dir string, cfg Config, id identity, log *slog.Logger) (*keeper, error) {
	k := &keeper{
		dir: dir, cfg: cfg, id: id, log: log, clock: newClock(), cgroup: cgroup.New(cfg.CgroupRoot, cfg.Cgroup),
		input:  newInput(cfg.Spec.Stdin || cfg.Spec.PTY != nil, cfg.Spec.PTY != nil),
		events: make(chan process.KeepEvent, 16),
		jobs:   make(chan func(), 16),
		done:   make(chan struct{}),
		view:   wire.ProcState{ID: cfg.Spec.ID, Box: cfg.Spec.Box, Rev: 1, Phase: wire.PhaseAccepted},
		initFD: -1, tty: -1,
	}
	k.changed = make(chan struct{})
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open /dev/null", err)
	}
	k.null = uintptr(null)
	if k.timer, err = newTimer(); err != nil {
		return nil, err
	}
	if k.spool, err = createSpool(dir, cfg); err != nil {
		return nil, err
	}
	return k, nil
}

// send hands an event to the machine. It never blocks for good.
func (k *keeper) send(ev process.KeepEvent) {
	select {
	case k.events <- ev:
	case <-k.done:
	}
}

// loop owns the machine's state from its beginning to the record of its end,
// and on until done.
func (k *keeper) loop() {
	st := process.NewKeep()
	recordFailure := ""
	for {
		var ev process.KeepEvent
		select {
		case ev = <-k.events:
		case <-k.done:
			return
		}
		var effects []process.KeepEffect
		st, effects = process.KeepStep(st, ev, k.clock.now())
		switch e := ev.(type) {
		case process.RecordFailed:
			recordFailure = e.Detail
		case process.Recorded:
			recordFailure = ""
		}
		k.publish(st, recordFailure)
		for _, e := range effects {
			k.carryOut(e)
		}
	}
}

// publish makes the state visible. Rev grows with every change that is more
// than progress of the streams.
func (k *keeper) publish(st process.KeepState, recordFailure string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	v := k.view
	if v.Phase == wire.PhaseEnded {
		return // what the record says, set by recorded
	}
	if st.Phase != wire.PhaseEnded {
		v.Phase = st.Phase
	}
	if !st.StartedAt.IsZero() {
		t := st.StartedAt
		v.Started = &t
	}
	switch {
	case recordFailure != "":
		v.Unproven = "the exit record cannot be written: " + recordFailure
	case st.Stage == process.StageKilled, st.Checked:
		v.Unproven = st.Unproven
	default:
		v.Unproven = ""
	}
	logEnd := st.Drained || st.LogDetail != ""
	if v.Phase != k.view.Phase || v.Unproven != k.view.Unproven || (v.Started == nil) != (k.view.Started == nil) || logEnd != k.logEnd {
		k.logEnd = logEnd
		v.Rev++
		k.setView(v)
	}
}

// setView replaces the view and wakes those who wait. The caller holds mu.
func (k *keeper) setView(v wire.ProcState) {
	k.view = v
	close(k.changed)
	k.changed = make(chan struct{})
}

// state returns what a caller may see, and a channel closed at its next change
// of Rev.
func (k *keeper) state() (wire.ProcState, <-chan struct{}) {
	k.mu.Lock()
	v, changed := k.view, k.changed
	k.mu.Unlock()
	if v.Phase != wire.PhaseEnded {
		v.Stdin, v.Log = k.input.state(), k.spool.State()
	}
	return v, changed
}

// carryOut does what the machine ordered, without blocking it.
func (k *keeper) carryOut(effect process.KeepEffect) {
	switch e := effect.(type) {
	case process.LaunchContainer:
		go k.launch()
	case process.SignalTree:
		if n, ok := process.SignalNumber(e.Signal); ok {
			k.signal(syscall.Signal(n))
		}
	case process.KillTree:
		k.killInit()
		// Ordered again and again while the tree does not die, and each time may take
		// killPatience: one that waits is enough.
		if !k.killQueued.Swap(true) {
			k.work(func() {
				k.killQueued.Store(false)
				k.kill()
			})
		}
	case process.LiftCap:
		k.lift()
	case process.ReadOOM:
		k.work(func() {
			n, err := k.cgroup.OOMKills()
			if err != nil {
				k.log.Warn("read the count of processes killed for memory", "error", err)
				n = 0
			}
			k.send(process.OOMRead{Kills: n})
		})
	case process.CheckEmpty:
		k.work(k.checkEmpty)
	case process.CutPipes:
		k.cutPipes()
	case process.ReadLease:
		k.work(func() { k.send(process.LeaseRead{Until: k.leaseUntil()}) })
	case process.ArmTimer:
		k.arm(e.At)
	case process.WriteExitRecord:
		st := k.exitState(e)
		k.work(func() { k.record(st) })
	}
}

// lift lets the log take what is left although it is at its cap, and no more: a
// descriptor of the outputs may have been passed out of the container, to somebody
// who goes on writing. Where the log drops the oldest instead of waiting nothing
// has to be lifted.
func (k *keeper) lift() {
	if p := k.pump(); p != nil && k.cfg.Spec.Overflow != api.OverflowDropOldest {
		k.spool.Lift(p.holds())
	}
}

// work queues a job for the worker. It does not block: of each kind of job the
// machine orders one, and the next only when that was answered, or see KillTree.
func (k *keeper) work(job func()) { k.jobs <- job }

// worker carries out the jobs.
func (k *keeper) worker() {
	for {
		select {
		case job := <-k.jobs:
			job()
		case <-k.done:
			return
		}
	}
}

// alarm turns the timer into ticks.
func (k *keeper) alarm() {
	for k.timer.wait() {
		k.send(process.Tick{})
	}
}

func (k *keeper) arm(at time.Time) {
	err := error(nil)
	if at.IsZero() {
		err = k.timer.disarm()
	} else {
		err = k.timer.arm(at.Sub(k.clock.now()))
	}
	if err != nil {
		k.log.Error("set the timer", "error", err)
	}
}

// begin returns the machine's first event.
func (k *keeper) begin() process.Begin {
	b := process.Begin{Deadline: time.Duration(k.cfg.Spec.DeadlineMillis) * time.Millisecond}
	if k.cfg.LeaseFile != "" {
		b.Lease = k.leaseUntil()
		if b.Lease.IsZero() {
			b.Lease = k.clock.now() // zero would be no lease at all
		}
	}
	return b
}

// leaseUntil reads the lease file; zero if it grants nothing.
func (k *keeper) leaseUntil() time.Time {
	left, err := leaseLeft(k.cfg.LeaseFile, k.id.BootID)
	if err != nil {
		k.log.Warn("read the lease", "error", err)
		return time.Time{}
	}
	return k.clock.now().Add(left)
}

func (k *keeper) checkEmpty() {
	populated, err := k.cgroup.Populated()
	switch {
	case err != nil:
		k.send(process.NotEmpty{Detail: "the cgroup cannot be read: " + err.Error()})
	case populated:
		k.send(process.NotEmpty{Detail: "processes are left in the cgroup " + k.cfg.Cgroup})
	default:
		k.send(process.Emptied{})
	}
}

// kill kills everything in the cgroup.
func (k *keeper) kill() {
	ctx, cancel := context.WithTimeout(context.Background(), killPatience)
	defer cancel()
	if err := k.cgroup.Kill(ctx); err != nil {
		k.log.Warn("kill the cgroup", "error", err)
	}
}

func (k *keeper) setInit(fd int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.initFD = fd
}

// maxPending bounds the signals that wait for a start.
const maxPending = 16

// signal hands a polite signal to init, which passes it on to the command's
// process group; see report.go. One that comes before there is an init waits.
func (k *keeper) signal(s syscall.Signal) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.reports == nil {
		if len(k.pending) < maxPending {
			k.pending = append(k.pending, s)
		}
		return
	}
	k.tell(byte(s))
}

// tell writes one byte to init. The caller holds mu.
func (k *keeper) tell(b byte) {
	// Only an init that is stopped leaves the socket full.
	_ = k.reports.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = k.reports.Write([]byte{b})
}

// allow gives init one of the allowances it waits for on a terminal.
func (k *keeper) allow() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tell(goByte)
}

// killInit sends SIGKILL to the container's init, which takes its whole PID
// namespace along.
func (k *keeper) killInit() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.initFD >= 0 {
		_ = unix.PidfdSendSignal(k.initFD, unix.SIGKILL, nil, 0)
	}
}

func (k *keeper) setTerminal(fd int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tty = fd
}

func (k *keeper) setPump(p *pump) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.output = p
}

func (k *keeper) pump() *pump {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.output
}

func (k *keeper) setReport(f *os.File) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reports = f
	for _, s := range k.pending {
		k.tell(byte(s))
	}
	k.pending = nil
}

func (k *keeper) report() *os.File {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.reports
}

// resize sets the terminal's size.
func (k *keeper) resize(size api.Winsize) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.cfg.Spec.PTY == nil:
		return errdefs.New(errdefs.Conflict, "the process has no terminal").WithNext("open it with a pty")
	case k.tty < 0:
		return errdefs.New(errdefs.Conflict, "the process has no terminal now: it has not started or has ended")
	}
	if err := setSize(k.tty, size); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "set the terminal's size: %v", err)
	}
	return nil
}

// cutPipes stops reading what something outside the container holds open.
func (k *keeper) cutPipes() {
	if p := k.pump(); p != nil {
		p.cut()
	}
	if f := k.report(); f != nil {
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
}

// finishLog ends the log; it is called once.
func (k *keeper) finishLog(detail string) {
	if err := k.spool.Finish(); err != nil && detail == "" && k.spool.State().Failure == "" {
		detail = err.Error()
	}
	k.send(process.Drained{Detail: detail})
}

// exitState makes the state that the exit record keeps.
func (k *keeper) exitState(e process.WriteExitRecord) wire.ProcState {
	k.input.end()
	st, _ := k.state()
	st.Rev++
	st.Phase = wire.PhaseEnded
	if !e.Started.IsZero() {
		st.Started = &e.Started
	}
	st.Ended = &e.Ended
	e.Exit.Detail = clip(e.Exit.Detail, reportText)
	st.Exit = &e.Exit
	st.Unproven, st.Log.Failure = clip(e.Unproven, reportText), clip(st.Log.Failure, reportText)
	if e.Method != "" {
		st.Proof = &wire.Proof{Method: e.Method, BootID: k.id.BootID, Container: k.cfg.Container, Cgroup: k.cfg.Cgroup, EmptyAt: e.EmptyAt}
	}
	return st
}

// record removes the container and writes the exit record.
func (k *keeper) record(st wire.ProcState) {
	if st.Proof == nil || st.Proof.Method != "never_started" {
		k.deleteContainer()
	}
	if err := WriteExit(k.dir, st); err != nil {
		k.log.Error("write the exit record", "error", err)
		k.send(process.RecordFailed{Detail: err.Error()})
		return
	}
	k.mu.Lock()
	st.Rev = max(st.Rev, k.view.Rev+1)
	k.setView(st)
	k.mu.Unlock()
	k.send(process.Recorded{})
}
