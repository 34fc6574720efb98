package demo

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// transcript is where what the agent wrote is kept inside the box, by tee and not
// by Stockade, to be compared with what came out.
const transcript = workspace + "/.transcript"

// deadTime is how long the server stays dead, so that the agent gets on without it.
const deadTime = 1500 * time.Millisecond

// teed runs a command line with its output going through tee. Codex wants its
// directory to be there.
func teed(line []string) []string {
	return append([]string{"sh", "-c", `mkdir -p "${CODEX_HOME:-$HOME}" && "$@" | tee ` + transcript, "sh"}, line...)
}

// agent lets the agent do the task, kills the server half-way, and compares.
func (s *story) agent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, taskTime)
	defer cancel()
	s.say.chapter("The agent at work, and the death of the server")
	req := client.OpenRequest{RequestID: "demo-agent"}
	switch s.cfg.Agent {
	case agentCodex:
		req.Argv = teed(codexLine(s.run.Models[0].BaseURL, s.model.scripted != nil))
	case agentClaude:
		req.Argv, req.Env = teed(claudeLine()), claudeEnv
	default:
		req.Argv, req.Stdin = teed([]string{"testagent"}), true
	}
	s.say.step("Starting %s in the box and giving it the task", s.cfg.Agent)
	p, err := s.task.Open(ctx, req)
	if err != nil {
		return err
	}
	s.say.note("handle %s", p.Handle())
	f := follow(ctx, p)
	defer f.stop()

	half := make(chan struct{})
	reached := sync.OnceFunc(func() { close(half) })
	ev := &events{say: s.say, spoke: func() {}, acted: func(int) {}}
	if s.cfg.Agent == agentTest { // in the middle of a sentence
		var acted, spoke int
		ev.acted = func(n int) { acted = n }
		ev.spoke = func() {
			if acted >= 2 {
				if spoke++; spoke > 260 { // beyond the first burst, which has 256 pieces
					reached()
				}
			}
		}
	} else { // while the model answers
		ev.acted = func(int) { reached() }
	}
	done := make(chan error, 1)
	go func() { done <- s.drive(ctx, p, f, ev) }()
	select {
	case <-half:
		if err := s.crash(ctx, p, f); err != nil {
			cancel()
			return errors.Join(err, <-done)
		}
		err = <-done
	case err = <-done:
		if err == nil {
			err = errdefs.New(errdefs.Internal, "the agent was done before half of it was")
		}
	}
	if err != nil {
		if text := f.errors(); text != "" {
			s.say.trouble("the agent's error output ends with:\n%s", text)
		}
		return err
	}
	return s.compare(ctx, p, f)
}

// drive talks to the agent until its output ends.
func (s *story) drive(ctx context.Context, p *client.Process, f *follower, ev *events) error {
	var err error
	var finished bool
	switch s.cfg.Agent {
	case agentCodex:
		c := &codex{ev: ev}
		err = driveLines(f, c.line)
		finished = c.done
	case agentClaude:
		c := &claude{ev: ev, titles: map[string]string{}}
		err = driveLines(f, c.line)
		finished = c.done
	default:
		err = driveACP(ctx, p.Stdin(ctx), f, task, ev)
		finished = err == nil
	}
	if err == nil && !finished {
		err = errdefs.New(errdefs.Internal, "%s ended without finishing its task", s.cfg.Agent)
	}
	return err
}

// crash kills the server and starts it again.
func (s *story) crash(ctx context.Context, p *client.Process, f *follower) error {
	_, before := f.read()
	pid := s.server.PID()
	s.say.step("Half-way. Killing the server with SIGKILL (pid %d)", pid)
	if err := s.server.Kill(); err != nil {
		return err
	}
	s.say.note("it is dead; nobody told the agent")
	timer := time.NewTimer(deadTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return errdefs.Wrap(context.Cause(ctx), errdefs.Unavailable, "the demo was ended")
	}
	s.say.step("Starting it again on the same state directory")
	if err := s.server.Start(ctx); err != nil {
		return err
	}
	info, err := s.settled(ctx, p, before)
	if err != nil {
		return err
	}
	if info.Handle != p.Handle() || info.RequestID != "demo-agent" {
		return errdefs.New(errdefs.Internal, "the server came back with another process: %s", info.Handle)
	}
	if !slices.Contains([]client.ProcessState{client.StateRunning, client.StateExited}, info.State) {
		return errdefs.New(errdefs.Internal, "the process is %s after the restart", info.State)
	}
	s.say.proven("pid %d has taken over: same handle, state %s, read on at byte %d of %d", s.server.PID(), info.State, before, info.Log.Next)
	if meanwhile := info.Log.Next - before; meanwhile > 0 {
		s.say.note("%s of that were written while no server was there", size(meanwhile))
	}
	return nil
}

