package broker

import (
	"encoding/hex"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func TestCheckOpenRefuses(t *testing.T) {
	t.Parallel()
	good := func() api.OpenRequest { return api.OpenRequest{RequestID: "r", Argv: []string{"true"}} }
	many := map[string]string{}
	for i := range maxEnvEntries + 1 {
		many["V"+decimal(int64(i))] = ""
	}
	big := map[string]string{}
	for i := range 9 {
		big["B"+decimal(int64(i))] = strings.Repeat("x", maxEnvValue)
	}
	for name, change := range map[string]func(*api.OpenRequest){
		"no request id":     func(r *api.OpenRequest) { r.RequestID = "" },
		"bad request id":    func(r *api.OpenRequest) { r.RequestID = "a/b" },
		"no argv":           func(r *api.OpenRequest) { r.Argv = nil },
		"empty program":     func(r *api.OpenRequest) { r.Argv = []string{""} },
		"NUL in argv":       func(r *api.OpenRequest) { r.Argv = []string{"a", "b\x00c"} },
		"too many args":     func(r *api.OpenRequest) { r.Argv = make([]string, maxArgs+1); r.Argv[0] = "a" },
		"an arg too long":   func(r *api.OpenRequest) { r.Argv = []string{"a", strings.Repeat("x", maxArg)} },
		"argv too long":     func(r *api.OpenRequest) { r.Argv = slices.Repeat([]string{strings.Repeat("x", maxArg-1)}, 9) },
		"absolute cwd":      func(r *api.OpenRequest) { r.Cwd = "/etc" },
		"escaping cwd":      func(r *api.OpenRequest) { r.Cwd = "a/../../b" },
		"NUL in cwd":        func(r *api.OpenRequest) { r.Cwd = "a\x00" },
		"long cwd":          func(r *api.OpenRequest) { r.Cwd = strings.Repeat("a", maxCwd+1) },
		"env name empty":    func(r *api.OpenRequest) { r.Env = map[string]string{"": "x"} },
		"env name digit":    func(r *api.OpenRequest) { r.Env = map[string]string{"1A": "x"} },
		"env name equals":   func(r *api.OpenRequest) { r.Env = map[string]string{"A=B": "x"} },
		"env name long":     func(r *api.OpenRequest) { r.Env = map[string]string{strings.Repeat("A", maxEnvName+1): "x"} },
		"env value NUL":     func(r *api.OpenRequest) { r.Env = map[string]string{"A": "\x00"} },
		"env value long":    func(r *api.OpenRequest) { r.Env = map[string]string{"A": strings.Repeat("x", maxEnvValue+1)} },
		"env too many":      func(r *api.OpenRequest) { r.Env = many },
		"env too big":       func(r *api.OpenRequest) { r.Env = big },
		"reserved HOME":     func(r *api.OpenRequest) { r.Env = map[string]string{"HOME": "/root"} },
		"reserved LD":       func(r *api.OpenRequest) { r.Env = map[string]string{"LD_PRELOAD": "x.so"} },
		"reserved XDG":      func(r *api.OpenRequest) { r.Env = map[string]string{"XDG_RUNTIME_DIR": "x"} },
		"reserved key":      func(r *api.OpenRequest) { r.Env = map[string]string{"OPENAI_API_KEY": "x"} },
		"reserved url":      func(r *api.OpenRequest) { r.Env = map[string]string{"ANTHROPIC_BASE_URL": "x"} },
		"reserved agent":    func(r *api.OpenRequest) { r.Env = map[string]string{"SSH_AUTH_SOCK": "x"} },
		"reserved docker":   func(r *api.OpenRequest) { r.Env = map[string]string{"DOCKER_HOST": "x"} },
		"reserved own":      func(r *api.OpenRequest) { r.Env = map[string]string{"STOCKADE_X": "x"} },
		"pty without rows":  func(r *api.OpenRequest) { r.PTY = &api.Winsize{Cols: 80} },
		"pty too wide":      func(r *api.OpenRequest) { r.PTY = &api.Winsize{Rows: 1, Cols: 5000} },
		"negative deadline": func(r *api.OpenRequest) { r.Limits.DeadlineMillis = -1 },
		"deadline too long": func(r *api.OpenRequest) { r.Limits.DeadlineMillis = int64(8 * 24 * time.Hour / time.Millisecond) },
		"spool too small":   func(r *api.OpenRequest) { r.Limits.SpoolBytes = 1 },
		"spool too big":     func(r *api.OpenRequest) { r.Limits.SpoolBytes = 1 << 40 },
		"memory too small":  func(r *api.OpenRequest) { r.Limits.MemoryBytes = 1 },
		"negative memory":   func(r *api.OpenRequest) { r.Limits.MemoryBytes = -1 },
		"negative pids":     func(r *api.OpenRequest) { r.Limits.Pids = -1 },
		"overflow unknown":  func(r *api.OpenRequest) { r.Limits.Overflow = "lose" },
	} {
		req := good()
		change(&req)
		if _, err := checkOpen(req, Limits{}.withDefaults()); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		} else if e := err.(*errdefs.Error); e.Message == "" {
			t.Errorf("%s: no message", name)
		}
	}
	if _, err := checkOpen(good(), Limits{}.withDefaults()); err != nil {
		t.Error(err)
	}
}

