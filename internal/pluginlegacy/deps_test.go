package pluginlegacy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/python"
)

// installer runs what a spec says as a plain process, or what a test wants.
type installer struct {
	runs atomic.Int32
	do   func(ctx context.Context, spec deptree.InstallSpec) error
}

func (i *installer) Install(ctx context.Context, spec deptree.InstallSpec) error {
	i.runs.Add(1)
	if i.do != nil {
		return i.do(ctx, spec)
	}
	argv, env := spec.Command()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = append(env, "PATH="+os.Getenv("PATH")), spec.Scratch
	out, err := cmd.CombinedOutput()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		return &deptree.InstallError{Exit: e.ExitCode(), Output: string(out)}
	}
	return err
}

func withPython(t *testing.T, c Config, i *installer) Config {
	t.Helper()
	interp, err := python.Probe(t.Context(), need.SDK(t, "0.7"))
	if err != nil {
		t.Fatal(err)
	}
	c.Interp, c.Installer = interp, func() deptree.Installer { return i }
	return c
}

// PK-01, PK-02, LM-42: dependencies as people write them: what is there is not installed,
// the SDK never is, comments and pip's options are left out; what is missing comes from
// the index into the plugin's own environment, which moves with it. At the next start
// nothing is installed again; when it has gone and cannot be had, the plugin starts
// nevertheless and its log says why (LM-15).
func TestDependencies(t *testing.T) {
	t.Parallel()
	for _, with := range []string{"pip", "uv"} {
		t.Run(with, func(t *testing.T) {
			t.Parallel()
			dir, r, i := t.TempDir(), newRunner(), &installer{}
			index := plugintest.NewIndex(t, plugintest.NewWheel(t, "toy_dep", "1.0"), plugintest.NewWheel(t, "toy_dep", "2.0"))
			c := withPython(t, config(dir, r), i)
			c.IndexURL = index.URL
			if with == "uv" {
				c.Uv = need.UV(t)
			}
			o := begin(t, c, runtimeConfig(4))
			wants := "--no-binary :none:\n\ntoy-dep==1.0  # because\nlangbot-plugin==0.1\npydantic>=1 ; \\\n python_version > '3'\nnosuch; python_version < '3'\n"
			var p progress
			if err := o.Install(t.Context(), local(pack("toy", "1", "requirements.txt", wants)), p.tell); err != nil {
				t.Fatal(err)
			}
			if i.runs.Load() != 1 || index.Files.Load() == 0 {
				t.Errorf("%d installers, %d files", i.runs.Load(), index.Files.Load())
			}
			var current []string
			for _, m := range p.meta {
				if m == nil {
					continue
				}
				current = append(current, m["current_dep"].(string))
				if m["deps_total"] != 4 || m["current_dep"] != "" && (m["to_install"] != 1 || m["already_installed"] != 3) {
					t.Errorf("%v", m)
				}
			}
			if want := []string{"toy-dep==1.0", "langbot-plugin==0.1", "pydantic>=1 ;  python_version > '3'", "nosuch; python_version < '3'", ""}; !slices.Equal(current, want) {
				t.Errorf("told of %q", current)
			}
			last := p.meta[len(p.meta)-3]
			if last["deps_failed"] != 0 || last["deps_installed"] != 4 || last["deps_remaining"] != 0 || last["deps_downloaded_size"].(int64) <= 0 || last["deps_speed"].(float64) <= 0 {
				t.Errorf("%v", last)
			}
			at := filepath.Join(dir, "plugins/a__toy")
			site := r.starts()[0].SitePackages
			if !strings.HasPrefix(site, at+"/.venv/lib/python") {
				t.Errorf("it runs with %s", site)
			}
			cmd := exec.Command(c.Interp.Path, "-c", "import toy_dep, pydantic; print(toy_dep.VERSION)")
			cmd.Env = []string{"PYTHONPATH=" + c.Interp.ImportRoot + ":" + site}
			if out, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "1.0" {
				t.Errorf("%v: %s", err, out)
			}
			// What Python runs the environment afterwards is the plugin's, where it is now.
			if out, err := exec.Command(at+"/.venv/bin/python", "-c", "import toy_dep; print(toy_dep.__file__)").CombinedOutput(); err != nil || !strings.HasPrefix(string(out), at) {
				t.Errorf("%v: %s", err, out)
			}
			// The next generation has another version.
			if err := o.Install(t.Context(), local(pack("toy", "2", "requirements.txt", "toy_dep>=2\n")), new(progress).tell); err != nil {
				t.Fatal(err)
			}
			o.Close()

			again := func(change func(*Config)) Plugin {
				t.Helper()
				r := newRunner()
				c := c
				c.Runner, c.IndexURL = r, "http://127.0.0.1:1/simple/"
				if change != nil {
					change(&c)
				}
				o := begin(t, c, runtimeConfig(4))
				defer o.Close()
				until(t, "the start", func() bool { return len(r.starts()) == 1 })
				return r.starts()[0]
			}
			before := i.runs.Load()
			if p := again(nil); p.Problem != "" || i.runs.Load() != before || p.SitePackages != site {
				t.Errorf("%+v, %d installers", p, i.runs.Load()-before)
			}
			if err := os.RemoveAll(at + "/.venv"); err != nil {
				t.Fatal(err)
			}
			if p := again(func(c *Config) { c.SkipDeps = true }); p.Problem != "" || i.runs.Load() != before || p.SitePackages != "" {
				t.Errorf("%+v, %d installers", p, i.runs.Load()-before)
			}
			i.do = func(context.Context, deptree.InstallSpec) error {
				return &deptree.InstallError{Exit: 1, Output: "WARNING: x\nERROR: No matching distribution found for toy_dep at http://u:secret@h/x?token=1\n"}
			}
			if p := again(nil); !strings.Contains(p.Problem, "failed to install 1 dependencies: ['toy_dep>=2']: ERROR: No matching") || strings.Contains(p.Problem, "secret") ||
				strings.Contains(p.Problem, "token") || i.runs.Load() != before+tries {
				t.Errorf("%+v, %d installers", p, i.runs.Load()-before)
			}
		})
	}
}

