package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/relay"
)

func TestRelayCommandLine(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("good", "a token\n", 0o600)
	for name, c := range map[string]struct {
		args []string
		want string // in the message; empty: accepted
	}{
		"all":         {[]string{"--url", "ws://h:1", "--daemon-id", "d", "--token-file", good, "--reconnect-delay", "1s", "--allow-workspace", "/a", "--allow-workspace", "/b", "--allow-command", "x"}, ""},
		"no url":      {[]string{"--daemon-id", "d", "--token-file", good}, "--url is required"},
		"no id":       {[]string{"--url", "ws://h:1", "--token-file", good}, "--daemon-id is required"},
		"no token":    {[]string{"--url", "ws://h:1", "--daemon-id", "d"}, "--token-file is required"},
		"open token":  {[]string{"--url", "ws://h:1", "--daemon-id", "d", "--token-file", file("open", "x", 0o644)}, "open"},
		"empty token": {[]string{"--url", "ws://h:1", "--daemon-id", "d", "--token-file", file("empty", "\n", 0o600)}, "empty"},
		"no file":     {[]string{"--url", "ws://h:1", "--daemon-id", "d", "--token-file", dir + "/none"}, "none"},
		"token":       {[]string{"--token", "x"}, "token"},
		"more":        {[]string{"x"}, "unexpected"},
	} {
		var out bytes.Buffer
		cfg, err := relayConfig(c.args, &out)
		switch {
		case c.want == "" && (err != nil || cfg.Token != "a token" || cfg.ReconnectDelay != time.Second || len(cfg.AllowWorkspace) != 2):
			t.Errorf("%s: %+v, %v", name, cfg, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// The program as it is shipped: a job ends with its processes, SIGTERM ends the
// program, nothing is left.
func TestRelayConnect(t *testing.T) {
	bin := t.TempDir()
	need.Programs(t, bin)
	t.Run("this user", func(t *testing.T) { relayConnect(t, bin, nil) })
	t.Run("ordinary user", func(t *testing.T) {
		need.Root(t)
		relayConnect(t, bin, &syscall.Credential{Uid: 65534, Gid: 65534})
	})
}

func relayConnect(t *testing.T, bin string, as *syscall.Credential) {
	// A place that the other user may reach.
	work, err := os.MkdirTemp("/var/tmp", "stockade-relay-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(work) })
	const token = "test-only-installation-token-8f69c142049db2bc"
	hub, err := relay.NewHub(relay.HubConfig{Token: token, Profile: relay.Shared, StateDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	url, err := hub.Start(t.Context(), relay.Endpoint{Token: token})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := hub.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	tokenFile, program := filepath.Join(work, "token"), filepath.Join(work, "stockade-host")
	b, err := os.ReadFile(filepath.Join(bin, "stockade-host"))
	if err != nil {
		t.Fatal(err)
	}
	need.Program(t, program, string(b))
	if err := os.WriteFile(tokenFile, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	group := "" // only root may make one
	if as != nil {
		for _, path := range []string{work, tokenFile, program} {
			if err := os.Chown(path, int(as.Uid), int(as.Gid)); err != nil {
				t.Fatal(err)
			}
		}
	} else if os.Geteuid() == 0 {
		group = "/stockade-relay-test-" + strconv.Itoa(os.Getpid())
	}
	cmd := exec.Command(program, "relay-connect", "--url", url, "--daemon-id", "d", "--token-file", tokenFile,
		"--allow-workspace", work, "--allow-command", "/bin/sleep", "--cgroup-parent", group)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	cmd.Dir = work
	cmd.Env = append(os.Environ(), "TMPDIR="+work) // one that the other user may write to
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	// What somebody left open for this program is not the agents'.
	left, err := os.Open(tokenFile)
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close()
	cmd.ExtraFiles = []*os.File{left, left, left}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(stderr.String())
		}
	}()
	if err := hub.WaitForDaemon(t.Context(), "d", time.Minute); err != nil {
		t.Fatal(err)
	}
	job := func() *relay.Job {
		j, err := hub.RunJob(t.Context(), relay.JobRequest{DaemonID: "d",
			Payload: []byte(`{"kind":"acp","prompt_text":"x","config":{"provider":"custom","acp_command":"/bin/sleep 3600"}}`)})
		if err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); len(sleepers(work)) == 0; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("the agent does not start")
			}
		}
		links, _ := filepath.Glob(filepath.Dir(sleepers(work)[0]) + "/fd/*")
		for _, l := range links {
			if to, _ := os.Readlink(l); to == tokenFile {
				t.Errorf("the agent has %s open", to)
			}
		}
		return j
	}
	if o, err := job().Cancel(t.Context(), "test"); err != nil || !o.Acknowledged || len(sleepers(work)) > 0 {
		t.Errorf("outcome %+v, %v, left %v", o, err, sleepers(work))
	}
	j := job()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ends with %v", err)
	}
	<-j.Done()
	if left := sleepers(work); len(left) > 0 || len(hub.Fences()) > 0 {
		t.Errorf("left %v, fences %v", left, hub.Fences())
	}
	if left, _ := filepath.Glob(filepath.Join(work, "stockade-relay-*")); len(left) > 0 {
		t.Errorf("private directories are left: %v", left)
	}
	if left, _ := filepath.Glob("/sys/fs/cgroup/*" + group); group != "" && len(left) > 0 {
		t.Errorf("control groups are left: %v", left)
	}
}

// sleepers lists what works in a directory and is no zombie.
func sleepers(dir string) (names []string) {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, l := range links {
		if cwd, err := os.Readlink(l); err == nil && cwd == dir {
			comm, _ := os.ReadFile(filepath.Join(filepath.Dir(l), "comm"))
			if strings.TrimSpace(string(comm)) == "sleep" {
				names = append(names, l)
			}
		}
	}
	return names
}
