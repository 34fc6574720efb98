package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// tools prepares the directory that the box sees with the agent in it.
func (s *story) tools(ctx context.Context) error {
	if s.cfg.Agent == agentTest {
		exe := s.cfg.TestAgent
		if exe == "" {
			exe = filepath.Join(filepath.Dir(s.cfg.Stockade), "testagent")
		}
		dir := filepath.Join(s.dir, "tools")
		if err := copyProgram(exe, filepath.Join(dir, "bin", "testagent")); err != nil {
			return errdefs.Wrap(err, errdefs.Unavailable, "the agent's program %s cannot be used: %v", exe, err).WithNext("build it with `make build`")
		}
		s.toolArg = "testagent=" + dir
		return nil
	}
	dir := s.cfg.AgentsDir
	if dir == "" {
		root, err := FindCheckout("")
		if err != nil {
			return err
		}
		if dir, err = InstallAgents(ctx, root, s.cfg.Out); err != nil {
			return err
		}
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "the directory of the agents cannot be used")
	}
	if _, err := os.Stat(filepath.Join(dir, "node_modules/.bin", s.cfg.Agent)); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "there is no %s in %s/node_modules/.bin", s.cfg.Agent, dir)
	}
	s.toolArg = "agents=" + dir
	return nil
}

func copyProgram(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}

// agentsSource is where the checkout keeps the pinned versions of the vendors'
// CLIs, agentsCache where they are installed.
const (
	agentsSource = "testdata/agents"
	agentsCache  = ".cache/agents"
)

// FindCheckout returns the checkout that dir (empty: the working directory) is in,
// told by its pinned agents.
func FindCheckout(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Invalid, "the working directory is not known")
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, agentsSource, "package-lock.json")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", errdefs.New(errdefs.NotFound, "the vendors' CLIs are installed into a checkout of this repository, and %s is in none", dir).
				WithNext("run the demo in one, or name a directory with node_modules/.bin by --agents-dir")
		}
	}
}

// AgentsInstalled returns the directory with the vendors' CLIs of a checkout and
// whether what is in it is what the lock file asks for.
func AgentsInstalled(root string) (dir string, ok bool) {
	dir = filepath.Join(root, agentsCache)
	want, err := os.ReadFile(filepath.Join(root, agentsSource, "package-lock.json"))
	if err != nil {
		return dir, false
	}
	lock := filepath.Join(dir, "package-lock.json")
	have, err := os.ReadFile(lock)
	if err != nil || !bytes.Equal(want, have) {
		return dir, false
	}
	began, err1 := os.Stat(lock)
	ended, err2 := os.Stat(filepath.Join(dir, doneFile))
	return dir, err1 == nil && err2 == nil && !ended.ModTime().Before(began.ModTime())
}

// doneFile is written when an installation is complete, after the copy of the lock
// file that it began with. scripts/setup.sh does the same.
const doneFile = ".installed"

// InstallAgents installs the vendors' CLIs of a checkout unless they are there,
// saying on out what it does, and returns their directory. It needs npm and about
// 920 MB.
func InstallAgents(ctx context.Context, root string, out io.Writer) (string, error) {
	dir, ok := AgentsInstalled(root)
	if ok {
		return dir, nil
	}
	npm, err := exec.LookPath("npm")
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "installing the vendors' CLIs needs npm, which is not here").WithNext("make setup-agents")
	}
	fmt.Fprintf(out, "Installing the vendors' CLIs with npm, exactly as %s/package-lock.json pins them,\ninto %s (about 920 MB; git ignores it) …\n", agentsSource, dir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be made", dir)
	}
	for _, name := range []string{"package.json", "package-lock.json", ".npmrc"} {
		b, err := os.ReadFile(filepath.Join(root, agentsSource, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o644)
		}
		if err != nil {
			return "", errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be copied", name)
		}
	}
	// No package's script runs by itself; the one that is needed, which puts Claude
	// Code's program in its place, is run by name.
	for _, line := range [][]string{
		{npm, "ci", "--ignore-scripts", "--prefix", dir},
		{"node", filepath.Join(dir, "node_modules/@anthropic-ai/claude-code/install.cjs")},
	} {
		cmd := exec.CommandContext(ctx, line[0], line[1:]...)
		cmd.Dir = dir
		if text, err := cmd.CombinedOutput(); err != nil {
			return "", errdefs.Wrap(err, errdefs.Unavailable, "%s failed (%v):\n%s", filepath.Base(line[0]), err, text)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, doneFile), nil, 0o644); err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "the installation cannot be recorded")
	}
	return dir, nil
}
