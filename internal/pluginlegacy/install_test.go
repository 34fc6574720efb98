package pluginlegacy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// LM-11, LM-12, LM-13, LM-16, LM-17: the old generation is untouched until the new one
// takes its place, and comes back when that does not start; its .env is kept.
func TestInstallAndUndo(t *testing.T) {
	t.Parallel()
	dir, r := t.TempDir(), newRunner()
	r.broken["3"] = true
	o := begin(t, config(dir, r), runtimeConfig(4))
	var p progress
	if err := o.Install(t.Context(), local(pack("toy", "1")), p.tell); err != nil {
		t.Fatal(err)
	}
	if want := []string{tellDownload, tellDeps, tellDeps, tellSettings, tellLaunch}; !slices.Equal(p.all, want) {
		t.Errorf("told %q, want %q", p.all, want)
	}
	env := filepath.Join(dir, "plugins/a__toy/.env")
	if err := os.WriteFile(env, []byte("SECRET=1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	unchanged := func(what, version string) {
		t.Helper()
		if got := onDisk(t, dir); got != "plugins/a__toy "+version || r.version("a/toy") != version {
			t.Errorf("after %s: %q, and %q runs", what, got, r.version("a/toy"))
		}
	}
	try := func(p []byte) error { return o.Install(t.Context(), local(p), new(progress).tell) }
	isCode(t, try(pack("toy", "1")), errdefs.Conflict, "Plugin a/toy:1 already exists")
	unchanged("the same version", "1")
	isCode(t, try(pack("toy", "2", "../x", "")), errdefs.Invalid)
	unchanged("a path outside", "1")
	isCode(t, try([]byte("no zip")), errdefs.Invalid)
	isCode(t, try(nil), errdefs.Invalid)
	unchanged("garbage", "1")
	isCode(t, try(pack("toy", "3")), errdefs.Unavailable, "Plugin a/toy did not become ready within", "exited with code 1")
	unchanged("one that does not start", "1")
	r.refuse = errdefs.New(errdefs.Unavailable, "LangBot is away")
	isCode(t, try(pack("toy", "2")), errdefs.Unavailable, "LangBot is away")
	unchanged("settings that cannot be made", "1")
	r.refuse = nil
	gone := errors.New("LangBot hung up")
	for _, at := range []string{tellDownload, tellDeps, tellSettings, tellLaunch} {
		err := o.Install(t.Context(), local(pack("toy", "2")), func(a string, _ map[string]any) error {
			if a == at {
				return gone
			}
			return nil
		})
		if !errors.Is(err, gone) {
			t.Errorf("%s: %v", at, err)
		}
		unchanged("nobody listening at "+at, "1")
	}
	// Nobody waits for a new generation that takes its time: the old one comes back.
	ctx, cancel := context.WithCancel(t.Context())
	err := o.Install(ctx, local(pack("toy", "3")), func(a string, _ map[string]any) error {
		if a == tellLaunch {
			go func() {
				defer cancel()
				until(t, "the new generation", func() bool { return r.version("a/toy") == "3" })
			}()
		}
		return nil
	})
	cancel()
	if err == nil {
		t.Error("it was installed")
	}
	unchanged("being left", "1")

	if err := try(pack("toy", "2")); err != nil {
		t.Fatal(err)
	}
	unchanged("an upgrade", "2")
	if b, err := os.ReadFile(env); err != nil || string(b) != "SECRET=1\n" {
		t.Errorf(".env: %q, %v", b, err)
	}
	if n := o.locks.Len(); n != 0 {
		t.Errorf("%d locks are left", n) // LM-14
	}
}

// Two identities whose directory would be the same are never mixed up.
func TestDirectoryOfAnotherIdentity(t *testing.T) {
	t.Parallel()
	dir, r := t.TempDir(), newRunner()
	o := begin(t, config(dir, r), runtimeConfig(4))
	mustInstall(t, o, local(pack("b__c", "1"))) // a, b__c
	other := packRaw("kind: Plugin\nmetadata:\n  author: a__b\n  name: c\n  version: 9\n")
	err := o.Install(t.Context(), local(other), new(progress).tell)
	isCode(t, err, errdefs.Conflict, "a/b__c")
	isCode(t, o.Delete(t.Context(), scope, "a__b", "c", new(progress).tell), errdefs.Conflict)
	if got := onDisk(t, dir); got != "plugins/a__b__c 1" {
		t.Error(got)
	}
}

// Two installations at once of one plugin come one after the other; of the same version
// one wins. Others do not wait for them.
func TestInstallationsAtOnce(t *testing.T) {
	t.Parallel()
	dir, r := t.TempDir(), newRunner()
	o := begin(t, config(dir, r), runtimeConfig(20))
	const n = 8
	errs := make(chan error, 2*n)
	for i := range n {
		go func() { errs <- o.Install(t.Context(), local(pack("toy", "1")), new(progress).tell) }()
		go func() { errs <- o.Install(t.Context(), local(pack(fmt.Sprint("other", i), "1")), new(progress).tell) }()
	}
	refused := 0
	for range 2 * n {
		if err := <-errs; err != nil {
			isCode(t, err, errdefs.Conflict, "already exists")
			refused++
		}
	}
	if refused != n-1 || len(r.starts()) != n+1 {
		t.Errorf("%d refused, %d started", refused, len(r.starts()))
	}
	go func() { errs <- o.Install(t.Context(), local(pack("toy", "2")), new(progress).tell) }()
	go func() { errs <- o.Install(t.Context(), local(pack("toy", "3")), new(progress).tell) }()
	if err := errors.Join(<-errs, <-errs); err != nil {
		t.Error(err)
	}
	if v := r.version("a/toy"); v != "2" && v != "3" || !strings.Contains(onDisk(t, dir), "plugins/a__toy "+v) {
		t.Errorf("%q runs, %q", v, onDisk(t, dir))
	}
}

// LM-35, LM-36: the progress of a deletion, of a plugin that runs and of one that does
// not; its files are gone.
func TestDeletion(t *testing.T) {
	t.Parallel()
	dir, r := t.TempDir(), newRunner()
	o := begin(t, config(dir, r), runtimeConfig(4))
	mustInstall(t, o, local(pack("toy", "1")))
	mustInstall(t, o, local(pack("still", "1")))
	r.Stop("a", "still") // it crashes all the time
	for name, want := range map[string][]string{
		"toy":   {tellShutDown, tellContainer, tellFiles, tellDeleted},
		"still": {tellSupervisor, tellFiles, tellDeleted},
	} {
		var p progress
		if err := o.Delete(t.Context(), scope, "a", name, p.tell); err != nil || !slices.Equal(p.all, want) {
			t.Errorf("%s: %q, %v", name, p.all, err)
		}
	}
	if got := onDisk(t, dir); got != "" {
		t.Error(got)
	}
	isCode(t, o.Delete(t.Context(), scope, "a", "toy", new(progress).tell), errdefs.NotFound, "Plugin a/toy not found")
	isCode(t, o.Restart(t.Context(), scope, "a", "toy", new(progress).tell), errdefs.NotFound)
	isCode(t, o.Upgrade(t.Context(), scope, "a", "toy", new(progress).tell), errdefs.NotFound)
	// Once it is stopped, a deletion is finished whether or not anybody listens.
	mustInstall(t, o, local(pack("toy", "1")))
	gone := errors.New("LangBot hung up")
	err := o.Delete(t.Context(), scope, "a", "toy", func(a string, _ map[string]any) error {
		if a != tellShutDown {
			return gone
		}
		return nil
	})
	if !errors.Is(err, gone) || onDisk(t, dir) != "" {
		t.Errorf("%v, %q", err, onDisk(t, dir))
	}
}

// LM-34, LM-35, LM-37: what is refused while an author works on the plugin.
func TestUnderDevelopment(t *testing.T) {
	t.Parallel()
	dir, r := t.TempDir(), newRunner()
	o := begin(t, config(dir, r), runtimeConfig(4))
	r.debug["a/toy"] = true
	isCode(t, o.Install(t.Context(), local(pack("toy", "1")), new(progress).tell), errdefs.Conflict, "debugged")
	isCode(t, o.Delete(t.Context(), scope, "a", "toy", new(progress).tell), errdefs.Conflict, "debugged")
	isCode(t, o.Upgrade(t.Context(), scope, "a", "toy", new(progress).tell), errdefs.Conflict, "debugged")
	var p progress
	if err := o.Restart(t.Context(), scope, "a", "toy", p.tell); err != nil || r.ended != 1 || len(r.starts()) != 0 ||
		!slices.Equal(p.all, []string{tellShutDown, tellContainer, tellRestarted}) {
		t.Errorf("%q, %v, ended %d", p.all, err, r.ended)
	}
}

// AP-11, AP-12, LM-06: nothing is touched before the handshake, nothing at all in the
// profile shared, and nothing is started before the Workspace is known. The capacity of
// the policy bounds how many run.
func TestWhenItBegins(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	{
		o := begin(t, config(dir, newRunner()), runtimeConfig(9))
		for _, name := range []string{"one", "two", "three"} {
			mustInstall(t, o, local(pack(name, "1")))
		}
		o.Close()
	}
	leftover := filepath.Join(dir, stagingDir, "x")
	if err := os.Mkdir(leftover, 0o700); err != nil {
		t.Fatal(err)
	}
	quiet := newRunner()
	o, err := New(config(dir, quiet))
	if err != nil {
		t.Fatal(err)
	}
	isCode(t, o.Restart(t.Context(), scope, "a", "one", new(progress).tell), errdefs.Unavailable, "not configured")
	o.Configured(pluginwire.RuntimeConfig{Profile: pluginwire.ProfileShared})
	isCode(t, o.Restart(t.Context(), scope, "a", "one", new(progress).tell), errdefs.Unavailable, "not configured")
	o.Close()
	if _, err := os.Stat(leftover); err != nil || len(quiet.starts()) != 0 {
		t.Errorf("the directory was touched: %v, %v", err, quiet.starts())
	}

	r := newRunner()
	r.pin = make(chan struct{})
	o = begin(t, config(dir, r), runtimeConfig(2))
	until(t, "the repair", func() bool { _, err := os.Stat(leftover); return os.IsNotExist(err) })
	if len(r.starts()) != 0 {
		t.Error("started without a Workspace")
	}
	close(r.pin)
	until(t, "the start", func() bool { return len(r.starts()) == 2 })
	isCode(t, o.Install(t.Context(), local(pack("four", "1")), new(progress).tell), errdefs.Exhausted, "room for: 2")
	if got := onDisk(t, dir); strings.Contains(got, "four") {
		t.Error(got)
	}
	// One that found no room is started when another goes.
	if err := o.Delete(t.Context(), scope, "a", r.starts()[0].Name, new(progress).tell); err != nil {
		t.Error(err)
	}
	until(t, "the third", func() bool { return len(r.starts()) == 3 })
	there := r.starts()[1].Name
	o.Close()
	isCode(t, o.Restart(t.Context(), scope, "a", "one", new(progress).tell), errdefs.Unavailable, "shutting down")

	r = newRunner()
	c := config(dir, r)
	c.DebugOnly = true
	o = begin(t, c, runtimeConfig(2))
	if err := o.Restart(t.Context(), scope, "a", there, new(progress).tell); err != nil || len(r.starts()) != 1 {
		t.Errorf("%v, %v", err, r.starts())
	}
}

// While a plugin is stopped in order to start again, nobody takes its place: not at a
// restart, nor while another version of it takes over or is taken back.
func TestPlaceIsKept(t *testing.T) {
	t.Parallel()
	dir, r := t.TempDir(), newRunner()
	r.broken["3"] = true
	c := config(dir, r)
	var at string // where another plugin is installed
	var o *Owner
	tried := 0
	other := func() {
		at = ""
		tried++
		var p progress
		isCode(t, o.Install(t.Context(), local(pack("other", "1")), p.tell), errdefs.Exhausted, "room for: 1")
		if slices.Contains(p.all, tellSettings) {
			t.Error("LangBot was told of a plugin for which there is no room")
		}
	}
	c.step = func(name string) error {
		if name == at {
			other()
		}
		return nil
	}
	o = begin(t, c, runtimeConfig(1))
	mustInstall(t, o, local(pack("toy", "1")))
	err := o.Restart(t.Context(), scope, "a", "toy", func(action string, _ map[string]any) error {
		if action == tellContainer {
			other()
		}
		return nil
	})
	if err != nil || r.version("a/toy") != "1" {
		t.Errorf("restart: %v, runs %q", err, r.version("a/toy"))
	}
	for i, step := range []string{"set aside", "put in place", "start", "commit"} {
		at = step
		version := fmt.Sprint("2.", i)
		mustInstall(t, o, local(pack("toy", version)))
		if r.version("a/toy") != version {
			t.Errorf("%s: runs %q", step, r.version("a/toy"))
		}
	}
	for _, step := range []string{"undo", "bring back"} {
		at = step
		isCode(t, o.Install(t.Context(), local(pack("toy", "3")), new(progress).tell), errdefs.Unavailable)
		if r.version("a/toy") != "2.3" {
			t.Errorf("%s: runs %q", step, r.version("a/toy"))
		}
	}
	if tried != 7 {
		t.Errorf("%d tries", tried)
	}
	// A new plugin that does not start gives its place back.
	if err := o.Delete(t.Context(), scope, "a", "toy", new(progress).tell); err != nil {
		t.Fatal(err)
	}
	isCode(t, o.Install(t.Context(), local(pack("toy", "3")), new(progress).tell), errdefs.Unavailable)
	mustInstall(t, o, local(pack("toy", "1")))
}

// A place that becomes free goes to the first that waits and is still there.
func TestRoomForTheNext(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	{
		o := begin(t, config(dir, newRunner()), runtimeConfig(9))
		for _, name := range []string{"one", "two", "three", "four"} {
			mustInstall(t, o, local(pack(name, "1")))
		}
		o.Close()
	}
	r := newRunner()
	o := begin(t, config(dir, r), runtimeConfig(1))
	queue := func() (names []string) {
		o.mu.Lock()
		defer o.mu.Unlock()
		for _, p := range o.waiting {
			names = append(names, p.Name)
		}
		return names
	}
	until(t, "three wait", func() bool { return len(queue()) == 3 })
	waiting := queue()
	drop := func(name string) {
		if err := o.Delete(t.Context(), scope, "a", name, new(progress).tell); err != nil {
			t.Fatal(err)
		}
	}
	drop(waiting[1]) // which frees no place
	until(t, "three wait, one of which is gone", func() bool { return len(queue()) == 3 })
	drop(r.starts()[0].Name)
	until(t, "the first that waits starts", func() bool { return r.version("a/"+waiting[0]) != "" })
	drop(waiting[0])
	until(t, "the last that waits starts", func() bool { return r.version("a/"+waiting[2]) != "" })
	if n := len(r.starts()); n != 3 {
		t.Errorf("%d were started", n)
	}
}
