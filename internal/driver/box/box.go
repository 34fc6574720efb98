// Package box is the driver for the host program of this machine: it starts
// stockade-host detached from the server, finds it again through its socket and
// lock, and replaces one of another version or with other options while the
// processes go on.
package box

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

// Kind is the kind of target this driver serves.
const Kind = "box"

// LogFile is where, in the host's directory, the host program's log goes.
const LogFile = "host.log"

const (
	// startTime bounds a start of the host program: it answers after some 20 ms,
	// plus up to 3 s for looking at thousands of processes.
	startTime = 30 * time.Second
	// stopTime bounds its end.
	stopTime = 20 * time.Second
	// maxLog is the size at which the log is begun anew at a start; the last one is kept.
	maxLog = 8 << 20
)

// Config says which host program to run where.
type Config struct {
	// HostExe is the stockade-host program. Required, absolute.
	HostExe string
	// Dir is its directory. Required, absolute.
	Dir string
	// Args are more options of `stockade-host serve`.
	Args []string
	// Logger may be nil.
	Logger *slog.Logger
}

// Driver implements driver.Driver and driver.Stopper.
type Driver struct {
	cfg Config
	log *slog.Logger

	mu    sync.Mutex // one Ensure or Stop at a time in this process
	child int        // pid of the host program this process started last, 0 if none or waited for
}

// New makes the driver. Nothing is started before Ensure.
func New(cfg Config) *Driver {
	d := &Driver{cfg: cfg, log: cfg.Logger}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	return d
}

// Kind returns [Kind].
func (d *Driver) Kind() string { return Kind }

// Dial connects to the host program's socket.
func (d *Driver) Dial(ctx context.Context) (net.Conn, error) {
	conn, err := shim.DialUnix(ctx, filepath.Join(d.cfg.Dir, host.SocketFile))
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the host program of this machine does not answer").
			WithNext("it is started again by itself; its log is %s", filepath.Join(d.cfg.Dir, LogFile))
	}
	return conn, nil
}

// Ensure makes a host program of this very file and these options answer. One
// that runs another file or has other options is told to make room; the
// processes stay. Any number of Ensure, in any number of programs, lead to one
// host program: the host's lock decides.
func (d *Driver) Ensure(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	digest, err := d.digest()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		info, err := d.info(ctx)
		if err == nil && info.Digest == digest {
			return nil
		}
		if err == nil {
			d.log.Info("replacing the host program", "old", info.Version, "host", info.HostID)
			if err := d.shutdown(ctx, true); err != nil {
				return err
			}
		} else if !errdefs.Is(err, errdefs.Unavailable) {
			return err // something answers that is no host program of ours
		}
		if err := d.start(ctx, digest); err != nil {
			return err
		}
	}
}

// Stop ends the host program; conflict, and nothing changes, while a process
// lives there. One that does not run is stopped already.
func (d *Driver) Stop(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.shutdown(ctx, false)
}

func (d *Driver) info(ctx context.Context) (wire.HostInfo, error) {
	c := host.NewClient(d.Dial, 0)
	defer c.CloseIdle()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return c.Info(ctx)
}

// shutdown ends the host program that runs, if any, and returns when it is gone.
func (d *Driver) shutdown(ctx context.Context, keep bool) error {
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	generation, err := d.generation()
	if err != nil {
		return err
	}
	c := host.NewClient(d.Dial, generation)
	defer c.CloseIdle()
	// A connection that breaks may be the host going before its answer came: what
	// counts is the lock.
	if err := c.Shutdown(ctx, keep); err != nil && host.Refused(err) {
		return err
	}
	for {
		held, err := host.Locked(d.cfg.Dir)
		if err != nil {
			return err
		}
		if !held {
			d.end()
			return nil
		}
		if !pause(ctx) {
			return errdefs.New(errdefs.Unavailable, "the host program was asked to end and still runs").
				WithNext("look at %s", filepath.Join(d.cfg.Dir, LogFile))
		}
	}
}

// generation reads the highest generation the host obeys. This driver acts for
// the machine, not for one server: the server's lock on its state directory has
// decided who may.
func (d *Driver) generation() (int64, error) {
	b, err := os.ReadFile(filepath.Join(d.cfg.Dir, host.GenerationFile))
	if errors.Is(err, fs.ErrNotExist) {
		return 1, nil
	}
	if err == nil {
		var n int64
		if n, err = strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil && n > 0 {
			return n, nil
		}
	}
	return 0, errdefs.Wrap(err, errdefs.Unavailable, "the host's generation cannot be read").
		WithNext("look at %s", filepath.Join(d.cfg.Dir, host.GenerationFile))
}

