package shim

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestExitCodes(t *testing.T) { each(t, exitCodes) }

func exitCodes(t *over) {
	t.Parallel()
	for _, c := range []struct {
		script string
		kind   api.ExitKind
		code   int
		signal string
	}{
		{"exit 0", api.ExitExited, 0, ""},
		{"exit 7", api.ExitExited, 7, ""},
		{"exit 127", api.ExitExited, 127, ""},
		{"exit 137", api.ExitExited, 137, ""},
		{"exit 255", api.ExitExited, 255, ""},
		{"kill -SEGV $$", api.ExitSignalled, 0, "SIGSEGV"},
		{"kill -KILL $$", api.ExitSignalled, 0, "SIGKILL"},
		{"kill -TERM $$", api.ExitSignalled, 0, "SIGTERM"},
		{"kill -40 $$", api.ExitSignalled, 0, "SIG40"},
	} {
		t.Run(c.script, func(t *over) {
			t.Parallel()
			p := newProc(t, sh("echo out; echo err >&2; "+c.script)).start()
			st := p.quiescent()
			p.wantExit(st, c.kind, c.code, c.signal)
			if st.Proof.Method != "pid_namespace" {
				t.Errorf("proof %+v", st.Proof)
			}
			out, errs := p.output()
			if string(out) != "out\n" || string(errs) != "err\n" {
				t.Errorf("output %q %q", out, errs)
			}
		})
	}
}

// A command that cannot be started ends as spawn_failed and says why.
func TestSpawnFailures(t *testing.T) { each(t, spawnFailures) }

func spawnFailures(t *over) {
	t.Parallel()
	for name, c := range map[string]struct {
		argv   []string
		opts   []option
		detail string
	}{
		"missing":          {[]string{"no-such-command"}, nil, "command not found"},
		"missing path":     {[]string{"/no/such/command"}, nil, "no such file"},
		"hostile name":     {[]string{strings.Repeat("\x01", 100_000)}, nil, "file name too long"},
		"hostile path":     {[]string{"/" + strings.Repeat("\x02<", 50_000)}, nil, "file name too long"},
		"not executable":   {[]string{"/usr/share/common-licenses/GPL-3"}, nil, "permission denied"},
		"a directory":      {[]string{"/usr/bin"}, nil, "is a directory"},
		"no program":       {[]string{"/tmp/script"}, []option{scratch("hello")}, "exec format error"},
		"no interpreter":   {[]string{"/tmp/script"}, []option{scratch("#!/no/such\n")}, "no such file"},
		"missing cwd":      {sh("exit 0"), []option{cwd("/no/such/dir")}, "working directory /no/such/dir"},
		"cwd is a file":    {sh("exit 0"), []option{cwd("/usr/bin/env")}, "not a directory"},
		"bad bundle":       {sh("exit 0"), []option{bundle(func(s *specs.Spec) { s.Process.Cwd = "relative" })}, "the runtime refused"},
		"no init":          {sh("exit 0"), []option{bundle(func(s *specs.Spec) { s.Process.Args[0] = "/no/init" })}, "the runtime refused"},
		"runtime is false": {sh("exit 0"), []option{with(func(c *Config) { c.Runtime = "/bin/false" })}, "exited with code 1 and said nothing"},
		"runtime missing":  {sh("exit 0"), []option{with(func(c *Config) { c.Runtime = "/no/runtime" })}, "cannot be executed"},
	} {
		for _, mode := range []string{"pipes", "terminal"} {
			t.Run(name+"/"+mode, func(t *over) {
				t.Parallel()
				opts := c.opts
				if mode == "terminal" {
					opts = append([]option{with(terminal)}, opts...)
				}
				p := newProc(t, c.argv, opts...).start()
				st := p.quiescent()
				p.wantExit(st, api.ExitSpawnFailed, 0, "")
				if !strings.Contains(strings.ToLower(st.Exit.Detail), c.detail) {
					t.Errorf("detail %q lacks %q", st.Exit.Detail, c.detail)
				}
				if record, err := os.Stat(filepath.Join(p.dir, exitFile)); err != nil || record.Size() > 8<<10 {
					t.Errorf("the record: %v, %v", record.Size(), err) // what a host's list can hold of each process
				}
			})
		}
	}
}

