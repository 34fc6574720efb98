package artifact

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// refusals are archives by rule; AS-03 to AS-08 and AS-10 are among them. unit is
// the limit of a file in the three that are as large as that.
func refusals(t testing.TB, unit int) map[string]struct {
	archive []byte
	code    errdefs.Code
	says    string
} {
	type want = struct {
		archive []byte
		code    errdefs.Code
		says    string
	}
	with := func(m ...member) []byte { return zipOf(t, append([]member{manifest()}, m...)...) }
	yaml := func(s string) []byte { return zipOf(t, member{name: "manifest.yaml", content: s}) }
	many := []member{manifest()}
	for i := range 512 {
		many = append(many, member{name: fmt.Sprint(i)})
	}
	deep := func(prefix string) (m []member) {
		for i := range 100 {
			m = append(m, member{name: strings.Repeat(prefix+fmt.Sprint(i)+"/", 60) + "f"})
		}
		return m
	}
	zero := 0
	big := strings.Repeat("x", unit+1)
	return map[string]want{
		"not a zip":     {[]byte("no zip at all"), errdefs.Invalid, "not a valid zip"},
		"empty":         {nil, errdefs.Invalid, "not a valid zip"},
		"truncated":     {with(member{name: "f", content: "x"})[:90], errdefs.Invalid, "not a valid zip"},
		"no manifest":   {zipOf(t, member{name: "a/manifest.yaml", content: goodManifest}), errdefs.Invalid, "no manifest.yaml"},
		"only manifest": {zipOf(t, manifest()), "", ""},

		"513 entries":            {zipOf(t, many...), errdefs.Exhausted, "512"},
		"file too large":         {with(member{name: "f", content: big}), errdefs.Exhausted, "limit of a file"},
		"file too large by word": {with(member{name: "f", content: "x", size: u32(1 << 31)}), errdefs.Exhausted, "limit of a file"},
		"files too large": {with(member{name: "1", content: big[1:]}, member{name: "2", content: big[1:]}, member{name: "3", content: big[1:]},
			member{name: "4", content: big[1:]}), errdefs.Exhausted, "together"},
		"bomb":                       {with(member{name: "f", content: big[1:], deflate: true}), errdefs.Exhausted, "100 times"},
		"nothing packed":             {with(member{name: "f", content: "x", packed: u32(0), size: u32(1)}), errdefs.Exhausted, "100 times"},
		"manifest too large":         {yaml(goodManifest + "#" + strings.Repeat("x", 1<<20)), errdefs.Exhausted, "manifest.yaml"},
		"manifest too large deflate": {zipOf(t, member{name: "manifest.yaml", content: goodManifest + strings.Repeat("#", 2<<20), deflate: true}), errdefs.Exhausted, "manifest.yaml"},
		"too many directories":       {with(deep("d")...), errdefs.Exhausted, "directories"},
		"too deep":                   {with(member{name: strings.Repeat("d/", 65)}), errdefs.Exhausted, "parts"},
		"too long":                   {with(member{name: strings.Repeat("d", 1025)}), errdefs.Exhausted, "1024"},
		"part too long":              {with(member{name: strings.Repeat("d", 256)}), errdefs.Exhausted, "255"},
		"large central directory": {zipOf(t, func() (m []member) {
			for i := range 70 {
				m = append(m, member{name: strings.Repeat("n", 65000) + fmt.Sprint(i)})
			}
			return m
		}()...), errdefs.Exhausted, "list of entries"},

		"parent":           {with(member{name: "../f"}), errdefs.Invalid, "leaves"},
		"parent inside":    {with(member{name: "a/../b"}), errdefs.Invalid, "leaves"},
		"parent backslash": {with(member{name: `a\..\..\b`}), errdefs.Invalid, "leaves"},
		"parent last":      {with(member{name: "a/.."}), errdefs.Invalid, "leaves"},
		"absolute":         {with(member{name: "/etc/f"}), errdefs.Invalid, "absolute"},
		"absolute back":    {with(member{name: `\etc\f`}), errdefs.Invalid, "absolute"},
		"dot":              {with(member{name: "."}), errdefs.Invalid, "itself"},
		"dot directory":    {with(member{name: "././"}), errdefs.Invalid, "itself"},
		"empty name":       {with(member{name: ""}), errdefs.Invalid, "empty"},
		"NUL":              {with(member{name: "a\x00b"}), errdefs.Invalid, "not text"},
		"not UTF-8":        {with(member{name: "a\xff"}), errdefs.Invalid, "not text"},
		"drive":            {with(member{name: "c:/f"}), errdefs.Invalid, "drive"},
		"drive back":       {with(member{name: `c:\f`}), errdefs.Invalid, "drive"},
		"any drive":        {with(member{name: "1:f"}), errdefs.Invalid, "drive"},

		"duplicate":           {with(member{name: "f"}, member{name: "f"}), errdefs.Invalid, "twice"},
		"duplicate manifest":  {with(manifest()), errdefs.Invalid, "twice"},
		"duplicate by dots":   {with(member{name: "a/f"}, member{name: "a/./f"}), errdefs.Invalid, "twice"},
		"duplicate by slash":  {with(member{name: "a/f"}, member{name: `a\f`}), errdefs.Invalid, "twice"},
		"duplicate directory": {with(member{name: "d/"}, member{name: "d//"}), errdefs.Invalid, "twice"},
		"file and directory":  {with(member{name: "d"}, member{name: "d/"}), errdefs.Invalid, "twice"},
		"below a file":        {with(member{name: "f"}, member{name: "f/g"}), errdefs.Invalid, "is a file"},
		"above entries":       {with(member{name: "f/g"}, member{name: "f"}), errdefs.Invalid, "below it"},

		"symlink":           {with(member{name: "l", content: "/etc/passwd", mode: 0o120777}), errdefs.Invalid, "symbolic link"},
		"symlink directory": {with(member{name: "l/", mode: 0o120777}), errdefs.Invalid, "symbolic link"},
		"fifo":              {with(member{name: "p", mode: 0o010644}), errdefs.Invalid, "neither"},
		"device":            {with(member{name: "p", mode: 0o060644}), errdefs.Invalid, "neither"},
		"socket":            {with(member{name: "p", mode: 0o140644}), errdefs.Invalid, "neither"},
		"directory as file": {with(member{name: "d", mode: 0o040755}), errdefs.Invalid, "directory by its type"},
		"file as directory": {with(member{name: "d/", mode: 0o100644}), errdefs.Invalid, "file by its type"},
		"directory content": {with(member{name: "d/", content: "x"}), errdefs.Invalid, "has content"},

		"encrypted":     {with(member{name: "f", content: "x", flags: 1}), errdefs.Invalid, "encrypted"},
		"other method":  {with(member{name: "f", content: "x", method: 12}), errdefs.Invalid, "method 12"},
		"overlap":       {with(member{name: "a", content: "aaaa"}, member{name: "b", content: "aaaa", at: &zero}), errdefs.Invalid, "overlap"},
		"wrong crc":     {zipOf(t, member{name: "manifest.yaml", content: goodManifest, crc: u32(1)}), errdefs.Invalid, "checksum"},
		"packed beyond": {with(member{name: "f", content: "x", packed: u32(1 << 31), size: u32(1)}), errdefs.Invalid, "more than the archive"},

		"shadow package":  {with(member{name: "langbot_plugin/__init__.py"}), errdefs.Invalid, "SDK"},
		"shadow module":   {with(member{name: "langbot_plugin.py"}), errdefs.Invalid, "SDK"},
		"shadow compiled": {with(member{name: "Langbot_Plugin.cpython-311-x86_64-linux-gnu.so"}), errdefs.Invalid, "SDK"},
		"shadow by dots":  {with(member{name: `.\langbot_plugin\__init__.py`}), errdefs.Invalid, "SDK"},
		"no shadow below": {with(member{name: "lib/langbot_plugin/__init__.py"}), "", ""},
		"no shadow name":  {with(member{name: "langbot_plugins/x.py"}), "", ""},

		"manifest not UTF-8":    {yaml("kind: \xff"), errdefs.Invalid, "UTF-8"},
		"manifest not YAML":     {yaml("a: [b"), errdefs.Invalid, "YAML"},
		"manifest list":         {yaml("- a"), errdefs.Invalid, "mapping"},
		"manifest empty":        {yaml(""), errdefs.Invalid, "YAML"},
		"manifest two":          {yaml(goodManifest + "---\na: b\n"), errdefs.Invalid, "more than one"},
		"other kind":            {yaml(strings.Replace(goodManifest, "Plugin", "Bot", 1)), errdefs.Invalid, "kind"},
		"no author":             {yaml("kind: Plugin\nmetadata: {name: n, version: v}"), errdefs.Invalid, "author"},
		"null name":             {yaml("kind: Plugin\nmetadata: {author: a, name: ~, version: v}"), errdefs.Invalid, "metadata.name"},
		"blank version":         {yaml("kind: Plugin\nmetadata: {author: a, name: n, version: ' '}"), errdefs.Invalid, "metadata.version"},
		"slash in name":         {yaml("kind: Plugin\nmetadata: {author: a, name: b/../c, version: v}"), errdefs.Invalid, "slash"},
		"aliases of aliases":    {yaml(goodManifest + bombOf(9)), errdefs.Exhausted, "100000 values"},
		"nested too deep":       {yaml(goodManifest + "x: " + strings.Repeat("[", 200) + strings.Repeat("]", 200)), errdefs.Exhausted, "nested"},
		"alias of itself":       {yaml(goodManifest + "x: &a [*a]\n"), errdefs.Exhausted, "nested"},
		"own tag":               {yaml(goodManifest + "x: !thing y\n"), errdefs.Invalid, "tag"},
		"manifest is directory": {zipOf(t, member{name: "manifest.yaml/"}), errdefs.Invalid, "no manifest.yaml"},
	}
}

