package config

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/stockade-run/stockade/internal/errdefs"
)

var update = flag.Bool("update", false, "rewrite docs/configuration.md")

func TestReferenceIsCurrent(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "configuration.md")
	if *update {
		if err := os.WriteFile(path, []byte(Reference()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != Reference() {
		t.Error("docs/configuration.md is not current: run go test ./internal/config -update")
	}
}

// TestEverySettingThreeWays sets each setting by file, environment and flag and
// sees it arrive, and that the stronger wins.
func TestEverySettingThreeWays(t *testing.T) {
	sample := map[string][3]string{ // file, env, flag
		"string": {"a", "b", "c"}, "int": {"11", "12", "13"}, "int64": {"67108865", "67108866", "67108867"},
		"time.Duration": {"1h1m0s", "1h2m0s", "1h3m0s"}, "[]string": {"", "", ""}, "bool": {"false", "true", "false"},
	}
	special := map[string][3]string{
		"log.level": {"debug", "warn", "error"}, "log.format": {"json", "text", "json"},
		"host.socket": {"/a", "/b", "/c"}, "box.cpu_millis": {"100", "101", "102"}, "box.pids": {"100", "101", "102"},
		"box.max_cpu_millis": {"100", "101", "102"}, "box.max_pids": {"100", "101", "102"},
		"relay.profile": {"dedicated", "shared", "dedicated"}, "relay.message_bytes": {"65537", "65538", "65539"},
		"relay.hello_timeout":  {"1s", "2s", "3s"},
		"relay.cancel_timeout": {"1s", "2s", "3s"},
	}
	for _, s := range Settings() {
		if s.Key == "version" {
			continue
		}
		typ := reflect.TypeOf(s.Default).String()
		v, ok := special[s.Key]
		if !ok {
			v = sample[typ]
		}
		if typ == "[]string" {
			switch s.Key {
			case "host.tools":
				v = [3]string{"x=/a", "x=/b", "x=/c"}
			case "models", "relay.tools":
				v = [3]string{"m=http://a", "m=http://b", "m=http://c"}
			default:
				v = [3]string{"/a", "/b", "/c"}
			}
		}
		t.Run(s.Key, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "c.yaml")
			var doc string
			parts := strings.Split(s.Key, ".")
			for i, p := range parts {
				doc += strings.Repeat("  ", i) + p + ":"
				if i < len(parts)-1 {
					doc += "\n"
				}
			}
			if typ == "[]string" {
				doc += " [\"" + v[0] + "\"]\n"
			} else {
				doc += " " + v[0] + "\n"
			}
			if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
				t.Fatal(err)
			}
			get := func(fs *pflag.FlagSet) string {
				t.Helper()
				c, err := Load(file, fs)
				if err != nil {
					t.Fatal(err)
				}
				var got string
				walk(reflect.ValueOf(&c).Elem(), "", func(key, _ string, fv reflect.Value) {
					if key == s.Key {
						got = strings.Trim(strings.TrimSpace(toString(fv)), "[]")
					}
				})
				return got
			}
			if got := get(nil); got != v[0] {
				t.Errorf("from the file: %q, want %q", got, v[0])
			}
			t.Setenv(s.Env, v[1])
			if got := get(nil); got != v[1] {
				t.Errorf("environment over file: %q, want %q", got, v[1])
			}
			fs := pflag.NewFlagSet("", pflag.ContinueOnError)
			AddFlags(fs)
			if err := fs.Parse([]string{"--" + s.Flag + "=" + v[2]}); err != nil {
				t.Fatal(err)
			}
			if got := get(fs); got != v[2] {
				t.Errorf("flag over environment: %q, want %q", got, v[2])
			}
		})
	}
}

func toString(v reflect.Value) string {
	if s, ok := v.Interface().(interface{ String() string }); ok {
		return s.String()
	}
	return strings.TrimSpace(strings.Join(strings.Fields(sprint(v.Interface())), " "))
}

func TestRefusals(t *testing.T) {
	for name, tc := range map[string]struct{ doc, want string }{
		"unknown key":     {"nonsense: 1\n", `unknown setting "nonsense"`},
		"newer file":      {"version: 2\n", "version 2, this program knows 1"},
		"not YAML":        {"a: [\n", "cannot be used"},
		"wrong type":      {"box:\n  pids: many\n", "wrong type"},
		"relay profile":   {"relay:\n  profile: open\n", "neither shared nor dedicated"},
		"relay workspace": {"relay:\n  workspace: a b\n", "relay.workspace"},
		"relay limit":     {"relay:\n  max_jobs: 0\n", "relay.max_jobs: 0 is outside"},
		"out of range":    {"box:\n  pids: 1\n", "box.pids: 1 is outside"},
		"relative mount":  {"host:\n  allow_mounts: [a]\n", "not a clean absolute path"},
		"model scheme":    {"models: ['m=ftp://x']\n", "http(s)"},
		"model twice":     {"models: ['m=http://x','m=http://y']\n", "used twice"},
		"model key in it": {"models: ['m=http://user:secret@x']\n", "without user"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "c.yaml")
			if err := os.WriteFile(file, []byte(tc.doc), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Load(file, nil)
			if !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an invalid error with %q", err, tc.want)
			}
		})
	}
}

func sprint(v any) string {
	if list, ok := v.([]string); ok {
		return strings.Join(list, " ")
	}
	return strings.TrimSpace(fmt.Sprint(v))
}

func TestStrays(t *testing.T) {
	t.Parallel()
	got := Strays([]string{"STOCKADE_BOX_PIDS=9", "STOCKADE_RUN_TLL=1h", "STOCKADE_BOX_PDIS=9", "STOCKADE_KEY=k", "STOCKADE_STATE_DIR=/x", "STOCKADE_PORT=1", "HOME=/"})
	if want := []string{"STOCKADE_BOX_PDIS", "STOCKADE_RUN_TLL"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestAWrongTypeIsOneLineThatNamesTheSetting(t *testing.T) {
	t.Setenv("STOCKADE_BOX_PIDS", "many")
	_, err := Load("", nil)
	if err == nil || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "box.pids") {
		t.Errorf("%v", err)
	}
}
