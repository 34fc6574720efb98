package pluginhost

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// TestLastUsedIsLaunchedFirst: a runtime that comes back launches what was used last
// first, whatever the order LangBot says; what it answers keeps LangBot's.
func TestLastUsedIsLaunchedFirst(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	one := policy()
	one.MaxConcurrentRestarts = 1
	var want []pluginwire.DesiredState
	var all []string
	var p pkg
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir)
		defer r.close()
		if err := r.m.Configure(t.Context(), runtimeConfig(pluginwire.ProfileOSS, one)); err != nil {
			t.Fatal(err)
		}
		p = pack(t, "toy", "1")
		for _, uuid := range []string{"a", "b", "c", "d", "e"} {
			b := p.bind(uuid, 1, 1)
			r.run(b, p, pluginwire.ModeDedicated)
			want = append(want, pluginwire.DesiredState{Binding: b, Enabled: true, Mode: pluginwire.ModeDedicated})
			all = append(all, uuid)
		}
		for _, n := range []int{1, 3, 1, 2} { // so that c was used last, b and d before
			r.call(want[n].Binding)
		}
		synctest.Wait()
	})
	raw, err := os.ReadFile(filepath.Join(dir, "plugin-runtime", lastUseFile))
	if err != nil || string(raw) != `["c","b","d"]` {
		t.Fatalf("the record is %s, %v", raw, err)
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir)
		defer r.close()
		if err := r.m.Configure(t.Context(), runtimeConfig(pluginwire.ProfileOSS, one)); err != nil {
			t.Fatal(err)
		}
		res, err := r.m.Reconcile(t.Context(), want)
		if err != nil || !slices.Equal(res.Applied, all) {
			t.Fatalf("%+v, %v", res, err)
		}
		synctest.Wait()
		var order []string
		for n := range r.launcher.count() {
			order = append(order, r.launcher.nth(n).spec.Name)
		}
		if got := strings.Join(order, " "); got != "c b d a e" {
			t.Errorf("launched in the order %s", got)
		}
	})
}

// TestLastUseRecord: it is saved within its time and not with every use, is bounded,
// forgets what LangBot does not want, and damage costs the order and nothing more.
func TestLastUseRecord(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, lastUseFile)
	read := func() string { b, _ := os.ReadFile(file); return string(b) }
	synctest.Test(t, func(t *testing.T) {
		u := openLastUse(dir, slog.New(slog.DiscardHandler))
		u.touch(u.of("a"))
		u.touch(u.of("b"))
		if read() != "" {
			t.Error("saved at once")
		}
		time.Sleep(saveLastUse)
		synctest.Wait()
		if got := read(); got != `["b","a"]` {
			t.Errorf("after %s: %s", saveLastUse, got)
		}
		u.touch(u.of("a"))
		u.keep(map[string]pluginwire.Context{"a": {}})
		time.Sleep(saveLastUse)
		synctest.Wait()
		if got := read(); got != `["a"]` {
			t.Errorf("after the next: %s", got)
		}
		for n := range maxLastUse + 10 {
			u.touch(u.of("i" + strconv.Itoa(n)))
		}
		u.close()
		u.close()
		if n := strings.Count(read(), ","); n >= maxLastUse {
			t.Errorf("%d installations are remembered", n+1)
		}
	})
	for _, damage := range []string{"", "{", `{"a":1}`, `["../../etc","ok"]`, "\x00"} {
		if err := os.WriteFile(file, []byte(damage), 0o600); err != nil {
			t.Fatal(err)
		}
		u := openLastUse(dir, slog.New(slog.DiscardHandler))
		if len(u.at) > 1 {
			t.Errorf("%q gave %v", damage, u.at)
		}
		u.close()
	}
}
