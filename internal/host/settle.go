package host

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

// settledRev is the Rev of a state that the host wrote because the shim died. A
// shim counts its own changes from 1 and never comes near, so the state is newer
// than any the shim told.
const settledRev = uint64(1) << 32

// proofTime bounds one attempt to prove a tree empty. It takes milliseconds; the
// bound is for a process that the kernel cannot end, such as one in an
// uninterruptible wait.
const proofTime = 10 * time.Second

// settle ends a process whose shim died without a readable exit record: what is
// left of the tree is killed, its emptiness is proven by the cgroup, and the exit
// is recorded as unknown, because nobody waited for it (P3).
func (p *proc) settle(ctx context.Context, found finding) error {
	buryShim(ctx, p.dir)
	st := p.withPhase(wire.PhaseStopping)
	st.Exit, st.Proof, st.Unproven = nil, nil, ""
	p.publish(st)
	detail := "its keeper died; what was left of the process was killed"
	switch {
	case found == foundDamaged:
		detail = "its exit record is damaged"
	case p.text == nil:
		detail = "its record on the host is damaged; it was not started again"
	}
	proof, why := p.proveEmpty(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	now := time.Now().UTC()
	st.Phase, st.Rev, st.Ended = wire.PhaseEnded, settledRev, &now
	st.Exit = &api.Exit{Kind: api.ExitUnknown, Detail: detail}
	st.Proof, st.Unproven = proof, why
	if found == foundDamaged {
		// Kept for whoever wants to know, out of the way of the new one.
		if err := os.Rename(filepath.Join(p.dir, exitFile), filepath.Join(p.dir, damagedExit)); err != nil && !notExist(err) {
			return diskError(err, "move a damaged exit record away")
		}
	}
	var err error
	if st.Log, err = diskLog(p.dir, st.Log); err != nil {
		st.Log.Failure = "the log is damaged: " + message(err)
	}
	st.Log.EOF, st.Log.Blocked = true, false
	return shim.WriteExit(p.dir, st)
}

// prove tries again to prove an ended process gone. Success changes the exit
// record, and the next look finds it.
func (p *proc) prove(ctx context.Context, st wire.ProcState) error {
	proof, why := p.proveEmpty(ctx)
	if proof == nil {
		return errdefs.New(errdefs.Indeterminate, "the tree of %s is not proven gone: %s", p.id, why)
	}
	st.Proof, st.Unproven = proof, ""
	st.Rev = max(st.Rev, settledRev) + 1
	return shim.WriteExit(p.dir, st)
}

// proveEmpty kills what is left of the process's tree until the kernel says that
// it is empty. It returns the proof, or why there is none.
func (p *proc) proveEmpty(ctx context.Context) (*wire.Proof, string) {
	proof := &wire.Proof{BootID: p.reg.boot}
	keep, err := readKeep(p.dir)
	// The boot of the start itself, if it is known, is better than that of the last
	// shim, whose file a power cut may take.
	boot := cmp.Or(shim.TriedIn(p.dir), lastKeeper(p.dir).BootID)
	if boot != "" && boot != p.reg.boot {
		proof.Method, proof.Container, proof.Cgroup = "reboot", keep.Container, keep.Cgroup
		proof.EmptyAt = time.Now().UTC()
		p.sweep(ctx, keep)
		return proof, ""
	}
	if err != nil {
		if tried, terr := shim.Tried(p.dir); terr == nil && !tried {
			proof.Method, proof.EmptyAt = "never_started", time.Now().UTC()
			return proof, ""
		}
		return nil, "which container it ran in cannot be told: " + keepFile + " is damaged"
	}
	proof.Method, proof.Container, proof.Cgroup = "cgroup", keep.Container, keep.Cgroup
	ctx, cancel := context.WithTimeout(ctx, proofTime)
	defer cancel()
	why := "it was not looked at"
	for wait := firstPause; ; wait = min(2*wait, time.Second) {
		if why = p.killTree(ctx, keep); why == "" {
			proof.EmptyAt = time.Now().UTC()
			p.sweep(ctx, keep)
			return proof, ""
		}
		if ctx.Err() != nil {
			return nil, why
		}
		pause(ctx, wait)
	}
}

// killTree kills once and looks. It returns "" when the tree is empty for good:
// the runtime, which could still put something there, is dead as well.
func (p *proc) killTree(ctx context.Context, keep shim.Config) string {
	// First the runtime's own processes: one that outlived the shim in the middle
	// of a start would otherwise bring the container up behind our back.
	if err := killRuntimes(keep); err != nil {
		return "the runtime's processes could not be looked at: " + err.Error()
	}
	group := cgroup.New(keep.CgroupRoot, keep.Cgroup)
	if err := group.Kill(ctx); err != nil {
		return "its control group could not be killed: " + message(err)
	}
	if err := runtimeOf(keep).Delete(ctx, keep.RuntimeRoot, keep.Container); err != nil {
		p.reg.log.Warn("the runtime did not delete a container", "proc", p.id, "error", err)
	}
	busy, err := group.Populated()
	switch {
	case err != nil:
		return "its control group could not be looked at: " + message(err)
	case busy:
		return "processes are left in its control group " + keep.Cgroup
	}
	return ""
}

// sweep removes what an empty tree leaves behind. It is not part of the proof.
func (p *proc) sweep(ctx context.Context, keep shim.Config) {
	if keep.Container == "" || keep.Cgroup == "" {
		return
	}
	if err := runtimeOf(keep).Delete(ctx, keep.RuntimeRoot, keep.Container); err != nil {
		p.reg.log.Warn("the runtime did not delete a container", "proc", p.id, "error", err)
	}
	if err := cgroup.New(keep.CgroupRoot, keep.Cgroup).Remove(ctx); err != nil {
		p.reg.log.Warn("a control group was not removed", "proc", p.id, "error", err)
	}
}

// runtimeOf is the runtime that started a process, which may be another than the
// one that is used now.
func runtimeOf(keep shim.Config) oci.Runtime {
	return oci.Runtime{Path: keep.Runtime, Manner: keep.Manner}
}

// killRuntimes ends every process that runs the runtime for this container, or is
// about to (oci.JoinMain): its command line names the runtime and holds both
// the runtime's root and the container's id, which nobody else's does.
func killRuntimes(keep shim.Config) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if !runs(pid, keep) {
			continue
		}
		// A PID file descriptor, so that a PID used again is not hit.
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // gone
		}
		if runs(pid, keep) {
			if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				errs = append(errs, fmt.Errorf("kill %d: %w", pid, err))
			} else if err := awaitExit(fd); err != nil {
				errs = append(errs, fmt.Errorf("await the end of %d: %w", pid, err))
			}
		}
		unix.Close(fd)
	}
	return errors.Join(errs...)
}

// awaitExit waits a short while for a killed process to be gone.
func awaitExit(pidfd int) error {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 2000)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 0 {
			err = errors.New("it is still there 2 s after SIGKILL")
		}
		return err
	}
}

func runs(pid int, keep shim.Config) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return false
	}
	args := bytes.Split(bytes.TrimSuffix(b, []byte{0}), []byte{0})
	var name, root, id bool
	for _, a := range args {
		name = name || filepath.Base(string(a)) == filepath.Base(keep.Runtime)
		root = root || string(a) == keep.RuntimeRoot || string(a) == "--root="+keep.RuntimeRoot
		id = id || string(a) == keep.Container
	}
	return name && root && id
}
