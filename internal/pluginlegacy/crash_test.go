package pluginlegacy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// The environment of a child that is killed at a step.
const (
	crashAt  = "PLUGINLEGACY_CRASH_AT"
	crashDo  = "PLUGINLEGACY_CRASH_DO"
	crashDir = "PLUGINLEGACY_CRASH_DIR"
)

// crash does something and kills this process at a step.
func crash() {
	r := newRunner()
	r.broken["3"] = true
	c := config(os.Getenv(crashDir), r)
	c.step = func(name string) error {
		if name == os.Getenv(crashAt) {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		return nil
	}
	o, err := New(c)
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	o.Configured(runtimeConfig(4))
	p := new(progress)
	if os.Getenv(crashDo) == "delete" {
		err = o.Delete(context.Background(), scope, "a", "toy", p.tell)
	} else {
		err = o.Install(context.Background(), local(pack("toy", os.Getenv(crashDo))), p.tell)
	}
	fmt.Println("not killed:", err, p.all)
	os.Exit(4)
}

// A runtime that is killed between any two steps leaves the old generation or the new
// one, whole, and nothing else, once the next one has begun.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	const old, next = "plugins/a__toy 1", "plugins/a__toy 2"
	for _, c := range []struct{ do, at, had, want string }{
		{"2", "stop", "1", old},
		{"2", "set aside", "1", old},
		{"2", "put in place", "1", old},
		{"2", "start", "1", old},
		{"2", "commit", "1", old},
		{"3", "undo", "1", old},
		{"3", "bring back", "1", old},
		{"delete", "delete", "1", old},
		{"2", "stop", "", ""},
		{"2", "put in place", "", ""},
		{"2", "start", "", next}, // there was nothing before, and it is whole
		{"3", "undo", "", "plugins/a__toy 3"},
	} {
		t.Run(strings.Join([]string{c.do, c.at, "over", c.had}, " "), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if c.had != "" {
				mustInstall(t, begin(t, config(dir, newRunner()), runtimeConfig(4)), local(pack("toy", c.had)))
			}
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), crashAt+"="+c.at, crashDo+"="+c.do, crashDir+"="+dir)
			out, err := cmd.CombinedOutput()
			if e, ok := errors.AsType[*exec.ExitError](err); !ok || e.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("%v: %s", err, out)
			}
			r := newRunner()
			o := begin(t, config(dir, r), runtimeConfig(4))
			// The directory is repaired before anything else is done.
			isCode(t, o.Restart(t.Context(), scope, "a", "other", new(progress).tell), errdefs.NotFound)
			if got := onDisk(t, dir); got != c.want {
				t.Errorf("on disk: %q, want %q", got, c.want)
			}
			if c.want != "" {
				_, want, _ := strings.Cut(c.want, " ")
				until(t, "the plugin running", func() bool { return r.version("a/toy") == want })
			}
		})
	}
}