// bombOf is a document whose aliases stand for 10^n values.
func bombOf(n int) string {
	var b strings.Builder
	b.WriteString("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n")
	for i := 1; i < n; i++ {
		fmt.Fprintf(&b, "a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i-1), 10), ","))
	}
	return b.String()
}

func TestArchiveRules(t *testing.T) {
	t.Parallel()
	for name, c := range refusals(t, 16<<20) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for how, install := range map[string]func() error{
				"inspect": func() error { _, err := Inspect(c.archive); return err },
				"extract": func() error { _, err := ExtractTo(t.Context(), c.archive, t.TempDir()); return err },
				"install": func() error {
					_, err := openStore(t, Config{}).Install(t.Context(), digestOf(c.archive), c.archive)
					return err
				},
			} {
				err := install()
				if c.code == "" {
					if err != nil {
						t.Errorf("%s: %v", how, err)
					}
					continue
				}
				if !errdefs.Is(err, c.code) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("%s: got %v (%s), want %s saying %q", how, err, errdefs.CodeOf(err), c.code, c.says)
				}
			}
		})
	}
}

// AS-10: what the headers hide shows when the bytes come, and no part of the file stays.
func TestStreamedSizes(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&b, "%x ", i*i*7919)
	}
	long := b.String()
	for name, m := range map[string]member{
		"more than said":   {name: "f", content: long, deflate: true, size: u32(100)},
		"less than said":   {name: "f", content: long, deflate: true, size: u32(40_000)},
		"stored more":      {name: "f", content: long, size: u32(100)},
		"stored less":      {name: "f", content: long, packed: u32(500)},
		"not deflated":     {name: "f", content: long, method: 8},
		"checksum":         {name: "f", content: long, crc: u32(7)},
		"deflate checksum": {name: "f", content: long, deflate: true, crc: u32(7)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			archive := zipOf(t, manifest(), m)
			dir := t.TempDir()
			if _, err := ExtractTo(t.Context(), archive, dir); !errdefs.Is(err, errdefs.Invalid) {
				t.Errorf("extract: %v", err)
			}
			if _, err := os.Lstat(filepath.Join(dir, "f")); !os.IsNotExist(err) {
				t.Errorf("a part of the file was left: %v", err)
			}
			s := openStore(t, Config{})
			if _, err := s.Install(t.Context(), digestOf(archive), archive); !errdefs.Is(err, errdefs.Invalid) {
				t.Errorf("install: %v", err)
			}
			nothingIn(t, s)
		})
	}
}