// LM-18, LM-19, ER-01: a dependency is tried three times; what cannot be had or was not
// installed, whatever the installer says, is told by name, and nothing else has changed.
func TestDependenciesThatFail(t *testing.T) {
	t.Parallel()
	dir, r, i := t.TempDir(), newRunner(), &installer{}
	c := withPython(t, config(dir, r), i)
	c.Uv = need.UV(t) // makes the environment without pip, which is quick
	o := begin(t, c, runtimeConfig(4))
	mustInstall(t, o, local(pack("toy", "1")))
	unchanged := func(what string) {
		t.Helper()
		if got := onDisk(t, dir); got != "plugins/a__toy 1" || r.version("a/toy") != "1" || len(r.settings) != 1 {
			t.Errorf("%s: %q, %q runs, %v", what, got, r.version("a/toy"), r.settings)
		}
	}
	try := func(ctx context.Context, requirements string) (progress, error) {
		var p progress
		err := o.Install(ctx, local(pack("toy", "2", "requirements.txt", requirements)), p.tell)
		return progress{all: p.all, meta: p.meta}, err
	}
	i.do = func(_ context.Context, spec deptree.InstallSpec) error {
		b, err := os.ReadFile(spec.Requirements)
		if err != nil || spec.Target != "" || spec.Uv == "" || !strings.HasPrefix(spec.Scratch, filepath.Join(dir, stagingDir)) {
			return fmt.Errorf("%+v: %w", spec, err)
		}
		if strings.Contains(string(b), "good") {
			return nil
		}
		return &deptree.InstallError{Exit: 1, Output: "error: no such thing\n"}
	}
	p, err := try(t.Context(), "bad-a==1\nbad-b\npydantic\n${HOME}/x\n")
	const want = "DependencyInstallError: Plugin a/toy failed to install 3 dependencies: ['bad-a==1', 'bad-b', '${HOME}/x']: error: no such thing"
	if text := pluginwire.FromError(err); !strings.HasPrefix(text, want) || i.runs.Load() != 2*tries {
		t.Errorf("%q, %d runs", text, i.runs.Load())
	}
	if last := p.meta[len(p.meta)-1]; last["deps_failed"] != 3 || last["deps_installed"] != 1 || !slices.Equal(last["failed_deps"].([]string), []string{"bad-a==1", "bad-b", "${HOME}/x"}) {
		t.Errorf("%v", last)
	}
	if slices.Contains(p.all, tellSettings) || slices.Contains(p.all, tellLaunch) {
		t.Errorf("told %q", p.all)
	}
	unchanged("dependencies that fail")

	_, err = try(t.Context(), "good\npydantic==0.1\n")
	if text := pluginwire.FromError(err); err == nil || !strings.HasPrefix(text, "DependencyInstallError: Plugin a/toy failed to install 1 dependencies: ['pydantic==0.1']") {
		t.Errorf("%q", text)
	}
	_, err = try(t.Context(), "good\n")
	if text := pluginwire.FromError(err); err == nil || !strings.HasPrefix(text, "DependencyVerificationError: Plugin a/toy has dependencies") || !strings.Contains(text, "missing ['good']") {
		t.Errorf("%q", text)
	}
	i.do = func(context.Context, deptree.InstallSpec) error { return nil }
	_, err = try(t.Context(), "pydantic==0.1\n")
	if text := pluginwire.FromError(err); err == nil || !strings.Contains(text, "version mismatch ['pydantic==0.1 (there is 2.") {
		t.Errorf("%q", text)
	}
	unchanged("an installer that lies")

	_, err = try(t.Context(), "\xff\n")
	isCode(t, err, errdefs.Invalid, "UTF-8")
	var long strings.Builder
	for long.Len() <= maxRequirements {
		long.WriteString("#" + rand.Text() + "\n") // a package may not hold what packs too well
	}
	_, err = try(t.Context(), long.String())
	isCode(t, err, errdefs.Exhausted, "limit")
	_, err = try(t.Context(), strings.Repeat("x\n", 1025))
	isCode(t, err, errdefs.Exhausted, "1024")
	unchanged("requirements that are none")

	ctx, cancel := context.WithCancelCause(t.Context())
	left := errors.New("LangBot left")
	i.do = func(ctx context.Context, _ deptree.InstallSpec) error {
		cancel(left)
		<-ctx.Done()
		return ctx.Err()
	}
	if _, err := try(ctx, "slow\n"); !errors.Is(err, left) {
		t.Error(err)
	}
	unchanged("being left")
}
