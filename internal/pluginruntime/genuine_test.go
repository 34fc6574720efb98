package pluginruntime

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
)

// genuine runs the published Python runtime of an SDK until the test ends.
func genuine(t *testing.T, sdk string) *live {
	t.Helper()
	python := need.SDK(t, sdk)
	dir := t.TempDir()
	control, plugin := freePort(t), freePort(t)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(python, "-m", "langbot_plugin.cli.__init__", "rt", "--ws-control-port", strconv.Itoa(control), "--ws-debug-port", strconv.Itoa(plugin))
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		select {
		case <-ended:
		case <-ctx.Done():
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-ended
		}
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
	return &live{t: t, dir: dir, at: Addresses{Control: "ws://127.0.0.1:" + strconv.Itoa(control) + "/control/ws",
		Plugin: "ws://127.0.0.1:" + strconv.Itoa(plugin) + "/plugin/debug/ws"}}
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// differs names the cases in which the published runtime does not do what ours
// does; docs/compatibility.md has the reasons.
var differs = map[string][]string{
	// It leaves the workers' standard error alone, so that the log has no line of theirs.
	"0.6": {"logs and diagnostics"},
	"0.7": {"logs and diagnostics"},
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
						t.Skip("a known difference")
					}
					c.do(t, h, kit.Binding)
				})
			}
		})
	}
}
