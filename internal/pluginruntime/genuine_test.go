package pluginruntime

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// genuine runs the published Python runtime of an SDK until the test ends.
func genuine(t *testing.T, sdk string) *live {
	t.Helper()
	return genuineIn(t, sdk, t.TempDir())
}

// genuineIn runs it in a working directory, with more flags: its data is below dir/data.
func genuineIn(t *testing.T, sdk, dir string, flags ...string) *live {
	t.Helper()
	python := need.SDK(t, sdk)
	control, plugin := freePort(t), freePort(t)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	flags = append([]string{"-m", "langbot_plugin.cli.__init__", "rt", "--ws-control-port", strconv.Itoa(control), "--ws-debug-port", strconv.Itoa(plugin)}, flags...)
	cmd := exec.Command(python, flags...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := sync.OnceValue(func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		ctx, cancel := context.WithTimeout(context.Background(), stopTime) // it stops its workers one after another
		defer cancel()
		select {
		case <-ended:
		case <-ctx.Done():
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-ended
		}
		return nil
	})
	t.Cleanup(func() {
		_ = stop()
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("the Python runtime said:\n%s", b)
		}
	})
	health := "http://127.0.0.1:" + strconv.Itoa(control) + "/healthz"
	until(t, "the Python runtime listening", func() (bool, error) {
		resp, err := http.Get(health)
		if err != nil {
			return false, err
		}
		return resp.StatusCode == http.StatusOK, resp.Body.Close()
	})
	http.DefaultClient.CloseIdleConnections()
	return &live{t: t, dir: dir, stop: stop, deaf: true, at: Addresses{Control: "ws://127.0.0.1:" + strconv.Itoa(control) + "/control/ws",
		Plugin: "ws://127.0.0.1:" + strconv.Itoa(plugin) + "/plugin/debug/ws"}}
}

// freePort is a port below those that the kernel gives to who asks for any, so that
// nobody has it before the runtime listens.
func freePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		port := 20000 + rand.N(12000)
		if l, err := net.Listen("tcp", ":"+strconv.Itoa(port)); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}

// differs names the cases in which the published runtime does not do what ours
// does; docs/compatibility.md has the reasons.
var differs = map[string][]string{
	// It leaves the workers' standard error alone, so that the log has no line of theirs.
	"0.6": {"logs and diagnostics"},
	"0.7": {"logs and diagnostics"},
}

// differently holds the published runtime to the difference that is documented: its
// log has no line of a worker.
func differently(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
	if _, err := h.CallTool(t.Context(), on, "probe", M{"op": "log", "lines": []string{"a line of the log"}}); err != nil {
		t.Fatal(err)
	}
	if lines, err := h.Logs(t.Context(), on, "stockade", "kit", 100, ""); err != nil || strings.Contains(fmt.Sprint(lines), "a line of the log") {
		t.Errorf("the published runtime has the worker's line now; mend docs/compatibility.md: %v, %v", lines, err)
	}
}

// TestThePublishedRuntimeAnswersTheSame holds lbhost, and with it all tests of
// this package, to the truth: what it asks of our runtime it asks of the published
// one too, and the same is expected.
func TestThePublishedRuntimeAnswersTheSame(t *testing.T) {
	t.Parallel()
	for _, sdk := range []string{"0.6", "0.7"} {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			r := genuine(t, sdk)
			kit := install(workspace("ws-1"), "kit-1", "kit")(t)
			script := lbhost.NewScript()
			script.Set("kit-1", M{"greeting": "good day"})
			script.File("/docs/a", []byte(strings.Repeat("text ", 20000)))
			h := r.connect(lbhost.Config{Script: script}, kit)
			running(t, h, kit)
			for _, c := range kitCases {
				t.Run(c.name, func(t *testing.T) {
					if slices.Contains(differs[sdk], c.name) {
						differently(t, h, kit.Binding)
						return
					}
					c.do(t, h, kit.Binding)
				})
			}
		})
	}
}

// TestSwapAndGoBack: an operator puts our runtime in the place of the published one
// and goes back, in one directory. Whatever the one has unpacked and installed, the
// other finds.
func TestSwapAndGoBack(t *testing.T) {
	t.Parallel()
	for _, sdk := range []string{"0.6", "0.7"} {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			first := install(workspace("ws-1"), "kit-1", "kit")(t)
			second := install(workspace("ws-1"), "kit-2", "kit", "version: 1.0.0", "version: 1.0.1")(t)
			// Each is first met by another runtime: the one that meets it gets the package.
			for n, step := range []struct {
				ours bool
				all  []lbhost.Installation
				new  []string
			}{
				{false, []lbhost.Installation{first}, []string{"kit-1"}},
				{true, []lbhost.Installation{first, second}, []string{"kit-2"}},
				{false, []lbhost.Installation{first, second}, nil},
				{true, []lbhost.Installation{first, second}, nil},
			} {
				var r *live
				if step.ours {
					r = start(t, sdk, func(c *Config) { c.DataDir = filepath.Join(dir, "data") })
				} else {
					r = genuineIn(t, sdk, dir)
				}
				h := r.dial(lbhost.Config{})
				result, err := h.Handshake(t.Context(), workspace("ws-1"), step.all...)
				if err != nil || !slices.Equal(result.MissingArtifacts, step.new) && len(step.new)+len(result.MissingArtifacts) > 0 {
					t.Fatalf("step %d: missing %v, %v", n, result.MissingArtifacts, err)
				}
				for _, i := range step.all {
					running(t, h, i)
				}
				if err := h.Close(); err != nil {
					t.Error(err)
				}
				if err := r.stop(); err != nil {
					t.Fatal(err)
				}
			}
			trees, err := os.ReadDir(filepath.Join(dir, "data", "plugin-runtime", "environments", "sha256"))
			if err != nil || len(trees) != 2 {
				t.Errorf("two packages have %d dependency trees, %v: one of the runtimes did not find the other's", len(trees), err)
			}
		})
	}
}