// start runs the host program and returns when it answers, or when another one
// turned out to be there.
func (d *Driver) start(ctx context.Context, digest string) error {
	d.reap()
	if err := os.MkdirAll(d.cfg.Dir, 0o700); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the host's directory cannot be made: %v", err)
	}
	log, err := d.openLog()
	if err != nil {
		return err
	}
	defer log.Close()
	from, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the host's log cannot be written: %v", err)
	}
	cmd := exec.Command(d.cfg.HostExe, append([]string{"serve", "--dir", d.cfg.Dir, "--digest", digest}, d.cfg.Args...)...)
	cmd.Dir = "/"
	// Nothing of the server's environment reaches the machine's programs (P9).
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the host program %s cannot be started: %v", d.cfg.HostExe, err).
			WithNext("build or install stockade-host there")
	}
	d.child = cmd.Process.Pid
	_ = cmd.Process.Release() // it outlives this process; reap collects it if it ends before
	busy := false
	for {
		if _, err := d.info(ctx); err == nil {
			return nil
		}
		if busy { // another one has the directory: wait for its answer, as long as it lives
			if held, err := host.Locked(d.cfg.Dir); err != nil || !held {
				return err
			}
		}
		switch status, ended := d.reap(); {
		case ended && status.ExitStatus() == host.ExitBusy:
			busy = true
		case ended:
			return errdefs.New(errdefs.Unavailable, "the host program ended at once: %s", tail(log, from)).
				WithNext("see %s", filepath.Join(d.cfg.Dir, LogFile))
		}
		if !pause(ctx) {
			return errdefs.New(errdefs.Unavailable, "the host program was started and does not answer").
				WithNext("see %s", filepath.Join(d.cfg.Dir, LogFile))
		}
	}
}

// reap collects the host program this process started, if it has ended.
func (d *Driver) reap() (syscall.WaitStatus, bool) {
	if d.child == 0 {
		return 0, false
	}
	var status syscall.WaitStatus
	pid, err := syscall.Wait4(d.child, &status, syscall.WNOHANG, nil)
	if pid == d.child || errors.Is(err, syscall.ECHILD) {
		d.child = 0
		return status, pid > 0
	}
	return 0, false
}

// end is called when nobody holds the host's lock: what this process started has
// let go of it and exits, or was too slow to take it and must not do so now.
func (d *Driver) end() {
	if _, ended := d.reap(); ended || d.child == 0 {
		return
	}
	_ = syscall.Kill(d.child, syscall.SIGKILL) // our child, not waited for: the number is still its own
	for {
		if _, err := syscall.Wait4(d.child, nil, 0, nil); err != syscall.EINTR {
			d.child = 0
			return
		}
	}
}

func (d *Driver) openLog() (*os.File, error) {
	path := filepath.Join(d.cfg.Dir, LogFile)
	if info, err := os.Stat(path); err == nil && info.Size() > maxLog {
		_ = os.Rename(path, path+".1")
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the host's log cannot be written: %v", err)
	}
	return f, nil
}

// tail returns the error in the last line the host program logged, or the line.
func tail(log *os.File, from int64) string {
	b := make([]byte, 64<<10)
	n, _ := log.ReadAt(b, from)
	lines := strings.Split(strings.TrimSpace(string(b[:n])), "\n")
	last := strings.ToValidUTF8(lines[len(lines)-1], "?")
	if last == "" {
		return "it said nothing"
	}
	if _, text, ok := strings.Cut(last, " error="); ok { // slog's, the last attribute
		last = text
		if plain, err := strconv.Unquote(text); err == nil {
			last = plain
		}
	}
	return last[:min(len(last), 1024)]
}

// digest names the program file's content and the options.
func (d *Driver) digest() (string, error) {
	if !filepath.IsAbs(d.cfg.HostExe) || !filepath.IsAbs(d.cfg.Dir) {
		return "", errdefs.New(errdefs.Invalid, "the host program and its directory must be absolute paths")
	}
	f, err := os.Open(d.cfg.HostExe)
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "the host program cannot be read: %v", err).
			WithNext("build or install stockade-host at %s", d.cfg.HostExe)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "the host program cannot be read: %v", err)
	}
	for _, a := range d.cfg.Args {
		fmt.Fprintf(h, "%d %s", len(a), a)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// pause waits a moment between two looks; false when ctx ended.
func pause(ctx context.Context) bool {
	t := time.NewTimer(5 * time.Millisecond)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
