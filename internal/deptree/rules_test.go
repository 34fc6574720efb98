package deptree

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

// DE-05, DE-06, DE-07 and the table of requirement lines. want is what the
// installer is given, or a part of the refusal.
func TestRules(t *testing.T) {
	t.Parallel()
	interp := map[string]Interpreter{}
	for _, sdk := range []string{"0.7.18", "0.6.3", "0.6.0b5", "0.6.10", "", "unknown"} {
		interp[sdk] = interpreter(t, sdk)
	}
	for name, c := range map[string]struct {
		sdk, text string
		relaxed   bool
		code      errdefs.Code // "" is accepted
		want      string
	}{
		"empty lines":    {text: "\n  \n# a\n\t# b\n", want: ""},
		"simple":         {text: "Requests", want: "Requests"},
		"stripped":       {text: "  a  \r\nb\r\n", want: "a|b"},
		"extras":         {text: "a[x, y] >= 1 , < 2", want: "a[x,y]<2,>=1"},
		"marker":         {text: "a; python_version >= '3'", want: `a; python_version >= "3"`},
		"URL":            {text: "a @ https://h/a.whl", want: "a @ https://h/a.whl"},
		"other newline":  {text: "a\x0cb\u2028c", want: "a|b|c"},
		"option":         {text: "a\n\n -i http://evil/", code: errdefs.Invalid, want: "pip options (line 3)"},
		"long option":    {text: "--index-url http://evil/", code: errdefs.Invalid, want: "pip options (line 1)"},
		"include":        {text: "-r other.txt", code: errdefs.Invalid, want: "pip options"},
		"editable":       {text: "-e .", code: errdefs.Invalid, want: "pip options"},
		"comment behind": {text: "a # why", code: errdefs.Invalid, want: "invalid requirement (line 1)"},
		"hash":           {text: "a==1 --hash=sha256:00", code: errdefs.Invalid, want: "invalid requirement"},
		"path":           {text: "./a.whl", code: errdefs.Invalid, want: "invalid requirement"},
		"bare VCS":       {text: "git+https://h/a.git", code: errdefs.Invalid, want: "invalid requirement"},
		"bare URL":       {text: "https://h/a.whl", code: errdefs.Invalid, want: "invalid requirement"},
		"continuation":   {text: "a \\\n--index-url x", code: errdefs.Invalid, want: "invalid requirement (line 1)"},
		"deep marker":    {text: "a; " + strings.Repeat("(", 100_000) + "python_version > '3'", code: errdefs.Invalid, want: "invalid requirement"},
		"variable":       {text: "a @ https://h/${HTTPS_PROXY}", code: errdefs.Invalid, want: "variable"},
		"backslash URL":  {text: `a @ https://h/a\`, code: errdefs.Invalid, want: "variable"},
		"too many":       {text: strings.Repeat("a\n", 1025), code: errdefs.Exhausted, want: "too many requirements"},
		"just so many":   {text: strings.Repeat("a\n", 1024), want: strings.TrimSuffix(strings.Repeat("a|", 1024), "|")},
		"many SDK lines": {text: strings.Repeat("langbot-plugin\n", 2000) + "a", want: "a"},

		"SDK satisfied":      {text: "langbot-plugin>=0.7,<0.8\na", want: "a"},
		"SDK odd spelling":   {text: "LangBot_Plugin ~= 0.7.1", want: ""},
		"SDK any":            {text: "langbot-plugin", sdk: "0.6.0b5", want: ""},
		"SDK exact":          {text: "langbot-plugin==0.7.18", want: ""},
		"SDK pre counts":     {text: "langbot-plugin>=0.5", sdk: "0.6.0b5", want: ""},
		"SDK other":          {text: "a\nlangbot-plugin==0.7.17", code: errdefs.Invalid, want: "plugin requires langbot-plugin==0.7.17, but the Runtime provides langbot-plugin==0.7.18"},
		"SDK newer":          {text: "langbot-plugin>=0.8", code: errdefs.Invalid, want: "Runtime provides"},
		"SDK beta":           {text: "langbot-plugin==0.6.0b3", sdk: "0.6.0b5", code: errdefs.Invalid, want: "Runtime provides"},
		"SDK strict 0.6":     {text: "langbot-plugin==0.6.1", sdk: "0.6.3", code: errdefs.Invalid, want: "Runtime provides"},
		"SDK URL":            {text: "langbot-plugin @ https://h/x.whl", code: errdefs.Invalid, want: "direct URL"},
		"SDK marker":         {text: "langbot-plugin==9 ; python_version < '3'", want: ""},
		"SDK marker URL":     {text: "langbot-plugin @ https://h/x.whl ; python_version < '3'", want: ""},
		"SDK extra marker":   {text: "langbot-plugin==9 ; extra == 'x'", want: ""},
		"SDK unknown":        {text: "langbot-plugin", sdk: "none", code: errdefs.Unavailable, want: "unavailable"},
		"SDK no version":     {text: "langbot-plugin", sdk: "unknown", code: errdefs.Unavailable, want: "unavailable"},
		"no SDK, none asked": {text: "a", sdk: "none", want: "a"},

		"relaxed":             {text: "langbot-plugin==0.6.1", sdk: "0.6.3", relaxed: true, want: ""},
		"relaxed beta":        {text: "langbot-plugin==0.6.0b3", sdk: "0.6.0b5", relaxed: true, want: ""},
		"relaxed newer":       {text: "langbot-plugin==0.6.11", sdk: "0.6.10", relaxed: true, code: errdefs.Invalid, want: "Runtime provides"},
		"relaxed wildcard":    {text: "langbot-plugin==0.6.1.*", sdk: "0.6.3", relaxed: true, code: errdefs.Invalid, want: "Runtime provides"},
		"relaxed two":         {text: "langbot-plugin==0.6.1,!=0.6.3", sdk: "0.6.3", relaxed: true, code: errdefs.Invalid, want: "Runtime provides"},
		"relaxed other pin":   {text: "langbot-plugin==0.5.5", sdk: "0.6.3", relaxed: true, code: errdefs.Invalid, want: "Runtime provides"},
		"relaxed other ours":  {text: "langbot-plugin==0.6.1", sdk: "0.7.18", relaxed: true, code: errdefs.Invalid, want: "Runtime provides"},
		"relaxed compatible":  {text: "langbot-plugin~=0.6.1,<0.6.3", sdk: "0.6.3", relaxed: true, code: errdefs.Invalid, want: "Runtime provides"},
		"relaxed then strict": {text: "langbot-plugin==0.6.1\nlangbot-plugin==0.5", sdk: "0.6.3", relaxed: true, code: errdefs.Invalid, want: "0.5"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fake{}
			sdk := map[string]string{"": "0.7.18", "none": ""}[c.sdk]
			if sdk == "" && c.sdk != "none" {
				sdk = c.sdk
			}
			s := openStore(t, Config{Install: f, Interp: interp[sdk], RelaxedPin: c.relaxed})
			if c.code == "" {
				r, err := s.parse(t.Context(), []byte(c.text))
				got := strings.ReplaceAll(strings.Join(r.Requirements, "|"), "a@ ", "a @ ") // older libraries leave the blank out
				if err != nil || got != c.want {
					t.Errorf("got %q, %v", r.Requirements, err)
				}
				return
			}
			_, err := s.Prepare(t.Context(), someArtifact, code(t, c.text))
			if !errdefs.Is(err, c.code) || !strings.Contains(err.Error(), c.want) || f.runs.Load() != 0 {
				t.Errorf("got %v (%s), %d runs", err, errdefs.CodeOf(err), f.runs.Load())
			}
			onDisk(t, s)
		})
	}
}

// A tree that was admitted by the relaxation is not used by a strict store, and
// one of the Python runtime is held against the rules of ours.
func TestAdmissionOfCached(t *testing.T) {
	t.Parallel()
	dir, src := filepath.Join(t.TempDir(), "environments"), code(t, "langbot-plugin==0.6.1")
	cfg := Config{Dir: dir, Install: &fake{}, Interp: interpreter(t, "0.6.3")}
	strict := openStore(t, cfg)
	cfg.RelaxedPin = true
	relaxed := openStore(t, cfg)
	tree, err := relaxed.Prepare(t.Context(), someArtifact, src)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := relaxed.Prepare(t.Context(), someArtifact, src); err != nil {
			t.Error(err)
		}
		if _, err := strict.Prepare(t.Context(), someArtifact, src); err == nil || !strings.Contains(err.Error(), "plugin requires langbot-plugin==0.6.1") {
			t.Errorf("got %v", err)
		}
		// As the Python runtime leaves it.
		if err := os.Chmod(tree.Root, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(tree.Root, admissionName)); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(tree.Root, 0o555); err != nil {
			t.Fatal(err)
		}
	}
	if c := relaxed.Counters(); c.CacheHits != 2 || c.Misses != 1 {
		t.Errorf("%+v", c)
	}
}

func TestInterpreterTrouble(t *testing.T) {
	t.Parallel()
	script := filepath.Join(t.TempDir(), "python")
	for body, says := range map[string]string{
		"exit 3":                                 "cannot check",
		"echo nonsense":                          "cannot check",
		"head -c 20000000 /dev/zero":             "cannot check",
		`echo '{"error":{"kind":"no_library"}}'`: "ensurepip",
		`echo '{"error":{"kind":"other"}}'`:      "unknown reason",
	} {
		need.Program(t, script, "#!/bin/sh\ncat >/dev/null\n"+body+"\n")
		s := openStore(t, Config{Install: &fake{}, Interp: Interpreter{Path: script, SDK: "1"}})
		if _, err := s.Prepare(t.Context(), someArtifact, code(t, "a")); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", body, err)
		}
		onDisk(t, s)
	}
}