// settled asks for the process until the server has heard of its log from the host
// program again, which takes it a moment after its start.
func (s *story) settled(ctx context.Context, p *client.Process, before int64) (client.ProcessInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		info, err := p.Get(ctx)
		if err != nil || info.Log.Next >= before {
			return info, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return info, errdefs.New(errdefs.Internal, "after its restart the server knows of %d bytes of output; %d were read before it", info.Log.Next, before)
		}
	}
}

// compare checks that what the agent wrote is what was read, and that it did its
// work.
func (s *story) compare(ctx context.Context, p *client.Process, f *follower) error {
	exit, err := p.Wait(ctx)
	if err != nil {
		return err
	}
	if exit.Kind != client.ExitExited || exit.Code == nil || *exit.Code != 0 {
		return errdefs.New(errdefs.Internal, "the agent's process %s", exitText(exit))
	}
	f.stop()
	if f.err != nil {
		return f.err
	}
	info, err := p.Get(ctx)
	if err != nil {
		return err
	}
	s.say.chapter("Was anything lost?")
	s.say.step("Digesting, inside the box, what the agent wrote")
	out, err := s.command(ctx, "digest", "sha256sum <"+transcript+" && wc -c <"+transcript)
	if err != nil {
		return err
	}
	fields := strings.Fields(out)
	if len(fields) != 3 {
		return errdefs.New(errdefs.Internal, "the digest in the box came out as %q", out)
	}
	written, err := strconv.ParseInt(fields[2], 10, 64)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "the size in the box came out as %q", fields[2])
	}
	read, _ := f.read()
	s.say.note("written  %s  %d bytes", fields[0], written)
	s.say.note("read     %s  %d bytes", f.digest(), read)
	if fields[0] != f.digest() || written != read || info.Log.Stdout != read {
		return errdefs.New(errdefs.Internal, "what the agent wrote is not what was read (%d written, %d recorded, %d read)", written, info.Log.Stdout, read)
	}
	s.say.proven("not one byte is missing, not one came twice, through the death of the server")

	s.say.step("Running the tests ourselves, in the same box")
	if out, err = s.command(ctx, "tests", "cat "+programFile+" >&2; sh "+testFile); err != nil {
		return err
	}
	if !strings.Contains(out, "all tests pass") {
		return errdefs.New(errdefs.Internal, "the tests said:\n%s", out)
	}
	s.say.proven("all tests pass: the agent has mended the program")
	return s.compareModel(ctx)
}

// compareModel checks what went over the gateway.
func (s *story) compareModel(ctx context.Context) error {
	if s.model == nil {
		return nil
	}
	s.say.step("Looking for the model's key where it must not be, and at what was counted")
	files, err := s.tenant.GetFiles(ctx, s.box.ID, "")
	if err != nil {
		return err
	}
	defer files.Close()
	key := s.model.key(s.cfg)
	n, err := searchTar(files, key)
	if err != nil {
		return err
	}
	p, err := s.task.Open(ctx, client.OpenRequest{RequestID: "demo-look",
		Argv: []string{"sh", "-c", "env; find /home/agent /tmp -type f -exec cat {} +"}})
	if err != nil {
		return err
	}
	f := follow(ctx, p)
	defer f.stop()
	found, err := contains(f, key)
	if err != nil {
		return err
	}
	if found {
		return errdefs.New(errdefs.Internal, "the key of the model is in the environment or the home directory of the run's processes")
	}
	s.say.proven("the key is in no file of the box (%d in the workspace) and in no environment it gives", n)
	if m := s.model.scripted; m != nil {
		turns := map[int]bool{}
		for _, r := range m.Requests() {
			if r.Refused {
				return errdefs.New(errdefs.Internal, "a request reached the model without the key")
			}
			if r.Turn >= 0 {
				turns[r.Turn] = true
			}
		}
		if want := len(modelScript()); len(turns) != want {
			return errdefs.New(errdefs.Internal, "the agent asked for %d of the %d turns of the script", len(turns), want)
		}
	}
	return nil
}

// key is the real key, which only the server and the demo know.
func (m *modelSource) key(cfg Config) string {
	if m.env != "" {
		return cfg.Env(m.env)
	}
	return m.secret
}

// searchTar returns how many files a tar stream holds, or an error if one of them
// holds the text.
func searchTar(r io.Reader, text string) (int, error) {
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		found, err := contains(tr, text)
		if err != nil {
			return n, err
		}
		if found {
			return n, errdefs.New(errdefs.Internal, "the key of the model is in %s", h.Name)
		}
	}
}

// contains reads to the end and reports whether the text was in it.
func contains(r io.Reader, text string) (bool, error) {
	buf := make([]byte, 0, 64<<10)
	found := false
	for {
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		found = found || bytes.Contains(buf, []byte(text))
		if tail := min(len(buf), len(text)-1); len(buf) == cap(buf) {
			buf = buf[:copy(buf, buf[len(buf)-tail:])]
		}
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return found, err
		}
	}
}