func TestSameWishSameDigest(t *testing.T) {
	t.Parallel()
	l := Limits{}.withDefaults()
	digest := func(r api.OpenRequest) [32]byte {
		r.RequestID = "r"
		c, err := checkOpen(r, l)
		if err != nil {
			t.Fatal(err)
		}
		return digestOf(c, "box")
	}
	base := api.OpenRequest{Argv: []string{"a", "b"}, Cwd: "x/y", Env: map[string]string{"A": "1", "B": "2"}}
	want := digest(base)
	for name, change := range map[string]func(*api.OpenRequest){
		"cwd spelled differently": func(r *api.OpenRequest) { r.Cwd = "./x//y/." },
		"another request id":      func(r *api.OpenRequest) { r.RequestID = "s" },
		"the box named":           func(r *api.OpenRequest) { r.Box = "box" },
	} {
		r := base
		change(&r)
		if digest(r) != want {
			t.Errorf("%s: the digest differs", name)
		}
	}
	one, two := base, base
	one.Env, two.Env = nil, map[string]string{}
	if digest(one) != digest(two) {
		t.Error("no env and an empty env differ")
	}
	for name, change := range map[string]func(*api.OpenRequest){
		"argv split": func(r *api.OpenRequest) { r.Argv = []string{"ab"} }, "argv order": func(r *api.OpenRequest) { r.Argv = []string{"b", "a"} },
		"cwd": func(r *api.OpenRequest) { r.Cwd = "x" }, "env": func(r *api.OpenRequest) { r.Env = map[string]string{"A": "1"} },
		"stdin": func(r *api.OpenRequest) { r.Stdin = true }, "pty": func(r *api.OpenRequest) { r.PTY = &api.Winsize{Rows: 1, Cols: 1} },
		"limits": func(r *api.OpenRequest) { r.Limits.Pids = 77 },
	} {
		r := base
		change(&r)
		if digest(r) == want {
			t.Errorf("%s: the digest is the same", name)
		}
	}
}

func TestEnvironmentStartsFromNothing(t *testing.T) {
	t.Setenv("STOCKADE_TEST_SECRET", "hunter2")
	t.Setenv("PATH", "/server/bin")
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.StringMatching(`[A-Za-z_][A-Za-z0-9_]{0,12}`)
		overrides := rapid.MapOf(names, rapid.StringN(0, 20, -1)).Draw(t, "overrides")
		for n, v := range overrides {
			if checkEnv(map[string]string{n: v}) != nil {
				delete(overrides, n)
			}
		}
		pty := rapid.Bool().Draw(t, "pty")
		models := map[string]string{"OPENAI_BASE_URL": "http://127.0.0.1:1"}
		got := environment(pty, overrides, models)
		if !slices.IsSorted(got) {
			t.Fatal("not sorted")
		}
		base := baseEnv(pty)
		for _, kv := range got {
			name, value, ok := strings.Cut(kv, "=")
			if !ok || strings.Contains(kv, "hunter2") || strings.Contains(kv, "/server/bin") {
				t.Fatalf("entry %q", kv)
			}
			want, set := overrides[name]
			if m, ok := models[name]; ok {
				want = m
			} else if !set {
				if want, set = base[name]; !set {
					t.Fatalf("%s comes from nowhere", name)
				}
			}
			if value != want {
				t.Fatalf("%s is %q, want %q", name, value, want)
			}
		}
		for n := range base {
			if reserved(n) && !slices.Contains(got, n+"="+base[n]) {
				t.Fatalf("%s was overridden", n)
			}
		}
	})
}

