package pluginruntime

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// remake returns a package with one file changed.
func remake(t *testing.T, pack []byte, name string, change func(string) string) []byte {
	t.Helper()
	zr, err := zip.NewReader(bytes.NewReader(pack), int64(len(pack)))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	zw := zip.NewWriter(&out)
	changed := false
	for _, f := range zr.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if f.Name == name {
			after := change(string(b))
			changed, b = after != string(b), []byte(after)
		}
		w, err := zw.Create(f.Name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	if !changed {
		t.Fatalf("%s is not in the package, or as it was", name)
	}
	return out.Bytes()
}

// puppetTool is an operation of the kit's probe that does whatever it is told: "main"
// is a coroutine of it.
const puppetTool = `
    async def op_py(self, params):
        env = {"params": params}
        exec(params["code"], env)
        return {"out": await env["main"](self)}
`

// puppet packs the kit with puppetTool.
func puppet(t *testing.T) []byte {
	t.Helper()
	return remake(t, plugintest.Pack(t, "kit"), "components/tools/probe.py", func(s string) string { return s + puppetTool })
}

// scene is a runtime with LangBot and a plugin that goes on answering: the one that
// nobody's trouble may disturb.
type scene struct {
	*live
	script *lbhost.Script
	h      *lbhost.Host
	pack   []byte // of puppets
	good   lbhost.Installation
	count  atomic.Int64 // answers of good
	quiet  func()       // ends calling good
}

// pause is between two calls of the plugin that nobody may disturb: without one they
// took most of the processors from the trouble.
const pause = 10 * time.Millisecond

// newScene starts one. Until the test ends good is called again and again, and each
// call has to be answered by the process that answered the first.
func newScene(t *testing.T, sdk string, change func(*Config)) *scene {
	t.Helper()
	s := &scene{live: start(t, sdk, change), script: lbhost.NewScript(), pack: puppet(t)}
	s.good = install(workspace("ws-1"), "good", "kit", "version: 1.0.0", "version: 1.0.9")(t)
	s.h = s.connect(lbhost.Config{Script: s.script}, s.good)
	running(t, s.h, s.good)
	first := s.pid(t, s.good)
	end := make(chan struct{})
	var asking sync.WaitGroup
	asking.Go(func() {
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
			}
			raw, err := s.h.CallTool(t.Context(), s.good.Binding, "probe", M{"op": "pid"})
			if err != nil || pidOf(raw) != first {
				if t.Context().Err() == nil {
					t.Errorf("somebody else's trouble disturbed a plugin: %s, %v", raw, err)
				}
				return
			}
			s.count.Add(1)
		}
	})
	s.quiet = sync.OnceFunc(func() { close(end); asking.Wait() })
	t.Cleanup(s.quiet)
	return s
}

func pidOf(raw json.RawMessage) int {
	var got struct{ Pid int }
	_ = json.Unmarshal(raw, &got)
	return got.Pid
}

// pid is the process that answers for an installation.
func (s *scene) pid(t *testing.T, i lbhost.Installation) int {
	t.Helper()
	raw, err := s.h.CallTool(t.Context(), i.Binding, "probe", M{"op": "pid"})
	if err != nil || pidOf(raw) == 0 {
		t.Fatalf("%s, %v", raw, err)
	}
	return pidOf(raw)
}

// undisturbed waits until the other plugin was called and answered anew.
func (s *scene) undisturbed(t *testing.T) {
	t.Helper()
	before := s.count.Load()
	until(t, "the other plugin answering", func() (bool, error) { return s.count.Load() > before+1 || t.Failed(), nil })
}

// victim installs a puppet under a name of its own and waits until it runs.
func (s *scene) victim(t *testing.T, uuid string) lbhost.Installation {
	t.Helper()
	b := workspace("ws-1")
	b.InstallationUUID, b.RuntimeRevision, b.ArtifactDigest = uuid, 1, plugintest.Digest(s.pack)
	i := lbhost.Installation{Binding: b, Enabled: true, Package: s.pack}
	if out, err := s.h.Apply(t.Context(), i); err != nil || out.State != pluginwire.StateStarting {
		t.Fatalf("%+v, %v", out, err)
	}
	running(t, s.h, i)
	return i
}

// remove removes an installation; nothing of it is left then.
func (s *scene) remove(t *testing.T, i lbhost.Installation) {
	t.Helper()
	if out, err := s.h.Remove(t.Context(), i.Binding); err != nil || out.State != pluginwire.StateRemoved {
		t.Errorf("remove: %+v, %v", out, err)
	}
	if left := processesBelow(t, filepath.Join(s.dir, "plugin-runtime", "installations", i.Binding.InstallationUUID)); len(left) > 0 {
		t.Errorf("processes of a removed installation are left: %v", left)
	}
}

// py has a puppet run a program and returns what it made.
func (s *scene) py(t *testing.T, on lbhost.Installation, code string) (string, error) {
	t.Helper()
	raw, err := s.h.CallTool(t.Context(), on.Binding, "probe", M{"op": "py", "code": code})
	if err != nil {
		return "", err
	}
	var got struct{ Out any }
	if err := json.Unmarshal(raw, &got); err != nil {
		return string(raw), err
	}
	if s, ok := got.Out.(string); ok {
		return s, nil
	}
	b, err := json.Marshal(got.Out)
	return string(b), err
}

// says waits until an installation's log has a text in it.
func (s *scene) says(t *testing.T, on lbhost.Installation, text string) {
	t.Helper()
	until(t, "the log saying "+text, func() (bool, error) {
		lines, err := s.h.Logs(t.Context(), on.Binding, "stockade", "kit", 1000, "")
		b, _ := json.Marshal(lines)
		if !strings.Contains(string(b), text) {
			return false, errors.Join(err, errors.New(string(b[max(0, len(b)-600):])))
		}
		return true, nil
	})
}

// processesBelow lists processes whose environment names a directory: workers and
// whatever they started.
func processesBelow(t *testing.T, dir string) []int {
	t.Helper()
	all, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, e := range all {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err == nil && bytes.Contains(env, []byte(dir)) {
			out = append(out, pid)
		}
	}
	return out
}

// pushed lists the files below DATA/temp/lbp, whole or coming.
func pushed(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(filepath.Join(dir, "temp", "lbp"), func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// nothingLeft looks, once the runtime has ended, for what a run must not leave:
// processes, files that were pushed, half-made artifacts and trees.
func (r *live) nothingLeft(t *testing.T) {
	t.Helper()
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if left := processesBelow(t, r.dir); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	err := filepath.WalkDir(r.dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		rel, _ := filepath.Rel(r.dir, path)
		switch {
		case d.IsDir() && name == "langbot": // lbhost's
			return filepath.SkipDir
		case strings.HasPrefix(name, ".payload-"), strings.HasPrefix(name, ".staging"), strings.Contains(name, ".staging-"), strings.HasSuffix(name, ".tmp"):
			t.Errorf("%s is left", rel)
		case !d.IsDir() && strings.Contains(rel, "transfer"), !d.IsDir() && strings.HasPrefix(rel, filepath.Join("temp", "lbp")) && !strings.HasPrefix(name, "."):
			t.Errorf("a pushed file is left: %s", rel)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
