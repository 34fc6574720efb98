package oci

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/go-runc"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Runtimes lists the names [FindRuntime] looks for, in this order.
func Runtimes() []string { return []string{"runc", "crun", "runsc"} }

// answerTime bounds how long a runtime may take to say its version. It takes
// 10 ms; a machine under load or a cold disk may need seconds.
const answerTime = 10 * time.Second

// Runtime is an OCI runtime of this machine.
type Runtime struct {
	Name    string // "runc", "crun", "runsc", or what its file is called
	Path    string // absolute
	Version string // such as "1.1.5"
	Manner  Manner // by what it calls itself
}

// String returns name and version, such as "runc 1.1.5".
func (r Runtime) String() string { return r.Name + " " + r.Version }

// FindRuntime finds a runtime by name on the PATH, or by absolute path. The
// empty name finds the first of [Runtimes] that answers. Errors are
// unavailable and say what to install.
func FindRuntime(name string) (Runtime, error) {
	names := Runtimes()
	if name != "" {
		names = []string{name}
	}
	var why []string
	for _, n := range names {
		r, err := probe(n)
		if err == nil {
			return r, nil
		}
		why = append(why, fmt.Sprintf("%s: %v", n, err))
	}
	return Runtime{}, errdefs.New(errdefs.Unavailable, "no OCI runtime works on this machine (%s)", strings.Join(why, "; ")).
		WithNext("install one: apt-get install runc")
}

func probe(name string) (Runtime, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return Runtime{}, errors.New("not on the PATH")
		}
		return Runtime{}, err
	}
	if path, err = filepath.Abs(path); err != nil {
		return Runtime{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return Runtime{}, fmt.Errorf("does not answer: %w", err)
	}
	kind, version := parseVersion(string(out))
	if version == "" {
		return Runtime{}, errors.New("does not say its version")
	}
	return Runtime{Name: filepath.Base(name), Path: path, Version: version, Manner: mannerOf(kind)}, nil
}

// parseVersion reads the first line: "runc version 1.1.5+ds1", "crun version
// 1.8.1", "runsc version release-20240101.0".
func parseVersion(out string) (kind, version string) {
	line, _, _ := strings.Cut(out, "\n")
	kind, rest, ok := strings.Cut(line, " version ")
	if words := strings.Fields(rest); ok && len(words) > 0 {
		return strings.TrimSpace(kind), words[0]
	}
	return "", ""
}

// RecursiveReadOnly reports whether the runtime can make a bind mount read-only
// together with everything mounted below it (the mount option "rro"). A runtime
// that does not list its features cannot.
func (r Runtime) RecursiveReadOnly(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	f, err := (&runc.Runc{Command: r.Path}).Features(ctx)
	return err == nil && slices.Contains(f.MountOptions, "rro")
}

// State is what a runtime knows of a container.
type State struct {
	Status string // creating, created, running, stopped
	Pid    int    // of the container's first process; 0 when stopped
}

// State asks for a container's state. An unknown container is not_found. root
// is the runtime's --root.
func (r Runtime) State(ctx context.Context, root, id string) (State, error) {
	c, err := r.client(root).State(ctx, id)
	if err != nil {
		return State{}, explain(err, id)
	}
	return State{Status: c.Status, Pid: c.Pid}, nil
}

// Kill signals the container's first process, or, with all, every process in
// its cgroup. An unknown or stopped container is not_found.
func (r Runtime) Kill(ctx context.Context, root, id string, sig syscall.Signal, all bool) error {
	return explain(r.client(root).Kill(ctx, id, int(sig), &runc.KillOpts{All: all}), id)
}

// Delete kills what is left of the container and deletes the runtime's record
// of it. An unknown container is not an error.
func (r Runtime) Delete(ctx context.Context, root, id string) error {
	err := explain(r.client(root).Delete(ctx, id, &runc.DeleteOpts{Force: true}), id)
	if errdefs.Is(err, errdefs.NotFound) {
		return nil
	}
	return err
}

func (r Runtime) client(root string) *runc.Runc {
	return &runc.Runc{Command: r.Path, Root: root, ExtraArgs: r.Manner.Flags}
}

func explain(err error, id string) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	// A runtime that cannot be started says nothing about the container, in words
	// that look alike.
	started := !strings.Contains(text, "fork/exec") && !strings.Contains(text, "executable file not found")
	for _, gone := range []string{"does not exist", "not running", "already finished", "/status`: No such file"} {
		if started && strings.Contains(text, gone) {
			return errdefs.Wrap(err, errdefs.NotFound, "the runtime knows no live container %s", id)
		}
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "the OCI runtime failed on container %s: %s", id, clip(text))
}

// clip bounds foreign text that goes into a message.
func clip(s string) string {
	const most = 512
	s = strings.ToValidUTF8(strings.TrimSpace(s), "?")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