func FuzzParseCursor(f *testing.F) {
	const handle = "proc_aaaaaaaaaaaaaaaaaaaabcdefg"
	for _, s := range []string{"", "bcdefg.0", "bcdefg.12", "bcdefg.-1", "x.1", "bcdefg.9007199254740993", "bcdefg.01", "bcdefg.+1", "0000\x000."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		at, oldest, err := parseCursor(handle, s)
		if err != nil {
			if !errdefs.Is(err, errdefs.Invalid) || strings.ContainsRune(err.Error(), 0) {
				t.Fatal(err)
			}
			return
		}
		if oldest != (s == "") || !oldest && cursorAt(handle, at) != s {
			t.Fatalf("%q was read as %d", s, at)
		}
	})
}

func FuzzCwd(f *testing.F) {
	for _, s := range []string{"", ".", "a", "a/b", "../a", "a/..", "/", "a//b", "...", "a/\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := cleanCwd(s)
		if err != nil {
			return
		}
		if strings.HasPrefix(got, "/") || got == ".." || strings.HasPrefix(got, "../") || strings.Contains(got, "/../") || strings.ContainsRune(got, 0) {
			t.Fatalf("%q became %q", s, got)
		}
		if again, err := cleanCwd(got); err != nil || again != got {
			t.Fatalf("%q is not stable: %q, %v", got, again, err)
		}
	})
}

func FuzzCut(f *testing.F) {
	f.Add("a\nb")
	f.Add(strings.Repeat("é", 600))
	f.Fuzz(func(t *testing.T, s string) {
		got := cut(s)
		if len(got) > maxText+len("…")*maxText || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Fatalf("%q", got)
		}
		if b, err := json.Marshal(got); err != nil || len(b) == 0 {
			t.Fatal(err)
		}
	})
}

func TestRefusalsKeepTheirCode(t *testing.T) {
	t.Parallel()
	for _, code := range errdefs.Codes() {
		p := refusedRecord(cut(refusedPrefix + string(code) + "): the directory (src): is missing"))
		err := refusedError(p)
		if !errdefs.Is(err, code) || !strings.Contains(err.Error(), "the directory (src): is missing") {
			t.Errorf("%s: %v", code, err)
		}
	}
	for _, reason := range []string{"", "enough", "refused (nonsense): x", "refused (invalid)"} {
		if err := refusedError(refusedRecord(reason)); err != nil {
			t.Errorf("%q: %v", reason, err)
		}
	}
}
func refusedRecord(reason string) store.Process {
	return store.Process{Handle: "proc_x", State: api.StateNeverStarted, HostID: "host_x", Reason: reason}
}

// The digests are in ledgers: one that changes with an upgrade makes a conflict of
// every repeated open (P1). A new field must not show where it is not set.
func TestDigestsStayTheSame(t *testing.T) {
	t.Parallel()
	for want, r := range map[string]api.OpenRequest{
		"13311b09943064cbe4077e23ee4ba502d0bdc4b3dfb88b5d9e64fd0e2f48f246": {Argv: []string{"true"}},
		"b27701de2e9f97f15ab6528d839049282143cad2bf772672636a52cc7031f6c9": {Argv: []string{"a", "<&>é"}, Cwd: "x/y", Env: map[string]string{"B": "2", "A": "1"}, Stdin: true, PTY: &api.Winsize{Rows: 24, Cols: 80},
			Limits: api.Limits{DeadlineMillis: 1, SpoolBytes: 1 << 20, Overflow: api.OverflowDropOldest, MemoryBytes: 1 << 30, Pids: 99}},
	} {
		d := digestOf(r, "box_aaaaaaaaaaaaaaaaaaaaaaaaaa")
		if got := hex.EncodeToString(d[:]); got != want {
			t.Errorf("%+v: %s, want %s", r, got, want)
		}
	}
}