func TestManifest(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ yaml, author, version, key, value string }{
		"plain":          {goodManifest, "tester", "1.10", "kind", "Plugin"},
		"last key wins":  {goodManifest + "kind: Plugin\nx: 1\nx: 2\n", "tester", "1.10", "x", "2"},
		"number author":  {"kind: Plugin\nmetadata: {author: 007, name: n, version: 2}", "007", "2", "kind", "Plugin"},
		"aliased":        {"a: &a me\nkind: Plugin\nmetadata: {author: *a, name: n, version: '3'}", "me", "3", "a", "me"},
		"merged":         {"b: &b {x: 1, y: 2}\nm: {<<: *b, y: 3}\n" + goodManifest, "tester", "1.10", "m", "map[x:1 y:3]"},
		"keys of a kind": {"m: {1: a, true: b, ~: c}\n" + goodManifest, "tester", "1.10", "m", "map[1:a <nil>:c true:b]"},
		"date":           {"x: 2024-01-01\n" + goodManifest, "tester", "1.10", "x", "2024-01-01"},
		"unicode":        {"x: 插件\n" + goodManifest, "tester", "1.10", "x", "插件"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := Inspect(zipOf(t, member{name: "manifest.yaml", content: c.yaml}))
			if err != nil {
				t.Fatal(err)
			}
			if m.Author != c.author || m.Version != c.version || fmt.Sprint(m.Raw[c.key]) != c.value {
				t.Errorf("got %q %q %v", m.Author, m.Version, m.Raw[c.key])
			}
		})
	}
}
