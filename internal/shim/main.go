package shim

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/spool"
	"github.com/stockade-run/stockade/internal/wire"
)

// Exit codes of Main. They are for people who read a log; Start gets the reason
// in words.
const (
	exitOK     = 0 // forgotten
	exitFailed = 1
	exitBusy   = 3 // another shim keeps this directory
	exitSpent  = 4 // the process was started before, and must never be again
)

// Main is the body of `stockade-host shim --dir DIR`: it keeps the process of
// one directory until the host program forgets it. It returns the exit code.
func Main(dir string) int {
	tune()
	unix.Umask(0o022) // for the runtime; what is private here says so itself
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	ready := readyFromEnv()
	code, err := run(dir, log, ready)
	if err != nil {
		log.Error("shim", "error", err)
		ready.fail(err)
	}
	return code
}

func run(dir string, log *slog.Logger, ready *readiness) (int, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return exitFailed, err
	}
	if err := os.Chdir("/"); err != nil {
		return exitFailed, err
	}
	held, err := lock(dir)
	if err != nil {
		if errdefs.Is(err, errdefs.Conflict) {
			return exitBusy, err
		}
		return exitFailed, err
	}
	defer held.Close()
	cfg, err := readConfig(dir)
	if err != nil {
		return exitFailed, err
	}
	if err := fresh(dir); err != nil {
		return exitSpent, err
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return exitFailed, fmt.Errorf("become subreaper: %w", err)
	}
	id, err := self()
	if err != nil {
		return exitFailed, err
	}
	k, err := newKeeper(dir, cfg, id, log)
	if err != nil {
		return exitFailed, err
	}
	if err := writeIdentity(dir, id); err != nil {
		return exitFailed, err
	}
	l, err := ListenUnix(filepath.Join(dir, socketFile))
	if err != nil {
		return exitFailed, err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT)
	k.reap = newReaper()
	srv := newServer(k)
	go k.loop()
	go k.worker()
	go k.alarm()
	go func() {
		if err := srv.http.Serve(limit(l, maxConns)); !errors.Is(err, http.ErrServerClosed) {
			log.Error("serve", "error", err)
		}
	}()
	k.send(k.begin())
	ready.ok()
	return k.linger(held, stop, srv)
}

// fresh refuses a directory whose process was started or has ended before (P1).
func fresh(dir string) error {
	if tried, err := Tried(dir); err != nil || tried {
		return errors.Join(err, errdefs.New(errdefs.Conflict, "the process of %s was started before; it is never started again", filepath.Base(dir)))
	}
	if _, err := os.Lstat(filepath.Join(dir, exitFile)); !errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(errdefs.Conflict, "the process of %s has an exit record; it is never started again", filepath.Base(dir))
	}
	return nil
}

// createSpool begins the log. Nothing was started from this directory yet, so
// that what an earlier shim may have left there holds no output.
func createSpool(dir string, cfg Config) (*spool.Writer, error) {
	path := filepath.Join(dir, spoolDir)
	if err := os.RemoveAll(path); err != nil {
		return nil, err
	}
	return spool.Create(spool.Config{Dir: path, Cap: cfg.Spec.SpoolBytes, SegmentBytes: cfg.SegmentBytes, Overflow: cfg.Spec.Overflow})
}

// lookEvery is how often a shim looks whether its directory is still there, and
// whether it has memory to give back.
const lookEvery = 30 * time.Second

// linger serves until the process has ended and is forgotten, or its directory
// is gone, or the machine ends.
func (k *keeper) linger(held *os.File, stop <-chan os.Signal, srv *server) (int, error) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	missing := 0
	stopped := false
	var mem memory
	for {
		st, changed := k.state()
		if stopped && st.Phase == wire.PhaseEnded {
			return exitOK, nil // the record says all there is to say
		}
		select {
		case <-changed:
		case <-srv.forgotten:
			srv.shutdown()
			return exitOK, nil
		case <-stop:
			stopped = true
			k.send(process.KeepClose{Reason: "its shim was told to end (SIGTERM)", Grace: process.KeepGrace})
		case <-look.C:
			mem.trim()
			var file unix.Stat_t
			if err := unix.Fstat(int(held.Fd()), &file); err != nil || file.Nlink > 0 {
				continue
			}
			if st.Phase == wire.PhaseEnded {
				return exitOK, nil
			}
			// The record of this process was removed under it; nothing can be kept any
			// more, so nothing may go on.
			if missing++; missing > 2 {
				k.kill()
				return exitFailed, errors.New("the process directory is gone")
			}
			k.send(process.KeepClose{Reason: "its directory on the host is gone"})
		}
	}
}

// readiness is how a starting shim answers Start: one line on an inherited pipe.
type readiness struct{ f *os.File }

// readyEnv names the descriptor of that pipe.
const readyEnv = "STOCKADE_SHIM_READY"

func readyFromEnv() *readiness {
	if os.Getenv(readyEnv) != "3" {
		return &readiness{}
	}
	os.Unsetenv(readyEnv)
	unix.CloseOnExec(3)
	return &readiness{os.NewFile(3, "ready")}
}

const readyLine = "ready\n"

func (r *readiness) ok() { r.say(readyLine) }

func (r *readiness) fail(err error) { r.say("failed: " + strings.TrimSpace(err.Error()) + "\n") }

func (r *readiness) say(line string) {
	if r.f != nil {
		_, _ = r.f.WriteString(line)
		r.f.Close()
		r.f = nil
	}
}