func cwd(dir string) option { return with(func(c *Config) { c.Spec.Cwd = dir }) }

// scratch shows an executable file with this content as /tmp/script.
func scratch(content string) option {
	return func(c *Config, s *specs.Spec) {
		if s == nil {
			return
		}
		file := filepath.Join(c.Bundle, "script")
		if err := os.WriteFile(file, []byte(content), 0o755); err != nil {
			panic(err)
		}
		s.Mounts = append(s.Mounts, specs.Mount{Destination: "/tmp/script", Type: "bind", Source: file, Options: []string{"bind", "ro", "nosuid", "nodev"}})
	}
}

// An init that dies without a report proves nothing about the command.
func TestUnexplainedEndIsUnknown(t *testing.T) { each(t, unexplainedEndIsUnknown) }

func unexplainedEndIsUnknown(t *over) {
	t.Parallel()
	p := newProc(t, sh("exit 0"), bundle(func(s *specs.Spec) { s.Process.Args = []string{"/bin/sh", "-c", "exit 0"} })).start()
	st := p.quiescent()
	p.wantExit(st, api.ExitUnknown, 0, "")
}

func TestOutOfMemoryIsTold(t *testing.T) { each(t, outOfMemoryIsTold) }

func outOfMemoryIsTold(t *over) {
	t.Parallel()
	p := newProc(t, []string{"tail", "/dev/zero"}, with(func(c *Config) { c.Spec.MemoryBytes = 192 << 20 })).start()
	st := p.quiescent()
	p.wantExit(st, api.ExitOOM, 0, "")
	if _, err := os.Stat(filepath.Join(p.dir, exitFile)); err != nil {
		t.Error(err)
	}
}

// What may hold up an end does not: the init's exit takes everything along.
func TestGrandchildrenEndWithTheCommand(t *testing.T) { each(t, grandchildrenEndWithTheCommand) }

func grandchildrenEndWithTheCommand(t *over) {
	t.Parallel()
	for name, script := range map[string]string{
		"holds the pipes":          `sleep 1000 & echo done; exit 3`,
		"own session":              `setsid sleep 1000 & echo done; exit 3`,
		"ignores signals":          `(trap "" TERM HUP INT; sleep 1000) & echo done; exit 3`,
		"orphan of an orphan":      `(setsid sh -c 'sleep 1000 & sleep 1000' &) ; echo done; exit 3`,
		"exits after many orphans": `i=0; while [ $i -lt 50 ]; do (true &); i=$((i+1)); done; echo done; exit 3`,
	} {
		t.Run(name, func(t *over) {
			t.Parallel()
			p := newProc(t, sh(script)).start()
			st := p.quiescent()
			p.wantExit(st, api.ExitExited, 3, "")
			if out, _ := p.output(); string(out) != "done\n" {
				t.Errorf("output %q", out)
			}
		})
	}
}

// Reading an exit record never turns damage into an answer.
func TestDamagedExitRecord(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh("exit 0")).start()
	p.quiescent()
	path := filepath.Join(p.dir, exitFile)
	whole, err := os.ReadFile(path)
	check(t, err)
	for i := range whole {
		b := append([]byte{}, whole...)
		b[i] ^= 0x04
		check(t, os.WriteFile(path, b, 0o600))
		if st, err := ReadExit(p.dir); err == nil || !errdefs.Is(err, errdefs.Indeterminate) {
			t.Fatalf("byte %d changed: %+v %v", i, st, err)
		}
		if i%16 == 0 {
			check(t, os.WriteFile(path, whole[:i], 0o600))
			_, err := ReadExit(p.dir)
			wantCode(t, err, errdefs.Indeterminate)
		}
	}
	check(t, os.Remove(path))
	_, err = ReadExit(p.dir)
	wantCode(t, err, errdefs.NotFound)
}
