package deptree

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/python"
)

// probed is the Python of this machine, looked at once.
var probed = sync.OnceValues(func() (Interpreter, error) { return python.Probe(context.Background(), "python3") })

// interpreter is the Python of this machine, in the place of one with the SDK.
func interpreter(t testing.TB, sdk string) Interpreter {
	t.Helper()
	need.Tool(t, "python3", "python3")
	i, err := probed()
	if err != nil {
		t.Fatal(err)
	}
	i.SDK = sdk
	return i
}

// direct runs the real installer, as the launcher of plain processes does.
type direct struct {
	runs atomic.Int64
	argv atomic.Value // of the last run, []string
}

func (d *direct) Install(ctx context.Context, spec InstallSpec) error {
	d.runs.Add(1)
	argv, env := spec.Command()
	d.argv.Store(argv)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = spec.Scratch, append(env, "PATH="+os.Getenv("PATH"), "PIP_RETRIES=0", "PIP_TIMEOUT=60", "UV_HTTP_RETRIES=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return &InstallError{Exit: exit.ExitCode(), Output: out.String()}
	}
	return err
}

// fake installs by hand what do says.
type fake struct {
	runs atomic.Int64
	do   func(ctx context.Context, spec InstallSpec) error
}

func (f *fake) Install(ctx context.Context, spec InstallSpec) error {
	f.runs.Add(1)
	if f.do == nil {
		return nil
	}
	return f.do(ctx, spec)
}

// put writes a distribution into a target.
func put(target, name, version string) error {
	info := filepath.Join(target, name+"-"+version+".dist-info")
	return errors.Join(os.MkdirAll(filepath.Join(target, name), 0o755), os.MkdirAll(info, 0o755),
		os.WriteFile(filepath.Join(target, name, "__init__.py"), []byte("pass\n"), 0o644),
		os.WriteFile(filepath.Join(info, "METADATA"), []byte("Metadata-Version: 2.1\nName: "+name+"\nVersion: "+version+"\n"), 0o644))
}

// installs is a fake that puts one distribution.
func installs(name, version string) *fake {
	return &fake{do: func(_ context.Context, spec InstallSpec) error { return put(spec.Target, name, version) }}
}

const someArtifact = "00000000000000000000000000000000000000000000000000000000000000aa"

// code makes a code directory with the requirements.
func code(t testing.TB, requirements string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "requirements.txt"), []byte(requirements), 0o444); err != nil {
		t.Fatal(err)
	}
	return dir
}

func openStore(t testing.TB, cfg Config) *Store {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(t.TempDir(), "environments")
	}
	if cfg.Profile == "" {
		cfg.Profile = "oss_dev"
	}
	if cfg.Interp.Path == "" {
		cfg.Interp = interpreter(t, "0.7.18")
	}
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	plugintest.Unlock(t, cfg.Dir)
	return s
}

// onDisk checks what is in the store's directory, hidden or not.
func onDisk(t testing.TB, s *Store, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(s.shelf.Path("x")))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		t.Errorf("on the disk are %q, want %q", got, names)
	}
}
