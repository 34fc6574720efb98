package pluginlegacy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/cenkalti/backoff/v5"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/shelf"
)

// The Python classes that the published runtime raises for dependencies.
const (
	classInstall      = "DependencyInstallError"
	classVerification = "DependencyVerificationError"
)

const (
	venvDir         = ".venv"
	maxRequirements = 1 << 20           // bytes of requirements.txt
	venvWithin      = 120 * time.Second // making an environment takes a few seconds
)

// sitePackages is where a plugin's own dependencies are; "" where it has none.
func (o *Owner) sitePackages(dir string) string {
	site := filepath.Join(dir, venvDir, "lib", "python"+o.cfg.Interp.Version, "site-packages")
	if st, err := os.Stat(site); err != nil || !st.IsDir() {
		return ""
	}
	return site
}

// prepare gives the plugin in dir what its requirements.txt asks for and neither its
// .venv nor the runtime's interpreter has. The plugin SDK is never installed: the
// runtime's own comes first on the worker's path. tell, if not nil, is told of each
// dependency.
//
// Errors: unavailable with the class DependencyInstallError when a dependency could
// not be installed, DependencyVerificationError when the installer said so and the
// metadata of what is there does not.
func (o *Owner) prepare(ctx context.Context, p Plugin, dir string, tell Tell) error {
	text, err := requirementsOf(dir)
	if err != nil {
		return err
	}
	var all []deptree.Requirement
	if text != "" {
		if all, err = deptree.Classify(ctx, o.cfg.Interp, text, []string{o.sitePackages(dir)}); err != nil {
			return err
		}
	}
	d := dependencies{o: o, dir: dir, all: all, began: time.Now(), tell: tell}
	if err := d.install(ctx); err != nil {
		return err
	}
	if len(d.failed) > 0 {
		return pluginwire.WithClass(classInstall, errdefs.New(errdefs.Unavailable, "Plugin %s/%s failed to install %d dependencies: %s%s",
			p.Author, p.Name, len(d.failed), list(d.failed), d.reason).WithNext("see whether the package index answers, and has them"))
	}
	if d.did == 0 {
		return nil
	}
	return o.verify(ctx, p, dir, text)
}

// verify holds what is there against the requirements: an installer's word is not enough
// (LM-19).
func (o *Owner) verify(ctx context.Context, p Plugin, dir, text string) error {
	all, err := deptree.Classify(ctx, o.cfg.Interp, text, []string{o.sitePackages(dir)})
	if err != nil {
		return err
	}
	var missing, mismatch []string
	for _, r := range all {
		switch r.Status {
		case deptree.Missing:
			missing = append(missing, r.Text)
		case deptree.Mismatch:
			mismatch = append(mismatch, r.Text+" (there is "+r.Have+")")
		}
	}
	if len(missing)+len(mismatch) == 0 {
		return nil
	}
	return pluginwire.WithClass(classVerification, errdefs.New(errdefs.Unavailable, "Plugin %s/%s has dependencies that were not installed as asked: missing %s, version mismatch %s",
		p.Author, p.Name, list(missing), list(mismatch)))
}

func requirementsOf(dir string) (string, error) {
	f, err := os.Open(filepath.Join(dir, "requirements.txt"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", shelf.Refusal(err, "requirements.txt cannot be read")
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRequirements+1))
	switch {
	case err != nil:
		return "", shelf.Refusal(err, "requirements.txt cannot be read")
	case len(b) > maxRequirements:
		return "", errdefs.New(errdefs.Exhausted, "requirements.txt has more than %d bytes, the limit", maxRequirements)
	case !utf8.Valid(b):
		return "", errdefs.New(errdefs.Invalid, "requirements.txt is not UTF-8")
	}
	return strings.TrimSpace(strings.TrimPrefix(string(b), "\ufeff")), nil
}

// dependencies is one run over a plugin's requirements.
type dependencies struct {
	o      *Owner
	dir    string
	all    []deptree.Requirement
	began  time.Time
	tell   Tell
	did    int   // installed now
	bytes  int64 // that they take
	failed []string
	reason string // of the first failure
}

func needed(r deptree.Requirement) bool {
	switch r.Status {
	case deptree.Missing, deptree.Mismatch, deptree.Opaque, deptree.Variable:
		return true
	}
	return false
}

// install installs one after the other, and tells of each as the published runtime
// does: how many are done, counted over all.
func (d *dependencies) install(ctx context.Context) error {
	total, todo := len(d.all), 0
	for _, r := range d.all {
		if needed(r) {
			todo++
		}
		if r.Status == deptree.OtherRuntime {
			d.o.log.Warn("a plugin asks for another SDK than the runtime's, which it gets", "dir", d.dir, "asks", r.Text, "has", r.Have)
		}
	}
	for i, r := range d.all {
		if err := d.say(map[string]any{"deps_total": total, "deps_installed": i, "deps_remaining": total - i, "current_dep": deptree.Redact(r.Text),
			"already_installed": total - todo, "to_install": todo}); err != nil {
			return err
		}
		if !needed(r) {
			continue
		}
		if err := d.one(ctx, r); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			d.failed = append(d.failed, deptree.Redact(r.Text))
			if d.reason == "" {
				d.reason = ": " + cut(err.Error(), maxReason)
			}
			continue
		}
		d.did++
	}
	failed := d.failed
	if failed == nil {
		failed = []string{}
	}
	return d.say(map[string]any{"deps_total": total, "deps_installed": total - len(failed), "deps_remaining": 0, "deps_failed": len(failed),
		"failed_deps": failed, "current_dep": ""})
}

