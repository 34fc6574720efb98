package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// serverProcess is "stockade serve", started, killed and started again on the
// same state directory and port.
type serverProcess struct {
	exe  string
	args []string
	env  []string
	url  string
	log  string // file with all it prints
	cmd  *exec.Cmd
	done chan error // gets the result of Wait once
}

func newServerProcess(s *story) (*serverProcess, error) {
	// A port that is free now; nobody else is told of it.
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "there is no free port")
	}
	addr := l.Addr().String()
	l.Close()
	p := &serverProcess{exe: s.cfg.Stockade, url: "http://" + addr, log: filepath.Join(s.dir, "server.log")}
	p.args = []string{"serve", "--state-dir", s.dir, "--listen", addr, "--log-level", "debug"}
	if s.cfg.HostBinary != "" {
		p.args = append(p.args, "--host-program", s.cfg.HostBinary)
	}
	if s.toolArg != "" {
		p.args = append(p.args, "--host-tools", s.toolArg)
	}
	// Nothing of the user's own settings: the demo shows the defaults.
	p.env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + s.dir}
	if s.model != nil {
		p.args = append(p.args, "--models", s.model.entry)
		if s.model.env != "" {
			p.env = append(p.env, s.model.env+"="+s.cfg.Env(s.model.env))
		}
	}
	return p, nil
}

// start starts it and waits until it says that it is well.
func (p *serverProcess) start(ctx context.Context) error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the server's log cannot be opened")
	}
	defer log.Close()
	p.cmd = exec.Command(p.exe, p.args...)
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = p.env, log, log
	// Ctrl-C is for the demo, which then stops the server in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		p.cmd = nil
		return errdefs.Wrap(err, errdefs.Unavailable, "the server program cannot be started: %v", err)
	}
	p.done = make(chan error, 1)
	go func(cmd *exec.Cmd, done chan<- error) { done <- cmd.Wait() }(p.cmd, p.done)

	c, err := client.New(client.Config{URL: p.url, RetryFor: -1})
	if err != nil {
		return err
	}
	defer c.CloseIdle()
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		h, err := c.Health(ctx)
		if err == nil && h.Status == "ok" {
			return nil
		}
		select {
		case werr := <-p.done:
			p.cmd = nil
			return errdefs.New(errdefs.Unavailable, "the server ended while it started (%v):\n%s", werr, p.tail()).
				WithNext("`stockade doctor` lists what the machine lacks")
		case <-ctx.Done():
			return errdefs.Wrap(errors.Join(ctx.Err(), err), errdefs.Unavailable, "the server did not come up:\n%s", p.tail())
		case <-tick.C:
		}
	}
}

func (p *serverProcess) pid() int { return p.cmd.Process.Pid }

// kill ends it with SIGKILL and returns when it is gone.
func (p *serverProcess) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "the server could not be killed")
	}
	<-p.done
	p.cmd = nil
	return nil
}

// stop ends it politely, then less so.
func (p *serverProcess) stop(ctx context.Context) error {
	if p == nil || p.cmd == nil {
		return nil
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // gone already is as good
	select {
	case err := <-p.done:
		p.cmd = nil
		if err != nil {
			return errdefs.Wrap(err, errdefs.Internal, "the server did not stop well (%v):\n%s", err, p.tail())
		}
		return nil
	case <-ctx.Done():
		return errors.Join(errdefs.New(errdefs.Internal, "the server did not stop on SIGTERM:\n%s", p.tail()), p.kill())
	}
}

// tail is the end of the server's log.
func (p *serverProcess) tail() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return fmt.Sprintf("(its log cannot be read: %v)", err)
	}
	lines := strings.Split(string(bytes.TrimSpace(b)), "\n")
	return "  " + strings.Join(lines[max(0, len(lines)-12):], "\n  ")
}
