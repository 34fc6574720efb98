// Package serverproc runs "stockade serve" as a child, and kills and starts it
// again on the same state directory and port: what the demo, the bench and the
// crash tests have in common.
package serverproc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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

// Config says how to run the server.
type Config struct {
	Exe      string   // the stockade program
	StateDir string   // made by the server; its log is written beside the ledger
	Listen   string   // "" takes a free loopback port, once
	Args     []string // more flags of serve
	Env      []string // beyond PATH and HOME; nothing else is inherited
}

// Server is one server process after another. It is for one goroutine.
type Server struct {
	cfg  Config
	url  string
	log  string
	cmd  *exec.Cmd
	done chan error // gets the result of Wait once
}

// startTime bounds a start; the slow part is the host program on a busy machine.
const startTime = time.Minute

// New chooses the port. It starts nothing.
func New(cfg Config) (*Server, error) {
	if cfg.Listen == "" {
		// A port that is free now, and while the server is away too: on an address of
		// its own, of the 16 million that loopback has, nobody else is given it.
		l, err := net.Listen("tcp4", fmt.Sprintf("127.%d.%d.%d:0", rand.N(256), rand.N(256), 1+rand.N(254)))
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "there is no free port: %v", err)
		}
		cfg.Listen = l.Addr().String()
		l.Close()
	}
	if err := os.MkdirAll(cfg.StateDir, 0o700); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the state directory cannot be made: %v", err)
	}
	return &Server{cfg: cfg, url: "http://" + cfg.Listen, log: filepath.Join(cfg.StateDir, "server.log")}, nil
}

// URL is the server's address, the same after every start.
func (s *Server) URL() string { return s.url }

// PID is the process id of the running server, 0 if none runs.
func (s *Server) PID() int {
	if s.cmd == nil {
		return 0
	}
	return s.cmd.Process.Pid
}

// Client returns a client with one of the state directory's keys: "admin" or
// "default".
func (s *Server) Client(key string) (*client.Client, error) {
	return client.New(client.Config{URL: s.url, KeyFile: filepath.Join(s.cfg.StateDir, key+".key")})
}

// Start starts the server and waits until it says that it is well.
func (s *Server) Start(ctx context.Context) error {
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the server's log cannot be opened: %v", err)
	}
	defer log.Close()
	s.cmd = exec.Command(s.cfg.Exe, append([]string{"serve", "--state-dir", s.cfg.StateDir, "--listen", s.cfg.Listen}, s.cfg.Args...)...)
	s.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + s.cfg.StateDir}, s.cfg.Env...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	// Ctrl-C is for whoever runs this, who then stops the server in order.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		s.cmd = nil
		return errdefs.Wrap(err, errdefs.Unavailable, "the server program cannot be started: %v", err)
	}
	s.done = make(chan error, 1)
	go func(cmd *exec.Cmd, done chan<- error) { done <- cmd.Wait() }(s.cmd, s.done)

	c, err := client.New(client.Config{URL: s.url, RetryFor: -1})
	if err != nil {
		return err
	}
	defer c.CloseIdle()
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		h, err := c.Health(ctx)
		if err == nil && h.Status == "ok" {
			return nil
		}
		select {
		case werr := <-s.done:
			s.cmd = nil
			return errdefs.New(errdefs.Unavailable, "the server ended while it started (%v):\n%s", werr, s.Tail()).
				WithNext("stockade doctor lists what the machine lacks")
		case <-ctx.Done():
			return errdefs.Wrap(errors.Join(ctx.Err(), err), errdefs.Unavailable, "the server did not come up:\n%s", s.Tail())
		case <-tick.C:
		}
	}
}

// Kill ends the server with SIGKILL and returns when it is gone.
func (s *Server) Kill() error {
	if s.cmd == nil {
		return nil
	}
	err := s.cmd.Process.Kill()
	<-s.done
	s.cmd = nil
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return errdefs.Wrap(err, errdefs.Internal, "the server could not be killed: %v", err)
	}
	return nil
}

// Stop ends the server politely, and by SIGKILL when ctx ends first. Stopping a
// server that does not run does nothing.
func (s *Server) Stop(ctx context.Context) error {
	if s == nil || s.cmd == nil {
		return nil
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM) // gone already is as good
	select {
	case err := <-s.done:
		s.cmd = nil
		if err != nil {
			return errdefs.Wrap(err, errdefs.Internal, "the server did not stop well (%v):\n%s", err, s.Tail())
		}
		return nil
	case <-ctx.Done():
		return errors.Join(errdefs.New(errdefs.Internal, "the server did not stop on SIGTERM:\n%s", s.Tail()), s.Kill())
	}
}

// Tail is the end of the server's log, indented.
func (s *Server) Tail() string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		return fmt.Sprintf("  (its log cannot be read: %v)", err)
	}
	lines := strings.Split(string(bytes.TrimSpace(b)), "\n")
	return "  " + strings.Join(lines[max(0, len(lines)-12):], "\n  ")
}