func (d *dependencies) say(m map[string]any) error {
	if d.tell == nil {
		return nil
	}
	m["deps_downloaded_size"], m["deps_speed"] = d.bytes, rate(d.bytes, d.began)
	return d.tell(tellDeps, m)
}

// rate is bytes per second since began.
func rate(bytes int64, began time.Time) float64 {
	if s := time.Since(began).Seconds(); s > 0 {
		return float64(bytes) / s
	}
	return 0
}

// one installs one requirement, three times if need be (LM-18, PK-02).
func (d *dependencies) one(ctx context.Context, r deptree.Requirement) error {
	if r.Status == deptree.Variable {
		return errdefs.New(errdefs.Invalid, "it has a variable, which the installer would replace from the runtime's environment")
	}
	site := filepath.Join(d.dir, venvDir)
	before, _ := shelf.Usage(site)
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		err := d.o.installOne(ctx, d.dir, r.Text)
		if err != nil && errdefs.CodeOf(err) != errdefs.Unavailable {
			err = backoff.Permanent(err)
		}
		return struct{}{}, err
	}, backoff.WithBackOff(backoff.NewConstantBackOff(d.o.cfg.Between)), backoff.WithMaxTries(tries), backoff.WithMaxElapsedTime(0))
	after, _ := shelf.Usage(site)
	d.bytes += max(0, after-before)
	return err
}

// installOne runs the installer for one line of a requirements.txt.
func (o *Owner) installOne(ctx context.Context, dir, line string) error {
	limited, cancel := context.WithTimeout(ctx, installWithin)
	defer cancel()
	scratch, err := o.fresh(stagingDir, ".scratch")
	if err != nil {
		return err
	}
	if err := os.Mkdir(scratch, 0o700); err != nil {
		return shelf.Refusal(err, "an installer's directory cannot be made")
	}
	defer o.remove(scratch)
	python, err := o.environment(limited, dir, scratch)
	if err != nil {
		return err
	}
	file := filepath.Join(scratch, "requirements.txt")
	if err := os.WriteFile(file, []byte(line+"\n"), 0o600); err != nil {
		return shelf.Refusal(err, "an installer's requirements cannot be written")
	}
	err = o.cfg.Installer().Install(limited, deptree.InstallSpec{Python: python, Uv: o.cfg.Uv, Scratch: scratch, Requirements: file,
		Index: o.cfg.IndexURL, TrustedHosts: o.cfg.TrustedHosts})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case limited.Err() != nil:
		return errdefs.Wrap(err, errdefs.Unavailable, "the installer timed out after %s", installWithin)
	}
	if e, ok := errors.AsType[*deptree.InstallError](err); ok {
		said := deptree.Redact(e.Output)
		o.log.Warn("a dependency could not be installed", "dir", dir, "dependency", deptree.Redact(line), "exit", e.Exit, "output", said)
		return errdefs.Wrap(err, errdefs.Unavailable, "%s", lastLine(said))
	}
	return err
}

// environment makes the plugin's .venv if there is none for this interpreter, and
// returns its Python. It sees what the system's Python has.
func (o *Owner) environment(ctx context.Context, dir, scratch string) (string, error) {
	venv := filepath.Join(dir, venvDir)
	python := filepath.Join(venv, "bin", "python")
	if _, err := os.Stat(python); err == nil && o.sitePackages(dir) != "" {
		return python, nil
	}
	// uv needs no pip in it, and pip takes most of the time.
	ways := [][]string{{"--without-pip"}}
	if o.cfg.Uv == "" {
		ways = [][]string{nil, {"--without-pip"}} // a system may have no ensurepip
	}
	var err error
	for _, more := range ways {
		argv := append([]string{"-I", "-B", "-m", "venv", "--system-site-packages"}, more...)
		if err = run(ctx, scratch, o.cfg.Interp.Path, append(argv, venv)...); err == nil {
			return python, nil
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
	}
	return "", err
}

// run runs a program of the interpreter to its end, with all it has started.
func run(ctx context.Context, scratch, path string, argv ...string) error {
	ctx, cancel := context.WithTimeout(ctx, venvWithin)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, argv...)
	cmd.Dir = scratch
	cmd.Env = []string{"HOME=" + scratch, "TMPDIR=" + scratch, "PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "PYTHONNOUSERSITE=1", "PYTHONDONTWRITEBYTECODE=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = time.Second
	var said tail
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Run(); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the plugin's environment cannot be made: %v: %s", err, lastLine(string(said.b))).
			WithNext("apt-get install python3-venv, or another Python with --python")
	}
	return nil
}

// tail keeps the last bytes written to it.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if over := len(t.b) - maxReason; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

// lastLine is the line of an installer's output that says most: the last complaint, or
// the last one.
func lastLine(said string) string {
	lines := strings.Split(strings.TrimSpace(strings.ToValidUTF8(said, "?")), "\n")
	best := lines[len(lines)-1]
	for _, l := range lines {
		if l = strings.TrimSpace(l); strings.HasPrefix(l, "ERROR:") || strings.HasPrefix(l, "error:") {
			best = l
		}
	}
	return cut(best, maxReason)
}

// list writes names as the published runtime does.
func list(names []string) string {
	var b strings.Builder
	for i, n := range names {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "'%s'", n)
	}
	return "[" + b.String() + "]"
}
